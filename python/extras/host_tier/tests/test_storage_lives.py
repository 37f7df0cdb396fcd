"""Random lives of many requests on a decode worker with a storage below its host memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from overlapped_loop import LoopEnds
from sglang.srt.mem_cache.host_tier import storage_fetches, storage_threads
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from speculating_loop import SpeculatingLoop
from storage_world import ByHand, StorageWorld, page_by_page
from test_host_tier import HostLife, saved
from test_overlap_guard import Play, scripts
from test_speculation import ask
from test_traps import tokens

# Time is a matter of the lives'.
FOR_EVER = Limits(threshold=1, base_s=1e9)
LIVES: list[int] = []
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
            kind=self.kind,
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

    @precondition(lambda self: self.world.inside.names())
    @rule(i=st.integers(0, 99))
    def a_page_goes(self, i):
        self.world.inside.lose(self.pick(self.world.inside.names(), i))

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.draining = True
        super().teardown()
        self.ends_with_a_fetch()
        state = self.world.storage.state()
        assert not state["loading"] and not state["requests"] and not state["waiting"] and not state["corrupt"]
        LIVES.append(state["written"])
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


@pytest.mark.parametrize(
    ("name", "page_size", "states", "lives"),
    [pytest.param("file", 1, None, 30, marks=pytest.mark.thorough), ("file", 4, 16, 20), ("mooncake", 4, None, 10)],
)
def test_invariants_hold_in_every_life_with_a_storage(name, page_size, states, lives, monkeypatch, request):
    monkeypatch.setattr(storage_fetches, "read_pages", page_by_page)
    monkeypatch.setattr(storage_threads, "PAUSE_S", 0.0)
    kind = request.getfixturevalue("master").kind if name == "mooncake" else name
    machine = type("StorageLife", (StorageLife,), {"page_size": page_size, "states": states, "kind": kind})
    LIVES.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=lives, stateful_step_count=40, deadline=None))
    # That all of it comes back, each life with room for it has shown: see `ends_with_a_fetch`.
    assert sum(LIVES)


# ---- drafts ----


class SpeculatingStorage(StorageWorld, SpeculatingLoop):
    """A worker that speculates, whose storage works between its steps."""

    def __init__(self, folder, overlap, **sizes):
        super().__init__(folder, overlap=overlap, limits=FOR_EVER, threads=ByHand, reserved=0, **sizes)

    def between_steps(self):
        self.threads.run(99)
        super().between_steps()

    def write_all(self):
        """Steps until what the tree holds is stored."""

        def between():
            if not self.tier.saves.busy and not self.storage.writes.waiting:
                raise LoopEnds

        self.run(between)


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 4), (False, 1), (True, 1), (False, 4)])
def test_drafts_find_what_another_worker_has_stored(overlap, page_size, tmp_path):
    """The draft model's KV comes with the model's, of prompts and answers; each check of the loop looks at it."""
    sizes = {"size": 96, "page_size": page_size}
    one, two = (SpeculatingStorage(tmp_path, overlap, **sizes) for _ in range(2))
    prompts = [tokens(start, 24) for start in (1, 50, 100)]
    answers = [made.req.output_ids for made in ask(one, prompts, together=False)]
    one.write_all()
    turns = [prompt + answer + [1, 2] for prompt, answer in zip(prompts, answers, strict=True)]
    hits = [made.req.transfer_prefix_len for made in ask(two, turns, together=False)]
    # The last token of the answer has no KV, and that of what the last step accepted only v2's draft model has.
    assert min(hits) >= 24 + 9 - 1 - (not overlap) * 4 - page_size
    assert two.storage.state()["fetched"] == sum(hits) and two.tier.faults() == []


class StoredPlay(Play):
    """A flush leaves the weights as they are: other ones come with an update, which ends the use of the storage."""

    def flush(self, _):
        self.loop.scheduler.flush_cache()


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 4), (False, 1)])
def test_invariants_hold_in_every_life_with_drafts_and_a_storage(overlap, page_size, tmp_path):
    stored, fetched = tmp_path / "stored", []
    one = SpeculatingStorage(stored, overlap, size=256, page_size=page_size)
    ask(one, [[1 + (i >> j) % 2 for j in range(4)] * 4 for i in range(16)], max_new=2, together=False)
    one.write_all()

    @given(script=scripts, size=st.sampled_from([48, 64]))
    @settings(max_examples=8, deadline=None)
    def play(script, size):
        # A page says in which folder it is.
        folder = Path(tempfile.mkdtemp(dir=tmp_path), stored.name)
        shutil.copytree(stored, folder)
        loop = SpeculatingStorage(folder, overlap, size=size, page_size=page_size, max_reqs=4, host=128)
        # Whatever the script asks for.
        ask(loop, [[1, 1, 1, 1] * 4], max_new=2, together=False)
        StoredPlay(loop, script).run()
        assert loop.tier.faults() == []
        fetched.append(loop.storage.state()["fetched"])

    play()
    assert all(fetched)
