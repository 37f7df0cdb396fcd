"""Random lives of many requests on a decode worker with a storage below its host memory."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from storage_world import ByHand, StorageWorld
from test_host_tier import HostLife, saved

# Time is a matter of the lives'.
FOR_EVER = Limits(threshold=1, base_s=1e9)
LIVES: list[tuple[int, int]] = []
# Conversations that may come back.
STORED = ([1, 2] * 9, [1] * 17, [2, 1, 1] * 8)


class StorageLife(HostLife):
    """The same lives with a storage, which works when a rule says so."""

    @initialize(size=st.sampled_from([48, 64]), tokens=st.sampled_from([16, 64, 256]), late=st.booleans())
    def begin(self, size, tokens, late):
        self.folder = tempfile.mkdtemp()
        self.draining = False
        self.world = StorageWorld(
            self.folder,
            host=tokens,
            size=size,
            late=late,
            limits=FOR_EVER,
            page_size=self.page_size,
            states=self.states,
            threads=ByHand,
        )
        step = self.world.step

        def stepping():
            if self.draining:
                self.world.threads.run(99)
            return step()

        self.world.step = stepping
        self.draining = True
        for prompt in STORED:
            saved(self.world, prompt)
            self.world.threads.run(99)
        self.draining = False

    @rule(count=st.integers(1, 4), i=st.integers(0, 9))
    def storage_works(self, count, i):
        self.world.threads.run(count)
        if i % 2:
            self.world.step()

    @rule(i=st.integers(0, 9), more=st.lists(st.integers(1, 2), max_size=6))
    def come_back_from_storage(self, i, more):
        """A conversation that has left host memory too."""
        self.evict()
        self.others_take_host_memory()
        prompt = [*self.pick(STORED, i), *more]
        if len(prompt) + 6 <= self.world.size and len(self.world.queue.queue) < 6:
            self.world.handshake(self.world.arrive(prompt))
            self.world.step()

    @precondition(lambda self: self.world.storage.busy)
    @rule()
    def time_is_up(self):
        for fetch in self.world.storage.fetches.open:
            fetch.deadline = 0.0

    @rule()
    def others_take_host_memory(self):
        host = self.world.tier.host
        host.evict_shortfall(host.evictable_size())

    @precondition(lambda self: list(self.world.stored()))
    @rule(i=st.integers(0, 99))
    def a_page_goes(self, i):
        self.pick(self.world.stored(), i).unlink()

    @rule()
    def clear(self):
        self.world.storage.clear()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.draining = True
        super().teardown()
        self.ends_with_a_fetch()
        state = self.world.storage.state()
        assert not state["loading"] and not state["requests"] and not state["waiting"] and not state["corrupt"]
        LIVES.append((state["written"], state["fetched"]))
        shutil.rmtree(self.folder, ignore_errors=True)

    def ends_with_a_fetch(self):
        """Whatever was before, what is stored comes back, where so much may wait to be written."""
        if self.world.tier.host.pool_size < 256:
            return
        prompt, before = [3] * 20, self.world.storage.state()["fetched"]
        self.evict()
        self.others_take_host_memory()
        self.world.serve(prompt, max_new=1)
        assert self.world.storage.state()["fetched"] > before


@pytest.mark.parametrize(("page_size", "states"), [(1, None), (4, 16)])
def test_invariants_hold_in_every_life_with_a_storage(page_size, states):
    machine = type("StorageLife", (StorageLife,), {"page_size": page_size, "states": states})
    LIVES.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))
    written, fetched = (sum(column) for column in zip(*LIVES, strict=True))
    assert written and fetched
