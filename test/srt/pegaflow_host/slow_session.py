"""In the place of a `PegaFlowSession`: answers come at once, and saves and loads end when a test says so."""

from __future__ import annotations

from sglang.srt.mem_cache.pegaflow.session import Counters, Load, Lookup, Save


class SlowSession:
    """``store``: the hashes that the server has; ``saves`` and ``loads``: what is under way."""

    up, stopped = True, False

    def __init__(self, store: set[bytes] | None = None) -> None:
        self.store = set() if store is None else store
        self.saves: list[Save] = []
        self.loads: list[Load] = []
        self.asked = 0
        self.leases: set[bytes] = set()
        self.counters = Counters()

    def save(self, save: Save) -> None:
        self.saves.append(save)

    def end_saves(self, saved: bool = True) -> int:
        """End all of them; how many pages that were."""
        ended, self.saves = self.saves, []
        for save in ended:
            if saved:
                self.store.update(save.hashes)
            save.done, save.saved = True, saved
        return sum(len(save.hashes) for save in ended)

    def ask(self, lookup: Lookup) -> None:
        hits = next((i for i, name in enumerate(lookup.hashes) if name not in self.store), len(lookup.hashes))
        self.asked += 1
        lookup.lease = b"%d" % self.asked
        if hits and not lookup.dropped:
            self.leases.add(lookup.lease)
        lookup.hits = lookup.leased = hits

    def drop(self, lookup: Lookup) -> None:
        lookup.dropped = True
        self.leases.discard(lookup.lease)

    def load(self, lookup: Lookup, slots, skip: int = 0) -> Load:
        self.leases.remove(lookup.lease)
        self.loads.append(Load(lookup.lease, lookup.leased, slots, skip))
        return self.loads[-1]

    def end_loads(self, loaded: bool = True) -> None:
        ended, self.loads = self.loads, []
        for load in ended:
            load.final, load.failed = True, not loaded

    def late(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped, self.up = True, False
