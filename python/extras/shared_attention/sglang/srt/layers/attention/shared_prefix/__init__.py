"""Decode attention of the engine's ``triton`` backend that reads KV shared by running requests once.

The choice of what to share is in ``sglang_pd_radix/supplied/shared_prefix``, which CPU hosts use as well.

option.py           the option, and where it is refused or has no effect
running_groups.py   shared prefixes of a batch on a device, found without waiting for the device
triton_plan.py      the shared pieces of a step, as one array
triton_kernels.py   the kernels
triton_shared.py    the engine's interface

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""
