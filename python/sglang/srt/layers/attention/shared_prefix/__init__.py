"""Decode attention that reads once what several running requests share.

prefixes.py         which running requests share which KV slots
levels.py           which of that is worth reading together
written_rows.py     which rows of the table are not what they were in the step before

These serve CPU hosts too (``sglang_pd_radix/supplied/cpu_host/attention``). For the engine's ``triton`` backend:

option.py           the option, what it is refused with, and where it does not apply
running_groups.py   what a batch on a device shares, found without waiting for the device
triton_plan.py      the pieces of shared KV of a step, as one array
triton_kernels.py   the computation
triton_shared.py    the engine's interface

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""
