"""Decode attention of the engine's ``triton`` backend that reads once what several running requests share.

Who shares what, and what of it pays, is in ``sglang_pd_radix/supplied/shared_prefix``, which CPU hosts use as well.

option.py           the option, what it is refused with, and where it does not apply
running_groups.py   what a batch on a device shares, found without waiting for the device
triton_plan.py      the pieces of shared KV of a step, as one array
triton_kernels.py   the computation
triton_shared.py    the engine's interface

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""
