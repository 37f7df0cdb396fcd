"""The paged allocator's Triton kernels in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
) -> None:
    """Give each request KV slots for its tokens ``[prefix_len, seq_len)``, all requests one after another in ``out``.

    The partly filled page of a prefix is filled up first (``last_loc`` is the slot of its last token, -1 without a
    prefix); further tokens take pages from the front of ``free_pages``, in request order. Lengths are in tokens,
    ``free_pages`` in pages, ``out`` in slots (page * page_size + offset). Where ``free_pages`` runs out the slots are
    meaningless: the caller compares the counts afterwards and drops the result.
    """
    import torch

    prefix, seq, last = prefix_lens.long(), seq_lens.long(), last_loc.long()
    pages_held = (prefix + page_size - 1) // page_size
    pages_new = (seq + page_size - 1) // page_size - pages_held
    lens = seq - prefix
    owner = torch.repeat_interleave(lens)
    token = torch.arange(len(owner)) - (lens.cumsum(0) - lens)[owner] + prefix[owner]

    # Position of the token's page in free_pages; negative while the token still fits the page its prefix ends in.
    order = token // page_size - pages_held[owner]
    slots = last[owner] + 1 + token - prefix[owner]
    if len(free_pages):
        source = (order + (pages_new.cumsum(0) - pages_new)[owner]).clamp(0, len(free_pages) - 1)
        slots = torch.where(order < 0, slots, free_pages[source] * page_size + token % page_size)
    out[: len(slots)] = slots


class TorchKernel:
    """Has a Triton kernel's calling form, ``kernel[grid](*args)``, and runs a torch function instead."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    extend_slots(prefix_lens, seq_lens, last_loc, free_pages, out, page_size)


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    # One more token per request is an extension by one.
    extend_slots(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size)


def _patch_allocator(module: Any) -> None:
    module.alloc_extend_kernel = TorchKernel(_alloc_extend)
    module.alloc_decode_kernel = TorchKernel(_alloc_decode)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.allocator": _patch_allocator,
}
