"""What of the KV pool drafts take.

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
    """What a request takes beyond its tokens where steps draft. Tokens; nothing without speculation.

    held: allocated ahead of what is committed. free: what must be free beside that before each step of a request,
    whole pages; where all others have been retracted and it is not, the engine ends the request.
    """

    held: int = 0
    free: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> DraftSlots:
        """Of a decode worker, by the engine's own figures."""
        algorithm, allocator = scheduler.spec_algorithm, scheduler.token_to_kv_pool_allocator
        if algorithm.is_none():
            return cls()
        # Of its requests it looks at the number.
        step = ScheduleBatch(
            [None],
            token_to_kv_pool_allocator=allocator,
            enable_overlap=scheduler.enable_overlap,
            spec_algorithm=algorithm,
        )
        # An overlapped step has slots allocated for the one after it, too; any other gives back what it did not commit.
        held = 2 * get_alloc_len_per_decode(scheduler.server_args) if step.is_spec_v2 else 0
        return cls(held, step.new_tokens_required_next_decode())


@dataclass(frozen=True)
class DraftLengths(Lengths):
    """What requests that draft come to. pool_size: what there is in all."""

    pool_size: int
    drafts: DraftSlots

    def at_end(self, num_tokens: int, left: int) -> int:
        """Adds drafts, as far as the pool goes: a request that could just so fit without must not wait for ever."""
        page, (held, free) = self.page_size, self.drafts
        drafting = pages(num_tokens + min(left, self.most_new_tokens) + held, page) * page + free
        return max(super().at_end(num_tokens, left), min(drafting, self.pool_size // page * page))

    @property
    def lacked_at_most(self) -> int:
        """Adds drafts."""
        page, (held, free) = self.page_size, self.drafts
        return pages(self.most_new_tokens + held, page) * page + free
