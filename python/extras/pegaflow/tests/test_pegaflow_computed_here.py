"""Prompts that decode computes itself on a worker with PegaFlow: a load, then the rest, and what of it is saved."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import host_server
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import LoopEnds
from pegaflow_loop import PegaFlowLoop
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.pegaflow import prefetches
from sglang.srt.mem_cache.pegaflow import tree as pegaflow_tree
from sglang.srt.mem_cache.pegaflow.memory import kv_layout
from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
from test_local_prefill_lost import LossyPlay, LossyRankPlay
from test_overlap_guard import Play, actions, lives_on_ranks

PAGE = 4
# Debt that whatever is loaded would exceed.
POLICY = Policy(most=12, slice=8, step=16, debt=16)
FIRST = [1, 2, 1, 1, 2, 2] * 4
REST = [2, 1, 1, 2, 2, 2, 1]


@contextmanager
def by_hand() -> Iterator[None]:
    """No flush waits for the stand-in, whose copies take as long as a test says."""
    before = pegaflow_tree.DRAIN_ROUNDS, pegaflow_tree.DRAIN_PAUSE_S, prefetches.TIMEOUT_S
    pegaflow_tree.DRAIN_ROUNDS, pegaflow_tree.DRAIN_PAUSE_S, prefetches.TIMEOUT_S = 3, 0.0, 1e9
    try:
        yield
    finally:
        pegaflow_tree.DRAIN_ROUNDS, pegaflow_tree.DRAIN_PAUSE_S, prefetches.TIMEOUT_S = before


@pytest.fixture(autouse=True)
def all_by_hand():
    with by_hand():
        yield


def loop_of(policy: Policy = POLICY, kind: type[PegaFlowLoop] = PegaFlowLoop, **sizes: Any) -> PegaFlowLoop:
    options = {"disaggregation_decode_local_prefill": "12"}
    sizes = {"size": 256, "page_size": PAGE, "reserved": 0, "options": options, **sizes}
    loop = kind(**sizes)
    loop.transfer.local.policy = policy
    return loop


def served(loop: PegaFlowLoop) -> None:
    loop.session.serve()


Script = dict[int, Callable[[PegaFlowLoop], Any]]


def played(script: Script, serve: Callable[[PegaFlowLoop], Any] = served, **sizes: Any) -> PegaFlowLoop:
    """A loop in which ``script`` says what happens before which turn, and ``serve`` what the server does in each.

    Transfers arrive at once.
    """
    return play(loop_of(**sizes), script, serve)


def play_some(loop: PegaFlowLoop, script: Script, serve: Callable[[PegaFlowLoop], Any]) -> PegaFlowLoop:
    def between() -> None:
        serve(loop)
        if loop.iterations in script:
            script[loop.iterations](loop)
        for decode_req in loop.asked:
            if decode_req.kv_receiver.state != KVPoll.Failed:
                loop.complete(decode_req)
        if loop.iterations > max(script) and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300, "the loop does not come to an end"

    loop.run(between)
    return loop


def play(loop: PegaFlowLoop, script: Script, serve: Callable[[PegaFlowLoop], Any] = served) -> PegaFlowLoop:
    """The same to its end."""
    play_some(loop, script, serve)
    loop.check_answers()
    assert len(loop.meta_alloc.free_slots) == loop.meta_alloc.size
    return loop


def arrive(prompt: list[int], **options: Any) -> Callable[[PegaFlowLoop], DecodeRequest]:
    def come(loop: PegaFlowLoop) -> DecodeRequest:
        decode_req = loop.arrive(prompt, **options)
        loop.handshake(decode_req)
        return decode_req

    return come


def flush(loop: PegaFlowLoop) -> None:
    assert loop.scheduler.flush_cache()
    assert not loop.tree.total_size()


# The second turn comes when the tree has nothing of the first.
FIRST_TURN: Script = {1: arrive(FIRST, max_new=2), 20: flush}


def in_queue(loop: PegaFlowLoop) -> DecodeRequest:
    (one,) = loop.queue.queue
    return one


def ended_well(loop: PegaFlowLoop) -> set[str]:
    return {req.rid for req in loop.told if "abort" not in str(req.finished_reason.to_json())}


overlaps = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "in turns"])


# ---- a load, then the rest here ----


@overlaps
def test_what_is_loaded_needs_no_prefill(overlap):
    """Nor does it count as what no prefill has seen."""
    loop = played(FIRST_TURN | {21: arrive(FIRST + REST, max_new=3)}, overlap=overlap)
    assert loop.session.pages_loaded == 6
    assert loop.extended == [("r2", 24, 31)] and list(loop.asked_in) == ["r1"]
    assert ended_well(loop) == {"r1", "r2"}
    # And so does what comes after: the answer, and what was computed here.
    third = [*FIRST, *REST, *loop.told[1].output_ids, 2, 2]
    again = play(loop, {loop.iterations + 1: flush, loop.iterations + 2: arrive(third, max_new=2)})
    assert again.extended[1:] == [("r3", 32, len(third))] and list(again.asked_in) == ["r1"]


def test_what_the_tree_has_is_not_loaded():
    loop = played({1: arrive(FIRST, max_new=2), 20: arrive(FIRST + REST, max_new=3)})
    assert loop.session.pages_loaded == 0 and loop.extended == [("r2", 24, 31)]


def test_a_full_hit_computes_its_last_page_into_one_of_its_own():
    loop = played(FIRST_TURN | {21: arrive(FIRST, max_new=3)})
    assert loop.session.pages_loaded == 6 and loop.extended == [("r2", 20, 24)]


def test_a_long_rest_is_prefill_s():
    seen = []

    def come(loop: PegaFlowLoop) -> None:
        seen.append(arrive(FIRST + REST * 2, max_new=3)(loop).kv_receiver)

    loop = played(FIRST_TURN | {21: come})
    assert not loop.extended and seen[0].prefix_len == 24


def fails(loop: PegaFlowLoop) -> None:
    loop.session.answer()
    loop.session.end_loads(loaded=False)
    loop.session.end_saves()


def test_a_load_that_fails_leaves_all_of_it_to_prefill():
    loop = played(FIRST_TURN | {21: arrive(FIRST + REST, max_new=3)}, fails)
    assert not loop.extended and list(loop.asked_in) == ["r1", "r2"] and ended_well(loop) == {"r1", "r2"}


def only_saves(loop: PegaFlowLoop) -> None:
    loop.session.answer()
    loop.session.end_saves()


def test_who_is_aborted_while_it_is_loaded_is_not_computed():
    def abort(loop: PegaFlowLoop) -> None:
        assert loop.session.loads and in_queue(loop)
        loop.scheduler.abort_request(AbortReq(rid="r2"))

    def go_on(loop: PegaFlowLoop) -> None:
        assert not loop.queue.queue
        loop.session.end_loads()

    loop = played(FIRST_TURN | {21: arrive(FIRST + REST, max_new=3), 24: abort, 27: go_on}, only_saves)
    assert not loop.extended and [req.rid for req in loop.told] == ["r1", "r2"] and ended_well(loop) == {"r1"}
    # It is there for the next.
    assert loop.tree.peek(FIRST, None).length == 24


@pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))
@overlaps
def test_with_a_server(tmp_path, monkeypatch, overlap):
    """The same with a real one, whose pages are copied from the pool and to it."""
    import shared_kv
    import small_engine

    class RealLoop(PegaFlowLoop):
        def make_session(self) -> Any:
            kv = self.kv
            for buffers in (kv.k_buffer, kv.v_buffer):
                buffers[:] = [shared_kv.share(buffer.shape, buffer.dtype) for buffer in buffers]
            return PegaFlowSession(server.endpoint, "loop", "loop", kv_layout(kv, PAGE))

    monkeypatch.setattr(prefetches, "TIMEOUT_S", 5.0)
    server = host_server.HostServer(tmp_path).start()
    loop = loop_of(kind=RealLoop, overlap=overlap)
    saves, end = small_engine.record_saves(loop.session), time.monotonic() + 60
    turns = [lambda: FIRST, lambda: FIRST + REST, lambda: [*FIRST, *REST, *loop.told[1].output_ids, 2, 2]]

    def between() -> None:
        assert time.monotonic() < end
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if not loop.idle() or loop.in_flight is not None:
            time.sleep(0.001)
            return
        small_engine.wait_until_found(loop.session, saves)
        if not turns:
            raise LoopEnds
        flush(loop)
        loop.kv.k_buffer[0].fill_(-1)
        arrive(turns.pop(0)(), max_new=3)(loop)

    try:
        loop.run(between)
        loop.check_answers()
        assert loop.extended == [("r2", 24, 31), ("r3", 32, 36)] and list(loop.asked_in) == ["r1"]
        assert loop.session.counters.loaded == 6 + 8 and loop.session.counters.saves_failed == 0
    finally:
        loop.session.close()
        server.kill()


# ---- what is saved of it ----


@overlaps
def test_each_page_is_saved_when_the_result_of_its_step_is_there(overlap):
    """In slices: what the next one is to write waits for that."""
    prompt = FIRST + [2, 1] * 8
    script = {1: arrive(FIRST, max_new=40), 12: arrive(prompt, max_new=2)}
    loop = played(script, policy=POLICY._replace(most=20, slice=4, step=8, debt=100), overlap=overlap)
    names = loop.names_of(prompt)
    *parts, last = [part for part in loop.extended if part[0] == "r2"]
    assert len(parts) == 3 and last[2] == len(prompt)
    for part in parts:
        # A turn for the result, where that is behind; and the next one looks for what is to be saved.
        saved_in = {loop.session.saved_in[name] for name in names[part[1] // PAGE : part[2] // PAGE]}
        assert saved_in == {loop.extended_in[part] + 1 + overlap}
    # The last page is the request's own until it ends.
    assert set(names) <= loop.session.store


class StepFailed(Exception):
    """What a device or a driver raises."""


def fail_before(loop: PegaFlowLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages have entered the tree; nothing has been launched."""

    def fail(batch: ScheduleBatch) -> None:
        raise StepFailed

    monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", fail)


def fail_in(loop: PegaFlowLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is launched."""

    def fail(batch: Any, step: Any) -> None:
        raise StepFailed

    loop._extend = fail


def fail_after(loop: PegaFlowLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been launched, and that it has failed comes out with its result."""
    process = loop.scheduler.process_batch_result

    def fail(batch: Any, result: Any) -> None:
        if batch.has_slots:
            loop.kv.k_buffer[0][batch.out_cache_loc] = -1
            raise StepFailed
        process(batch, result)

    loop.scheduler.process_batch_result = fail


@overlaps
@pytest.mark.parametrize("fails", [fail_before, fail_in, fail_after])
def test_what_a_step_that_fails_was_to_write_is_never_saved(monkeypatch, fails, overlap):
    """Whatever the worker does before it ends. What was computed before is saved all the same."""
    loop = loop_of(overlap=overlap)
    fails(loop, monkeypatch)
    with pytest.raises(StepFailed):
        play(loop, {1: arrive(FIRST, max_new=30), 20: arrive(FIRST + REST, max_new=3)})
    assert loop.tree.peek(FIRST + REST, None).length == 28, "what it was to write is in the tree"
    for _ in range(9):
        loop.tree.advance()
        loop.session.end_saves()
    loop.tree.drain()
    *before, not_written = loop.names_of(FIRST + REST)
    assert not_written not in loop.session.saved_in and set(before) <= loop.session.store


# ---- whole lives ----

# Beginnings that the server has from another worker: half of all, of 8 tokens.
OTHERS = [[1, *more] for more in itertools.product([1, 2], repeat=7)]
serving = st.tuples(st.just("server"), st.integers(0, 11))
scripts = st.lists(st.lists(st.one_of(actions, serving, serving), max_size=4), min_size=15, max_size=40)
losses = st.one_of(actions, serving, serving, st.tuples(st.just("lose"), st.integers(0, 9)))
lossy = st.lists(st.lists(losses, max_size=4), min_size=15, max_size=40)


class ServedPlay(Play):
    """A play in which a server answers, copies, fails and makes room as the script says. It has no weights but one."""

    loop: PegaFlowLoop

    def server(self, n: int) -> None:
        session = self.loop.session
        session.answer()
        if n < 4 or n == 11:
            session.end_loads()
        if 4 <= n < 8 or n == 11:
            session.end_saves()
        if n == 8:
            session.end_loads(loaded=False)
        if n == 9:
            session.end_saves(saved=False)
        if n == 10:
            session.forget(2)

    def flush(self, _: None) -> None:
        self.loop.scheduler.flush_cache()

    def between(self) -> None:
        if not self.script:
            self.loop.session.serve()
        super().between()


class LossyServedPlay(ServedPlay, LossyPlay):
    pass


# ``updates``: the worker leaves its server with the first.
@pytest.mark.parametrize(
    "page_size, updates", [pytest.param(1, False, marks=pytest.mark.thorough), (4, False), (4, True)]
)
@overlaps
def test_every_life_with_loads_and_prompts_that_are_computed_here(page_size, overlap, updates):
    """I1 to I8 after each step of the real loop; every answer is the model's; what is loaded is what was saved."""
    computed, loaded, asked = 0, 0, 0

    @given(script=scripts, size=st.sampled_from([32, 40, 64]))
    @settings(max_examples=20, deadline=None)
    def life(script, size):
        nonlocal computed, loaded, asked
        policy = POLICY._replace(slice=4, step=8)
        loop = loop_of(policy, size=size, page_size=page_size, max_reqs=4, overlap=overlap)
        loop.session.has(OTHERS)
        ServedPlay(loop, script, () if updates else ("update",)).run()
        computed += len(loop.extended)
        loaded += loop.session.pages_loaded
        asked += len(loop.asked_in)
        assert not loop.session.leases and not loop.tree.unreturned_tokens

    life()
    assert computed and loaded and asked


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_every_life_with_loads_and_prefills_that_are_lost(page_size):
    computed = lost = 0

    @given(script=lossy, size=st.sampled_from([32, 40, 64]))
    @settings(max_examples=20, deadline=None)
    def life(script, size):
        nonlocal computed, lost
        loop = loop_of(POLICY._replace(most=4, slice=4, step=8), size=size, page_size=page_size, max_reqs=4)
        loop.session.has(OTHERS)
        play = LossyServedPlay(loop, script, ("update",))
        play.run()
        computed, lost = computed + len(loop.extended), lost + play.lost
        assert not loop.session.leases and not loop.tree.unreturned_tokens

    life()
    assert computed and lost


class ServedRankPlay(ServedPlay, LossyRankPlay):
    """To which of the ranks its server comes first is the script's."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.leave_out = ("update",)
        self.due = deque[tuple[int, int]]()

    def server(self, n: int) -> None:
        if n in (8, 9):
            # On one rank only.
            if self.rank == n % 2:
                super().server(n)
            return
        self.due.append((self.loop.iterations + (n % 3 if self.rank else (n // 3) % 3), n))

    def between(self) -> None:
        for turn, n in list(self.due):
            if turn <= self.loop.iterations or not self.script:
                self.due.remove((turn, n))
                super().server(n)
        super().between()


def on_ranks(rank: int, page_size: int, size: int, script: list[list[tuple]], lags: list[int]) -> list[tuple]:
    with by_hand():
        sizes = {"size": size, "page_size": page_size, "max_reqs": 4, "group": dist.group.WORLD}
        loop = loop_of(POLICY._replace(slice=4, step=8), **sizes)
        loop.session.has(OTHERS)
        play = ServedRankPlay(loop, rank, script, lags)
        play.run()
        return [*play.turns, ("brought", loop.brought), ("extended", loop.extended)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_tp_ranks_load_and_compute_the_same_in_the_same_steps(pair, page_size):
    """Answers, saves and loads end on each in its own time, or fail on one; prefills are lost."""
    lives = lives_on_ranks(pair, on_ranks, page_size, 10, lossy)
    assert any(turns[-1][1] for turns in lives) and any(turns[-2][1] for turns in lives)
