"""What prefill finds wrong with the states, or windows, that decode registers with it.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["unlike_states"]


def unlike_states(manager: Any, name: str) -> str | None:
    """Why a prefill rank cannot write its states, or windows, to the decode rank of this name; None if it can.

    manager: of the prefill rank. Also None where decode does not say how large they are, as without this package over
    NIXL. The engine finds a slot of decode's by its number and prefill's size: with another size it is that of another
    request.
    """
    registered = manager.decode_kv_args_table.get(name)
    ours, theirs = manager.kv_args.state_item_lens, getattr(registered, "dst_state_item_lens", [])
    if not theirs:
        return None
    if getattr(registered, "dst_attn_tp_size", manager.attn_tp_size) != manager.attn_tp_size:
        dims, their_dims = getattr(manager.kv_args, "state_dim_per_tensor", []), registered.dst_state_dim_per_tensor
        if dims and their_dims:
            # Of a slice, in which the engine cuts them.
            ours, theirs = _per_slice(ours, dims), _per_slice(theirs, their_dims)
    # A pipeline stage has some of the layers.
    if list(ours) == theirs if len(ours) == len(theirs) else set(ours) <= set(theirs):
        return None
    return (
        f"decode's states or windows have slots of {_sizes(theirs)} bytes and prefill's of {_sizes(ours)}. Give both "
        "the same model, --kv-cache-dtype and types of states (--mamba-ssm-dtype, SGLANG_MAMBA_SSM_DTYPE, "
        "SGLANG_MAMBA_CONV_DTYPE)"
    )


def _per_slice(sizes: Sequence[int], dims: Sequence[int]) -> list[int]:
    # Dimensions of what is not sent, for speculation, come behind.
    return [size // dim for size, dim in zip(sizes, dims, strict=False)]


def _sizes(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, dict.fromkeys(sizes)))
