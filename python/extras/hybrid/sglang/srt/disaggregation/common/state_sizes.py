"""Compares prefill's state sizes with those that decode registers.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["unlike_states"]


def unlike_states(manager: Any, name: str) -> str | None:
    """Why a prefill rank cannot write its states or windows to the decode rank ``name``; None if it can.

    manager: the prefill rank's. Also None if decode does not report sizes, as over NIXL without this package. The
    engine computes the address of decode's slot from prefill's size: another size would hit another request's slot.
    """
    registered = manager.decode_kv_args_table.get(name)
    ours, theirs = manager.kv_args.state_item_lens, getattr(registered, "dst_state_item_lens", [])
    if not theirs:
        return None
    if getattr(registered, "dst_attn_tp_size", manager.attn_tp_size) != manager.attn_tp_size:
        dims, their_dims = getattr(manager.kv_args, "state_dim_per_tensor", []), registered.dst_state_dim_per_tensor
        if dims and their_dims:
            # Compare sizes per slice of the dimension that the engine cuts.
            ours, theirs = _per_slice(ours, dims), _per_slice(theirs, their_dims)
    # A pipeline stage has some of the layers only.
    if list(ours) == theirs if len(ours) == len(theirs) else set(ours) <= set(theirs):
        return None
    return (
        f"decode's states or windows have slots of {_sizes(theirs)} bytes and prefill's of {_sizes(ours)}. Give both "
        "the same model, --kv-cache-dtype and types of states (--mamba-ssm-dtype, SGLANG_MAMBA_SSM_DTYPE, "
        "SGLANG_MAMBA_CONV_DTYPE)"
    )


def _per_slice(sizes: Sequence[int], dims: Sequence[int]) -> list[int]:
    # Dimensions of states that are not sent, for speculation, come last.
    return [size // dim for size, dim in zip(sizes, dims, strict=False)]


def _sizes(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, dict.fromkeys(sizes)))
