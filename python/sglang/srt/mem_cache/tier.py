"""Where a decode tree's KV is kept beside its pool: what admission and the scheduler ask. Of itself nothing keeps any;
an extra gives its tree a `Tier` of its own.

A *save* is a copy of one node's pages. The node is locked until the copy has been taken, so its pages are not given to
others meanwhile. A *load* brings pages back: before a request is admitted, where the tier's own tree or the worker's
takes them in (`fetch`), or into the request's own pages beside what prefill sends (`lock`, `load`). The trees of TP
ranks are replicas, so ranks begin the same copies in the same order; only whether one has ended is reduced.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefix_reader import NOTHING, PrefixPeek

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["NO_TIER", "Tier"]


class Tier:
    """One rank's tier, as admission and the scheduler see it. This one keeps nothing."""

    # In messages.
    name = "a tier"

    @property
    def busy(self) -> bool:
        """Whether anything is being copied, or soon will be, or a request waits for it."""
        return False

    def know_live(self, live: Callable[[], LiveReqs], growth: Callable[[LiveReqs], int]) -> None:
        """live: the requests of the worker that hold KV. growth: tokens that admission keeps for their next steps."""

    # ---- before a request is admitted ----

    def fetch(self, req: Req, entry: QueueEntry) -> None:
        """Begin to bring into the worker what it lacks of a new request's prompt."""

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing more to be brought."""
        return True

    def leave(self, rid: str) -> None:
        """``rid`` has been admitted or is gone; on all ranks in the same step."""

    # ---- what is copied into a request's own pages ----

    def watch(self, token_ids: Sequence[int], extra_key: str | None) -> Any:
        """Begin to watch what the tier has of a prompt, ``length`` tokens, which is then evicted last."""
        return None

    def end_watch(self, watch: Any) -> None:
        """End it."""

    def found(self, watch: Any, held: int) -> PrefixPeek:
        """What the tier has of a prompt, if that is more than the ``held`` tokens that the tree has."""
        return NOTHING

    def found_of(self, token_ids: Sequence[int], extra_key: str | None, held: int) -> PrefixPeek:
        """The same of a prompt that nobody watches."""
        return NOTHING

    def lock(self, found: PrefixPeek, held: int, priority: int) -> Any:
        """Keep what was found until `let_go`; the load of a request, which has pages for it once it is admitted.

        Of a load, ``done`` and ``wait`` are called, and ``end`` and ``known`` read: the tokens of the prompt down to
        its end, and whether a prefill has what ends there.
        """
        raise NotImplementedError

    def load(self, load: Any, req: Req, rows: Any) -> None:
        """Begin to copy into the pages of ``req``, and set its ``host_prefix_len``. What raises in it ends the worker,
        as in `RequestMemory.give`."""

    def let_go(self, load: Any) -> None:
        """A request is committed, or has failed; its copy has ended. On all ranks in the same step."""

    # ---- a step ----

    def begin_step(self, group: Any, alone: bool) -> Sequence[Any]:
        """Begin copies. Returns what the ranks of ``group`` are to poll together. alone: there is one."""
        return ()

    def end_step(self, polls: Sequence[int]) -> None:
        """Take in what they have agreed on."""

    # ---- figures ----

    def figures(self) -> list[int]:
        """What must be the same on all ranks, beside the figures of the tree and its pool."""
        return []

    def cached_details(self, req: Req) -> dict[str, int]:
        """What of ``cached_tokens_details`` the tier knows."""
        return {}

    def nodes_in_use(self) -> Sequence[TreeNode]:
        """The nodes of the tree that saves and loads have locked."""
        return ()

    @property
    def unreturned_tokens(self) -> int:
        """Tokens of the worker's pool that are outside its tree while they are read or written."""
        return 0

    def state(self) -> dict[str, Any]:
        """What ``kv_pool.host`` says, if anything."""
        return {}

    def places(self) -> dict[str, tuple[int, int]]:
        """Size and free tokens of its own pool."""
        return {}

    def faults(self) -> list[str]:
        """Every way in which it contradicts itself, of a worker without requests or copies."""
        return []

    # ---- ends ----

    def release_device(self) -> bool:
        """Wait for saves and give their nodes back to evictions; whether there were any. On all ranks alike."""
        return False

    def stop(self) -> None:
        """Use what it keeps no more, ever: the weights are about to change."""

    def wait(self) -> None:
        """Wait for copies to and from the pool, whose memory is about to be taken away."""


NO_TIER = Tier()
