"""Radix caches whose pages are also kept in a PegaFlow server, which other engine processes on the machine share.

Upstream: not in the engine (PR #17221 was closed).
"""

from __future__ import annotations

import enum
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.pegaflow_pages import first_hash, page_hashes
from sglang.srt.mem_cache.pegaflow_room import NOBODY, Live, Room
from sglang.srt.mem_cache.pegaflow_session import Load, Lookup, PegaFlowSession, Save
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

__all__ = ["PegaFlowDecodeRadixCache", "PegaFlowRadixCache", "PegaFlowTree"]

# A question or a load that takes longer is a miss; so is room for a load, once a request waits for nothing else.
TIMEOUT_S = 5.0
# Part of the pool that may be held for saving, and part that may be loaded for requests not looked at since.
SAVING_PART = 1 / 8
LOADING_PART = 1 / 2
# Saves that one step decides on, the oldest first, and requests that may wait at once; the others go without. It is the
# width of what TP ranks reduce.
SAVES_AGREED, MOST_OPEN = 64, 512
# Pages that one question names at most: gRPC servers take 4 MiB unless told otherwise.
MOST_ASKED = 100_000
# Tokens of prompts, about, that one step compares with the tree for requests that wait; and what a request counts for
# that has none there. The others have their turn in the next steps.
COMPARED, COMPARED_LEAST = 1 << 16, 1 << 10
# Steps in which loads may join those under way. Then all of these end first, and a request that there is no room for
# beside loads has a step without any.
ROUND_STEPS = 16
# More pages than any prompt has.
NEVER = 1 << 40
# A flush waits for what is under way: this often, this long each time.
DRAIN_ROUNDS, DRAIN_PAUSE_S = 500, 0.01


class Stage(enum.Enum):
    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"


@dataclass(eq=False)
class Saving:
    """A save under way. nodes: what it is of; the first is locked, the others have been split off above it."""

    save: Save
    nodes: list[TreeNode]


@dataclass(eq=False)
class Prefetch:
    """What a request waits for.

    tokens: its prompt up to what can be reused, whole pages. The server was asked for all of them in the step
    ``asked_in``, and has ``pages`` pages. start: tokens that the tree holds when the rest begins to be loaded; node:
    down to which it is locked meanwhile.
    """

    rid: str
    tokens: list[int]
    extra_key: str | None
    priority: int
    lookup: Lookup
    asked_in: int
    deadline: float
    stage: Stage = Stage.ASKED
    pages: int = 0
    start: int = 0
    load: Load | None = None
    node: TreeNode | None = None
    asked_for: bool = False
    left: bool = False
    given_up: bool = False
    # The step in which its prompt was last compared with the tree.
    looked_in: int = 0


def _timed(method: Callable) -> Callable:
    """Adds the time of an outermost call to ``seconds``, the scheduler thread's share of this."""

    @functools.wraps(method)
    def timed(self: PegaFlowTree, *args: Any, **kwargs: Any) -> Any:
        if self._timing:
            return method(self, *args, **kwargs)
        start, self._timing = time.perf_counter(), True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._timing = False
            self.seconds += time.perf_counter() - start

    return timed


class PegaFlowTree(RadixCache):
    """What both caches add to their tree. All of it runs in the scheduler thread, and none of it waits.

    Each node knows the hashes of its pages, chained from the root. A new node is saved in the next step, and locked
    until the server has read it. When a request arrives, the server is asked for its prompt. What it has beyond the
    tree is loaded into pages that belong to nobody else, which enter the tree when all have come. What the tree has and
    the server lacks is saved, once more if need be.

    All that TP ranks could see differently (answers, what has been saved or loaded) takes effect in `advance`, after
    one reduction over the ranks, so that their trees stay the same.
    """

    session: PegaFlowSession
    # The requests that hold KV; set by who knows them.
    live: Callable[[], Live] = staticmethod(lambda: NOBODY)
    attached = False
    tp_group: Any = None
    seconds = 0.0
    _timing = False
    _loaded_insert = False

    def attach(self, session: PegaFlowSession, tp_group: Any = None, saves: bool = True) -> None:
        """Begin to use ``session``; the tree must be empty.

        tp_group: the CPU group of the TP ranks, None for one rank. saves: False where another rank saves for this one.
        """
        self.attached, self.session, self.tp_group, self.saves = True, session, tp_group, saves
        size, page = self.token_to_kv_pool_allocator.size, self.page_size
        self._saving_limit = max(page, int(size * SAVING_PART) // page * page)
        self._loading_limit = int(size * LOADING_PART)
        self._saves: list[Saving] = []
        self._saving_tokens = 0
        # Nodes that are to be saved when there is room for it; a set in order.
        self._unsaved: dict[TreeNode, None] = {}
        self._open: list[Prefetch] = []
        self._by_rid: dict[str, Prefetch] = {}
        # Tokens loaded for a request that has not been looked at since.
        self._ready: dict[str, int] = {}
        self._loading_tokens = 0
        # What was under way when the tree was reset.
        self._fenced: list[Save | Load] = []
        self._fenced_tokens = 0
        # Steps so far, and those since loads last began without others under way.
        self._steps = self._round = 0

    @property
    def busy(self) -> bool:
        """Whether pages are being saved or loaded, or soon will be, or the server has been asked."""
        return self.attached and bool(self._saves or self._open or self._unsaved)

    def leave(self) -> None:
        """Stop using the server, as soon as nothing is under way: nothing new begins."""
        self.session.stop()

    def reset(self) -> None:
        assert not self.busy, "the tree is reset while the server reads or writes pages of it"
        super().reset()
        if self.attached:
            self._ready.clear()

    @property
    def unreturned_tokens(self) -> int:
        """Tokens outside the tree that the server may write to, or has not read when the tree was reset."""
        return self._loading_tokens + self._fenced_tokens

    def protected_size(self) -> int:
        """Adds the pages that nobody can be given."""
        return super().protected_size() + (self.unreturned_tokens if self.attached else 0)

    def nodes_in_use(self) -> list[TreeNode]:
        """The nodes that saves and loads have locked."""
        loading = [found.node for found in self._open if found.node is not None]
        return [saving.nodes[0] for saving in self._saves] + loading

    def pegaflow_state(self) -> dict[str, Any]:
        if not self.attached:
            return {"attached": False}
        return {
            "attached": True,
            "up": self.session.up,
            **asdict(self.session.counters),
            "saving_tokens": self._saving_tokens,
            "loading_tokens": self._loading_tokens,
            "fenced_tokens": self._fenced_tokens,
            "prefetches": len(self._open),
            "scheduler_seconds": self.seconds,
        }

    # ---- the tree's own changes ----

    def _record_store_event(self, node: TreeNode) -> None:
        """Adds to what is done with each new leaf that its pages get their hashes, and are saved."""
        super()._record_store_event(node)
        if self.attached:
            self._take_in(node)

    @_timed
    def _take_in(self, node: TreeNode) -> None:
        at_root = node.parent is self.root_node
        before = first_hash(node.key.extra_key) if at_root else node.parent.page_hashes[-1]
        node.page_hashes = page_hashes(node.key.token_ids, self.page_size, before)
        # The step in which the server was known to have it, and what saves it now.
        node.saved, node.saving = (self._steps if self._loaded_insert else None), None
        self._want_saved(node)

    def _want_saved(self, node: TreeNode) -> None:
        if node.saved is None and node.saving is None and not self.session.stopped:
            self._unsaved[node] = None

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """Adds that a node which could not be saved is saved when it is met again."""
        super()._inc_hit_count(node, chunked)
        if self.attached and hasattr(node, "page_hashes"):
            self._want_saved(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Adds that the hashes are divided, and both parts share what is known. A lock on ``child`` holds both."""
        upper = super()._split_node(key, child, split_len)
        if self.attached:
            pages = split_len // self.page_size
            upper.page_hashes, child.page_hashes = child.page_hashes[:pages], child.page_hashes[pages:]
            upper.saved, upper.saving = child.saved, child.saving
            if upper.saving is not None:
                upper.saving.nodes.append(upper)
            if child in self._unsaved:
                self._unsaved[upper] = None
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Adds that a node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.attached:
            self._unsaved.pop(node, None)

    # ---- saving ----

    def _start_saves(self, room: Callable[[], Room]) -> None:
        """Have nodes saved as far as they do not hold too much of the pool; a large one in parts."""
        if self.session.stopped:
            self._unsaved.clear()
        while self._unsaved:
            node = next(iter(self._unsaved))
            tokens = min(len(node.key), self._saving_limit)
            if self._saving_tokens + tokens > self._saving_limit:
                return
            if not room().take(node):
                # Others have their turn in the next step.
                self._unsaved[node] = self._unsaved.pop(node)
                return
            self._save(node if tokens == len(node.key) else self._split_node(node.key, node, tokens))

    def _save(self, node: TreeNode) -> None:
        self._unsaved.pop(node, None)
        # Its slots are copied on every split, so these stay what they are.
        save = Save(node.value, node.page_hashes)
        node.saving = Saving(save, [node])
        self.inc_lock_ref(node)
        self._saving_tokens += len(node.key)
        self._saves.append(node.saving)
        if self.saves:
            self.session.save(save)
        else:
            save.done = save.saved = True

    def _end_save(self, saving: Saving, saved: bool) -> None:
        """Unlock what a save held. saved: on all ranks; else it is saved again when it is met again."""
        self._saves.remove(saving)
        self._saving_tokens -= len(saving.save.slots)
        for node in saving.nodes:
            node.saving, node.saved = None, self._steps if saved else None
        self.dec_lock_ref(saving.nodes[0])

    def _compare(self, found: Prefetch, path: list[TreeNode], pages: int, missing: int) -> None:
        """Learn from an answer what of the tree the server has, and have saved what it lacks: it may have dropped pages
        to make room, or have been started anew.

        path: the nodes that hold its tokens. pages: that all ranks have found. missing: of the ranks that were
        answered, the first page that one lacks.
        """
        asked, end = len(found.lookup.hashes), 0
        for node in path:
            end += len(node.page_hashes)
            if end <= pages:
                node.saved = self._steps if node.saved is None else node.saved
                self._unsaved.pop(node, None)
            elif missing < min(end, asked) and (node.saved is None or node.saved < found.asked_in):
                # What has just been saved may not be in the server's index yet.
                node.saved = None
                self._want_saved(node)

    # ---- loading ----

    @_timed
    def prefetch(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int = 0) -> None:
        """Ask the server for ``token_ids``, whole pages. The request ``rid`` waits for what the tree lacks of them."""
        if not self.attached or self.disable or self.session.stopped:
            return
        if rid in self._by_rid or len(self._open) >= MOST_OPEN:
            return
        tokens = list(token_ids[: len(token_ids) // self.page_size * self.page_size])
        if not tokens:
            return
        held, path = self._held(tokens, extra_key)
        hashes = [name for node in path for name in node.page_hashes][: held // self.page_size]
        hashes += page_hashes(tokens[held:], self.page_size, hashes[-1] if hashes else first_hash(extra_key))
        lookup = Lookup(hashes[:MOST_ASKED])
        found = Prefetch(rid, tokens, extra_key, priority, lookup, self._steps, time.monotonic() + TIMEOUT_S)
        self._open.append(found)
        if held < len(tokens):
            self._by_rid[rid] = found
        else:
            # Nobody waits for it.
            found.left = True
        self.session.ask(lookup)

    def _held(self, tokens: list[int], extra_key: str | None) -> tuple[int, list[TreeNode]]:
        """How many of ``tokens`` the tree holds, and the nodes that hold them, the last one maybe in part.

        Nothing is split, and no access time changes.
        """
        held, node = 0, self.root_node
        path: list[TreeNode] = []
        while held < len(tokens):
            child = node.children.get(self.get_child_key_fn(RadixKey(tokens[held : held + self.page_size], extra_key)))
            if child is None:
                break
            length, ours = len(child.key), tokens[held : held + len(child.key)]
            if child.key.token_ids != ours:
                # Page by page, which takes longer.
                length = self.key_match_fn(child.key, RadixKey(ours, extra_key)) // self.page_size * self.page_size
            if not length:
                break
            node = child
            path.append(node)
            held += length
            if length < len(child.key):
                break
        return held, path

    def check_prefetch_progress(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing. The engine asks before it matches a request for its batch."""
        found = self._by_rid.get(rid)
        if found is not None:
            found.asked_for = True
        return found is None

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Tokens that were loaded for ``rid``, which is now being matched."""
        return self._ready.pop(rid, 0)

    def release_aborted_request(self, rid: str) -> None:
        """``rid`` is gone. What is being loaded for it enters the tree all the same."""
        self._ready.pop(rid, None)
        found = self._by_rid.pop(rid, None)
        if found is not None:
            found.left = True

    @_timed
    def advance(self) -> bool:
        """Take note of what has been saved, found and loaded. Called once per step, on all ranks.

        Returns whether requests may now be given more than before.
        """
        self._steps += 1
        if not self.busy and not self._fenced:
            return False
        free, now = self._free(), time.monotonic()
        saves, fenced, watched = self._saves[:SAVES_AGREED], self._fenced[:], self._open[:]
        facts: list[int] = [saving.save.done + saving.save.saved if saving.save.done else 0 for saving in saves]
        facts += [end.done if isinstance(end, Save) else end.final for end in fenced]
        facts += [self._fact(found, now) for found in watched]
        facts += [self._missing(found) for found in watched]
        # Decode comes to a request when its handshake is done, which each rank sees in a step of its own.
        facts += [found.asked_for for found in watched]
        if self.tp_group is not None:
            reduced = torch.tensor(facts, dtype=torch.int64)
            torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self.tp_group)
            facts = reduced.tolist()
        each = iter(facts)
        saved, done, known, missing, asked = (
            [next(each) for _ in part] for part in (saves, fenced, watched, watched, watched)
        )
        for saving, fact in zip(saves, saved, strict=True):
            if fact:
                self._end_save(saving, fact == 2)
        for one, fact in zip(fenced, done, strict=True):
            if fact:
                self._unfence(one)
        room = functools.cache(lambda: Room(self, self.live()))
        spent = 0
        each_found = zip(watched, known, missing, asked, strict=True)
        for found, fact, lacks, is_asked in sorted(each_found, key=lambda one: one[0].looked_in):
            if found.stage is Stage.LOADING:
                self._follow_load(found, fact)
            elif not self._is_settled(found, fact, lacks, bool(is_asked)) and spent < COMPARED:
                spent += self._decide(found, fact, lacks, bool(is_asked), room)
        for found in self._open:
            # Who has not had a turn has still been come to.
            found.asked_for &= found.stage is Stage.FOUND and found.looked_in != self._steps
        self._start_saves(room)
        self._round = self._round + 1 if self._loading_tokens else 0
        return self._free() > free

    def _free(self) -> int:
        return self.token_to_kv_pool_allocator.available_size() + self.evictable_size()

    # Facts of a load; the least over the ranks is what counts. Of a question: -1, or how many pages were found. Of what
    # was found: whether the request still waits for room.
    _UNDER_WAY, _LATE, _FAILED, _LOADED = range(4)

    def _fact(self, found: Prefetch, now: float) -> int:
        """What this rank knows of ``found``. Late is final for the request, not for the pages."""
        late = now > found.deadline
        if found.stage is Stage.ASKED:
            if found.lookup.hits is None and late:
                if not found.lookup.fetching:
                    self.session.late()
                return 0
            return -1 if found.lookup.hits is None else found.lookup.hits
        if found.stage is Stage.LOADING:
            load = found.load
            assert load is not None
            if load.final:
                return self._FAILED if load.failed else self._LOADED
            if late and not load.failed and not found.given_up:
                self.session.late()
            return self._LATE if late or load.failed else self._UNDER_WAY
        return not late

    def _missing(self, found: Prefetch) -> int:
        """The first page that the server has not, as far as this rank has been told."""
        lookup = found.lookup
        told = found.stage is Stage.ASKED and lookup.hits is not None and not lookup.failed
        return lookup.hits if told and lookup.hits is not None else NEVER

    def _follow_load(self, found: Prefetch, fact: int) -> None:
        if fact == self._LATE:
            self._give_up(found)
        elif fact in (self._FAILED, self._LOADED):
            self._end_load(found, fact == self._LOADED)

    def _is_settled(self, found: Prefetch, fact: int, missing: int, asked: bool) -> bool:
        """Whether nothing is to be looked up for it: no answer yet, or no use of one. Costs the same for any prompt."""
        if found.stage is Stage.ASKED:
            if fact < 0:
                return True
            given_up = fact == 0 and missing >= NEVER
        else:
            if asked and found.deadline == math.inf:
                # From now on it waits for nothing but room.
                found.deadline = time.monotonic() + TIMEOUT_S
            given_up = found.left or not fact
        if given_up or self.session.stopped:
            self._close(found)
            return True
        return False

    def _decide(self, found: Prefetch, fact: int, missing: int, asked: bool, room: Callable[[], Room]) -> int:
        """Learn from an answer, and begin a load if there is room; what that has cost, in tokens compared."""
        found.looked_in = self._steps
        held, path = self._held(found.tokens, found.extra_key)
        if found.stage is Stage.ASKED:
            self._compare(found, path, fact, missing)
            found.stage, found.pages, found.deadline = Stage.FOUND, fact, math.inf
        node = path[-1] if path else self.root_node
        tokens = found.pages * self.page_size - held
        if tokens <= 0 or tokens > self.token_to_kv_pool_allocator.size or found.left:
            self._close(found)
        elif self._is_its_turn(tokens, asked) and room().take(node, tokens):
            self._start_load(found, held, node, tokens)
        return held + COMPARED_LEAST

    def _is_its_turn(self, tokens: int, asked: bool) -> bool:
        """Whether so much may be loaded now: else what was loaded earlier would go before it is used.

        The first that the scheduler has come to since the last step may, alone, so that none waits for ever.
        """
        under_way = self._loading_tokens
        if self._round >= ROUND_STEPS:
            return False
        return under_way + sum(self._ready.values()) + tokens <= self._loading_limit or (asked and not under_way)

    def _start_load(self, found: Prefetch, held: int, node: TreeNode, tokens: int) -> None:
        """Give pages to what follows the first ``held`` tokens, which end in ``node``.

        Only from now on the tree is locked: if it were while requests wait for room, nobody might ever get any.
        """
        self.inc_lock_ref(node)
        found.node = node
        allocator = self.token_to_kv_pool_allocator
        short = tokens - allocator.available_size()
        if short > 0:
            self._evict_for_load(short)
        slots = allocator.alloc(tokens)
        assert slots is not None, "a load was begun beyond what the pool has"
        found.stage, found.start, found.deadline = Stage.LOADING, held, time.monotonic() + TIMEOUT_S
        self._loading_tokens += tokens
        found.load = self.session.load(found.lookup, slots, skip=held // self.page_size)

    def _evict_for_load(self, tokens: int) -> None:
        self.evict(EvictParams(num_tokens=tokens))

    def _give_up(self, found: Prefetch) -> None:
        """Let the request go on without it. The pages stay with the server until it is done with them."""
        found.given_up = True
        self._unlock(found)
        if self._by_rid.get(found.rid) is found:
            del self._by_rid[found.rid]

    def _end_load(self, found: Prefetch, loaded: bool) -> None:
        assert found.load is not None
        slots = found.load.slots
        self._loading_tokens -= len(slots)
        if not loaded or found.given_up:
            self.token_to_kv_pool_allocator.free(slots)
            self._close(found)
            return
        start = found.start
        key = RadixKey(found.tokens[: start + len(slots)], found.extra_key)
        # The tree holds what comes before them, so of its slots only the number counts.
        before = torch.zeros(start, dtype=torch.int64, device=self.device)
        self._loaded_insert = True
        try:
            result = self.insert(InsertParams(key=key, value=torch.cat([before, slots]), priority=found.priority))
        finally:
            self._loaded_insert = False
        # What was computed here meanwhile.
        self.token_to_kv_pool_allocator.free(slots[: result.prefix_len - start])
        if not found.left:
            self._ready[found.rid] = len(slots)
        self._close(found)

    def _close(self, found: Prefetch) -> None:
        self._open.remove(found)
        if self._by_rid.get(found.rid) is found:
            del self._by_rid[found.rid]
        if found.load is None:
            self.session.drop(found.lookup)
        self._unlock(found)

    def _unlock(self, found: Prefetch) -> None:
        if found.node is not None:
            self.dec_lock_ref(found.node)
            found.node = None

    # ---- ends ----

    def drain(self) -> bool:
        """Wait for what is under way, at most some seconds. For a flush; whether nothing is any more."""
        for _ in range(DRAIN_ROUNDS):
            if not self.busy:
                return True
            self.advance()
            time.sleep(DRAIN_PAUSE_S)
        return not self.busy

    def fence(self) -> None:
        """Let go of what is under way, for a reset that does not wait for it, but for the pages; see `keep_fenced`."""
        for found in self._open:
            if found.load is None:
                self.session.drop(found.lookup)
            else:
                self._fenced.append(found.load)
        self._fenced += [saving.save for saving in self._saves]
        self._fenced_tokens = sum(len(one.slots) for one in self._fenced)
        self._saving_tokens = self._loading_tokens = 0
        for under_way in (self._saves, self._unsaved, self._open, self._by_rid):
            under_way.clear()

    def keep_fenced(self) -> None:
        """Take what the server may still read or write out of an allocator that has been cleared, until it is done."""
        if self._fenced:
            self.token_to_kv_pool_allocator.reserve(torch.cat([one.slots for one in self._fenced]))

    def _unfence(self, one: Save | Load) -> None:
        self._fenced.remove(one)
        self._fenced_tokens -= len(one.slots)
        self.token_to_kv_pool_allocator.free(one.slots)


class PegaFlowRadixCache(PegaFlowTree):
    """The cache of an aggregated server, and of a prefill worker."""

    take_over: Any = classmethod(DecodeRadixCache.take_over.__func__)  # type: ignore[attr-defined]


class PegaFlowDecodeRadixCache(PegaFlowTree, DecodeRadixCache):
    """The cache of a decode worker: what its tree evicts has been saved, and what is loaded need not be sent."""

    def _evict_for_load(self, tokens: int) -> None:
        self.evict_shortfall(tokens)
