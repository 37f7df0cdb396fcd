"""KV memory that drafts take.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang.srt.disaggregation.decode_radix.budget import Lengths
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import get_alloc_len_per_decode

__all__ = ["DraftLengths", "DraftSlots"]


class DraftSlots(NamedTuple):
    """Tokens that a request takes for drafts; zeros without speculation.

    held: allocated beyond the committed tokens. free: free tokens beside that before each step, whole pages; the engine
    ends a request for lack of these once all others have been retracted.
    """

    held: int = 0
    free: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> DraftSlots:
        """By the engine's own figures for a decode worker."""
        algorithm, allocator = scheduler.spec_algorithm, scheduler.token_to_kv_pool_allocator
        if algorithm.is_none():
            return cls()
        # The engine reads the number of its requests only.
        step = ScheduleBatch(
            [None],
            token_to_kv_pool_allocator=allocator,
            enable_overlap=scheduler.enable_overlap,
            spec_algorithm=algorithm,
        )
        # An overlapped step also allocates for the next one; others release what they did not commit.
        held = 2 * get_alloc_len_per_decode(scheduler.server_args) if step.is_spec_v2 else 0
        return cls(held, step.new_tokens_required_next_decode())


@dataclass(frozen=True)
class DraftLengths(Lengths):
    """Memory of requests that draft. pool_size: of the whole pool, tokens."""

    pool_size: int
    drafts: DraftSlots

    def at_end(self, num_tokens: int, left: int) -> int:
        """Adds drafts, up to the pool's size: a request that just fits without them must not wait for ever."""
        page, (held, free) = self.page_size, self.drafts
        drafting = pages(num_tokens + min(left, self.most_new_tokens) + held, page) * page + free
        return max(super().at_end(num_tokens, left), min(drafting, self.pool_size // page * page))

    @property
    def lacked_at_most(self) -> int:
        """Adds drafts."""
        page, (held, free) = self.page_size, self.drafts
        return pages(self.most_new_tokens + held, page) * page + free
