"""KV kept outside a decode tree's pool: nothing, unless an extra gives its tree another `Tier`.

A *save* copies one node, which is locked until the copy ends. A *load* brings pages back: into the
tree before the request is admitted (`fetch`), or into the request's own pages (`lock`, `load`). TP
ranks begin the same copies in the same order; they reduce only whether a copy has ended.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees
of other packages.
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


class Tier:
    """The tier of one rank. This one keeps nothing.

    The extra kept_kv calls `stop` and `wait`; metrics and pool_state read the figures.
    """

    # Its name in messages.
    name = "a tier"

    @property
    def busy(self) -> bool:
        """Whether a copy runs or is queued, or a request waits for one."""
        return False

    def know_live(self, live: Callable[[], LiveReqs], growth: Callable[[LiveReqs], int]) -> None:
        """live: requests that hold KV. growth: tokens that admission keeps for their next steps."""

    # ---- before a request is admitted ----

    def fetch(self, req: Req, entry: QueueEntry) -> None:
        """Begin to load the missing part of a new request's prompt."""

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` no longer waits for `fetch`."""
        return True

    def leave(self, rid: str) -> None:
        """``rid`` has been admitted or has ended; on all ranks in the same step."""

    # ---- loads into a request's own pages ----

    def watch(self, token_ids: Sequence[int], extra_key: str | None) -> Any:
        """Subscribe to a prefix: ``length`` is the tier's match, which is evicted last."""
        return None

    def end_watch(self, watch: Any) -> None:
        """End a prefix subscription."""

    def found(self, watch: Any, held: int) -> PrefixPeek:
        """The tier's match, if longer than ``held``, the tokens that the tree has."""
        return NOTHING

    def found_of(self, token_ids: Sequence[int], extra_key: str | None, held: int) -> PrefixPeek:
        """As `found`, for a prompt without a subscription."""
        return NOTHING

    def lock(self, found: PrefixPeek, held: int, priority: int) -> Any:
        """Lock what was found until `let_go`. Returns the load: its methods ``done`` and ``wait``,
        ``end`` (tokens of the prompt) and ``known`` (whether a prefill has computed this prefix).
        """
        raise NotImplementedError

    def load(self, load: Any, req: Req, rows: Any) -> None:
        """Begin the copy; set ``host_prefix_len`` of ``req``. An exception ends the worker."""

    def let_go(self, load: Any) -> None:
        """Release ``load`` once its copy has ended; on all ranks in the same step."""

    # ---- queue step ----

    def begin_step(self, group: Any, alone: bool) -> Sequence[Any]:
        """Begin copies. Returns those that ``group`` polls together. alone: it has one rank."""
        return ()

    def end_step(self, polls: Sequence[int]) -> None:
        """Apply the reduced polls."""

    # ---- figures ----

    def figures(self) -> list[int]:
        """More figures that must be equal on all ranks, as those of the tree and its pool."""
        return []

    def cached_details(self, req: Req) -> dict[str, int]:
        """The tier's part of ``cached_tokens_details``."""
        return {}

    def nodes_in_use(self) -> Sequence[TreeNode]:
        """Nodes of the tree that saves and loads have locked."""
        return ()

    @property
    def unreturned_tokens(self) -> int:
        """Tokens of the pool that copies use outside the tree."""
        return 0

    def report(self) -> dict[str, Any]:
        """Content of ``kv_pool.host``."""
        return {}

    def places(self) -> dict[str, tuple[int, int]]:
        """Size and free tokens of its own pool."""
        return {}

    def faults(self) -> list[str]:
        """Faults of the tier on a worker without requests and copies."""
        return []

    # ---- release and stop ----

    def stop(self) -> None:
        """Never use the stored KV again: the weights are about to change."""

    def wait(self) -> None:
        """Wait for copies to and from the pool before its memory is released."""


NO_TIER = Tier()
