"""The loop of `overlapped_loop` on a worker whose tree is kept in a PegaFlow server too.

The server is a stand-in: it keeps pages by their names, and answers, copies and fails when a test says so. A save reads
its pages, and a load writes its own, when it ends, which is the latest that a server may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from decode_world import kv_of
from overlapped_loop import Loop, LoopScheduler
from sglang.srt.mem_cache.page_names import first_hash, page_names
from sglang.srt.mem_cache.pegaflow.session import Load, Lookup, Save
from sglang.srt.mem_cache.pegaflow.tree import PegaFlowDecodeRadixCache
from slow_session import SlowSession


class KeptPages(SlowSession):
    """The session of a loop's tree, and the server behind it."""

    def __init__(self, loop: PegaFlowLoop):
        super().__init__()
        self._loop = loop
        self._kv = loop.kv.k_buffer[0]
        self.kept: dict[bytes, torch.Tensor] = {}
        self._names: dict[Load, list[bytes]] = {}
        self.questions: list[Lookup] = []
        # In which iteration each page was handed over, to be saved.
        self.saved_in: dict[bytes, int] = {}
        self.pages_loaded = 0

    # ---- what the tree hands over ----

    def save(self, save: Save) -> None:
        if set(save.slots.tolist()) & self._loop.slots_being_computed():
            self._loop.wrong.append("a page is saved that a step over prompts in flight is to write")
        self.saved_in |= dict.fromkeys(save.hashes, self._loop.iterations)
        super().save(save)

    def ask(self, lookup: Lookup) -> None:
        self.questions.append(lookup)

    def load(self, lookup: Lookup, slots: torch.Tensor, skip: int = 0) -> Load:
        load = super().load(lookup, slots, skip)
        page = self._loop.page_size
        self._names[load] = lookup.hashes[skip : skip + len(slots) // page]
        return load

    # ---- what the server does ----

    def has(self, prompts: Iterable[list[int]]) -> None:
        """Another worker has saved these, of whole pages."""
        page, weights = self._loop.page_size, self._loop.weights
        for tokens in prompts:
            values = [float(kv_of(tokens[: i + 1], weights)) for i in range(len(tokens))]
            parts = torch.tensor(values).reshape(-1, page, *self._kv.shape[1:])
            self.kept |= zip(self._loop.names_of(tokens), parts, strict=True)
        self.store |= self.kept.keys()

    def answer(self) -> None:
        asked, self.questions = self.questions, []
        for lookup in asked:
            super().ask(lookup)

    def end_saves(self, saved: bool = True) -> int:
        self._wait(self.saves)
        for save in self.saves if saved else ():
            for name, slots in zip(save.hashes, save.slots.split(self._loop.page_size), strict=True):
                self.kept[name] = self._kv[slots].clone()
        return super().end_saves(saved)

    def end_loads(self, loaded: bool = True) -> None:
        self._wait(self.loads)
        for load in self.loads:
            for name, slots in zip(self._names.pop(load), load.slots.split(self._loop.page_size), strict=True):
                # One that fails has written something, too.
                self._kv[slots] = self.kept[name] if loaded else -1
            self.pages_loaded += loaded * len(load.slots) // self._loop.page_size
        super().end_loads(loaded)

    def serve(self) -> None:
        """Answer, and end all copies."""
        self.answer()
        self.end_loads()
        self.end_saves()

    def forget(self, every: int) -> None:
        """Make room: drop one page in so many."""
        for name in sorted(self.store)[::every]:
            self.store.discard(name)

    def _wait(self, copies: list) -> None:
        """As `Connection.pages`, for all that has been launched."""
        if copies and self._loop.in_flight:
            self._loop.in_flight.synchronize()


class PegaFlowLoopScheduler(LoopScheduler):
    def __init__(self, loop: Loop):
        super().__init__(loop)
        self.enable_hicache_storage = True

    def process_input_requests(self, recv_reqs: list) -> None:
        if self.pegaflow.advance():
            self.running_batch.batch_is_full = False
        super().process_input_requests(recv_reqs)


class PegaFlowLoop(Loop):
    """A decode worker with a server of its own; on several ranks, each has one."""

    tree_type = PegaFlowDecodeRadixCache

    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        self.session = self.make_session()
        self.tree.attach(self.session, self.group if dist.get_world_size(self.group) > 1 else None)
        # Loads that have come on all ranks.
        self.brought = 0
        insert = self.tree.insert_loaded

        def insert_loaded(*args: Any) -> int:
            self.brought += 1
            return insert(*args)

        self.tree.insert_loaded = insert_loaded

    def make_session(self) -> Any:
        return KeptPages(self)

    def _make_scheduler(self) -> PegaFlowLoopScheduler:
        return PegaFlowLoopScheduler(self)

    def slots_being_computed(self) -> set[int]:
        """By steps over prompts whose results have not been processed."""
        batches = [batch for batch, _ in self.scheduler.result_queue if batch.forward_mode.is_extend()]
        return {slot for batch in batches for slot in batch.out_cache_loc.tolist()}

    def names_of(self, tokens: list[int]) -> list[bytes]:
        """By which the server knows the whole pages of ``tokens``."""
        end = len(tokens) // self.page_size * self.page_size
        return page_names(tokens[:end], self.page_size, first_hash(None))

    def check(self) -> None:
        super().check()
        # What the server may write to is nobody else's.
        open_loads = [found.load for found in self.tree.prefetches.open if found.load is not None]
        held = [*open_loads, *self.tree.fenced]
        assert set(map(id, getattr(self.session, "loads", ()))) <= set(map(id, held))
        slots = [slot for one in held for slot in one.slots.tolist()]
        pool = self.tree.pool
        free = set(torch.cat([pool.free_pages, pool.release_pages]).tolist())
        assert len(slots) == len(set(slots)) and not set(slots) & set(self._tree_slots())
        assert not {slot // self.page_size for slot in slots} & free

    def idle(self) -> bool:
        return super().idle() and not (self.tree.busy or self.tree.fenced)
