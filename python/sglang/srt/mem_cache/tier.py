"""Where a decode tree's KV is kept beside its pool: what host memory and a PegaFlow server have in common.

A *save* is a copy of one node's pages. The node is locked until the copy has been taken, so its pages are not given to
others meanwhile. A *load* brings pages back: before a request is admitted, where the tier's own tree or the worker's
takes them in (`fetch`), or into the request's own pages beside what prefill sends (`lock`, `load`). The trees of TP
ranks are replicas, so ranks begin the same copies in the same order; only whether one has ended is reduced.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefix_reader import NOTHING, PrefixPeek
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_admission import QueueEntry
    from sglang.srt.disaggregation.decode_budget import LiveReqs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.prefix_watch import Watch

__all__ = ["NO_TIER", "Saves", "Saving", "SavingTree", "Tier"]

# Part of the pool that may be held for saving.
SAVING_PART = 1 / 8


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

    def watch(self, token_ids: Sequence[int], extra_key: str | None) -> Watch | None:
        """Begin to watch what the tier has of a prompt, which is then evicted last."""
        return None

    def end_watch(self, watch: Watch) -> None:
        """End it."""

    def found(self, watch: Watch | None, held: int) -> PrefixPeek:
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


@dataclass(eq=False)
class Saving:
    """A save under way. nodes: what it is of; the first is locked, the others have been split off above it.

    copy: what is being copied; whoever has begun it knows when it has ended.
    """

    nodes: list[TreeNode]
    copy: Any
    tokens: int = field(init=False)
    locked: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.tokens = len(self.nodes[0].key)


class Saves:
    """The nodes of one tree that are being saved, and those that are to be, in order.

    ``saved`` of a node says whether it has been, ``saving`` what does it now. One that could not be is saved when it
    is used again.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree, page = tree, tree.page_size
        # Tokens of the pool that may be held, and that are being saved.
        self._limit = max(page, int(tree.token_to_kv_pool_allocator.size * SAVING_PART) // page * page)
        self.tokens = 0
        self.under_way: list[Saving] = []
        self.to_come: dict[TreeNode, bool] = {}

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self.to_come)

    def locked(self) -> list[TreeNode]:
        """The nodes that are locked."""
        return [saving.nodes[0] for saving in self.under_way if saving.locked]

    # ---- what happens to the tree ----

    def added(self, node: TreeNode, saved: Any = None) -> None:
        """``node`` is new. saved: what it is from the start, see above."""
        node.saved, node.saving = saved, None
        self.used(node)

    def used(self, node: TreeNode) -> None:
        """``node`` has been used, and is worth a save."""
        if node.saved is None and node.saving is None:
            self.to_come.setdefault(node, False)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower``. What is known is of both, as is a lock."""
        upper.saved, upper.saving = lower.saved, lower.saving
        if upper.saving is not None:
            upper.saving.nodes.append(upper)
        if lower in self.to_come:
            self.to_come[upper] = False

    def on_removal(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        self.to_come.pop(node, None)

    # ---- a save ----

    def begin(self, saving: Saving) -> None:
        """Hold what is being copied."""
        (node,) = saving.nodes
        node.saving = saving
        self._tree.inc_lock_ref(node)
        self.tokens += saving.tokens
        self.under_way.append(saving)

    def unlock(self, saving: Saving) -> None:
        """Let go of it on the device: the copy has been taken."""
        if saving.locked:
            saving.locked = False
            self._tree.dec_lock_ref(saving.nodes[0])

    def end(self, saving: Saving, saved: Any) -> None:
        """All ranks know of its end. saved: None if on one of them it was not."""
        self.under_way.remove(saving)
        self.tokens -= saving.tokens
        for node in saving.nodes:
            node.saving, node.saved = None, saved
        self.unlock(saving)

    def forget(self) -> None:
        """The tree is reset."""
        self.tokens = 0
        self.under_way.clear()
        self.to_come.clear()


class SavingTree(RadixCache):
    """A tree whose nodes are saved, from when it has ``saves`` on."""

    saves: Saves | None = None

    def _record_store_event(self, node: TreeNode) -> None:
        """A new leaf is saved."""
        super()._record_store_event(node)
        if self.saves is not None:
            self.saves.added(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """A node that is met again may now be worth it; or it could not be saved before."""
        super()._inc_hit_count(node, chunked)
        # One that is being made is none yet.
        if self.saves is not None and hasattr(node, "saved"):
            self.saves.used(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """What is known of saves is known of both parts."""
        upper = super()._split_node(key, child, split_len)
        if self.saves is not None:
            self.saves.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.saves is not None:
            self.saves.on_removal(node)
