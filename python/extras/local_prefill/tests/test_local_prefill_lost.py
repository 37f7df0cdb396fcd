"""Workers that compute prompts themselves, with prefills that are lost: whose prompt is prefill's fails at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from every_state_bench import BEFORE_COMMIT, Bench, arrived, has_failed, make_room, prefill_lost, time_runs_out
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.common import release_kv_cache
from test_overlap_guard import Play, RankPlay, actions, lives_on_ranks

LOCAL = {"disaggregation_decode_local_prefill": "4"}
# Short enough that most prompts are prefill's, and long enough for slices.
POLICY = Policy(most=4, slice=4, step=8, debt=24)


def loop_of(**sizes: Any) -> Loop:
    loop = Loop(options=LOCAL, reserved=0, **sizes)
    loop.transfer.local.policy = POLICY
    return loop


def arrive(prompt: list[int], **options: Any) -> Callable[[Loop], DecodeRequest]:
    def come(loop: Loop) -> DecodeRequest:
        decode_req = loop.arrive(prompt, **options)
        loop.handshake(decode_req)
        return decode_req

    return come


# ---- whole lives ----

which = st.integers(0, 9)
losses = st.one_of(actions, st.tuples(st.just("lose"), which), st.tuples(st.just("write_late"), which))
scripts = st.lists(st.lists(losses, max_size=3), min_size=15, max_size=40)


class LossyPlay(Play):
    """A play in which prefills are lost, and go on to write what nobody reads. lost: how many were."""

    lost = 0

    def lose(self, index: int) -> None:
        decode_req = self.pick([*self.loop.queue.queue, *self.in_transfer()], index)
        if decode_req is None or decode_req.phase is Phase.LOCAL:
            # Of what is computed here, nothing is needed from prefill any more.
            return
        if decode_req.kv_receiver.state not in (KVPoll.Success, KVPoll.Failed):
            decode_req.kv_receiver.state = KVPoll.Failed
            self.lost += 1

    def write_late(self, index: int) -> None:
        decode_req = self.pick(self.loop.transfer.quarantine, index)
        page_size = self.loop.page_size
        for page in getattr(decode_req, "kv_receiver", None) and decode_req.kv_receiver.page_indices or ():
            self.loop.kv.k_buffer[0][page * page_size : (page + 1) * page_size] = -1


@pytest.mark.parametrize(
    ("page_size", "overlap"),
    [(4, True), (1, False), *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in [(1, True), (4, False)])],
)
def test_every_life_with_prefills_that_are_lost(page_size, overlap):
    """I1 to I8 after each step of the real loop; every answer is the model's; nothing hangs and nothing leaks."""
    computed = lost = 0

    @given(script=scripts, size=st.sampled_from([32, 40, 64]))
    @settings(max_examples=30, deadline=None)
    def life(script, size):
        nonlocal computed, lost
        loop = loop_of(size=size, page_size=page_size, max_reqs=4, overlap=overlap)
        play = LossyPlay(loop, script)
        play.run()
        computed, lost = computed + len(loop.extended), lost + play.lost
        assert not loop.transfer.local.busy

    life()
    assert computed and lost


class LossyRankPlay(LossyPlay, RankPlay):
    def lose(self, index: int) -> None:
        # One rank knows why; the other finds that it has failed.
        if self.rank == index % 2:
            super().lose(index)


def on_ranks(rank: int, page_size: int, size: int, script: list[list[tuple]], lags: list[int]) -> list[tuple]:
    loop = loop_of(size=size, page_size=page_size, max_reqs=4, group=dist.group.WORLD)
    play = LossyRankPlay(loop, rank, script, lags)
    play.run()
    return [*play.turns, ("extended", loop.extended)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_tp_ranks_lose_the_same_in_the_same_steps(pair, page_size):
    assert any(turns[-1][1] for turns in lives_on_ranks(pair, on_ranks, page_size, 10, scripts))


# ---- an error on one rank ----


def fails_on_one(rank: int) -> tuple:
    """Who is computed here, of whom rank 1 cannot tell prefill; and another one."""
    loop = loop_of(size=128, page_size=4, max_reqs=6, group=dist.group.WORLD)
    request, phases = loop.transfer.local.request, []

    def fail(decode_req: Any) -> None:
        request(decode_req)
        if rank == 1 and decode_req is failing:
            raise RuntimeError("on this rank")

    loop.transfer.local.request = fail
    failing = arrive([1] * 3)(loop)
    arrive([2] * 4)(loop)

    def between() -> None:
        phases.append(failing.phase.name)
        if loop.iterations > 30:
            raise LoopEnds

    loop.run(between)
    loop.check_answers()
    return phases, sorted((req.rid, len(req.output_ids), req.finished_reason.to_json()["type"]) for req in loop.told)


def test_one_rank_that_cannot_begin_what_the_others_compute(pair):
    """They agree on its failure in as many reductions as ever, and it gives its memory back in the same step."""
    phases, told = assert_same(pair.run(fails_on_one))
    assert "RELEASED" in phases and sorted(kind for *_, kind in told) == ["abort", "length"]


def fails_beside_others(rank: int) -> list[str]:
    """The same beside one that decodes; a third request comes in the same step and would not fit into the queue."""
    loop = loop_of(size=256, page_size=4, max_reqs=8, group=dist.group.WORLD)
    request, reqs = loop.transfer.local.request, []

    def fail(decode_req: Any) -> None:
        request(decode_req)
        if rank == 1 and decode_req.req.rid == "r2":
            raise RuntimeError("on this rank")

    loop.transfer.local.request = fail

    def between() -> None:
        if loop.iterations == 1:
            arrive([1] * 3, max_new=40)(loop)
        if loop.iterations == 5:
            reqs.extend(arrive([token] * 4, max_new=3)(loop) for token in (2, 3, 4))
        if loop.iterations > 12:
            raise LoopEnds

    loop.run(between)
    return [decode_req.phase.name for decode_req in reqs]


def test_what_one_rank_could_not_begin_ends_on_all(pair):
    """And the next one is computed on all."""
    assert assert_same(pair.run(fails_beside_others)) == ["RELEASED", "COMMITTED", "COMMITTED"]


def test_who_has_all_of_its_kv_begins_beside_prompts_that_are_computed():
    """However many come, if none of them decodes: one in each turn, whose only token comes of its prompt."""
    loop = loop_of(size=2048, page_size=4, max_reqs=16, overlap=False)
    loop.transfer.local.policy = POLICY._replace(most=12, debt=400)
    script = {n: arrive([20 + n % 40, 1 + n // 40, 3, 4], max_new=1) for n in range(3, 80)}
    script[1] = arrive([9] * 30, max_new=3)
    script[6] = lambda loop: [loop.complete(one) for one in loop.asked]
    ready = []

    def between() -> None:
        if loop.iterations in script:
            script[loop.iterations](loop)
        ready.append([req.rid for req in loop.scheduler.waiting_queue])
        if loop.iterations > 90:
            raise LoopEnds

    loop.run(between)
    assert sum("r1" in rids for rids in ready) <= 2
    assert "r1" in [req.rid for req in loop.told]


# ---- real managers, receivers and senders ----

KINDS = pytest.mark.parametrize("kind", ["nixl", "mooncake"])


def one_fails_at_once(bench: Bench, req: Any) -> None:
    bench.step()
    assert bench.told(req) == 1 and has_failed(bench, req)
    assert not bench.world.transfer.local.busy
    bench.drain()
    assert bench.told(req) == 1
    bench.assert_books_closed()


@KINDS
@pytest.mark.parametrize("state", sorted(BEFORE_COMMIT - {arrived}, key=lambda state: state.__name__))
def test_wherever_its_prefill_is_lost_it_fails_at_once(monkeypatch, kind, state):
    """As on a worker that computes no prompts. No book mentions its room afterwards."""
    bench = Bench(monkeypatch, kind, LOCAL)
    req = state(bench)
    prefill_lost(bench, req)
    if state.__name__ == "without_metadata":
        # All has been said about it that will be.
        time_runs_out(bench, req)
    make_room(bench)
    one_fails_at_once(bench, req)


@KINDS
def test_one_that_would_be_computed_here_fails_if_its_prefill_cannot_be_reached(monkeypatch, kind):
    """Its prefill is waited for all the same: nobody knows whether it would drop the request."""
    bench = Bench(monkeypatch, kind, LOCAL)
    bench.forget_prefill()
    req = bench.arrive(prompt_len=3)
    prefill_lost(bench, req)
    one_fails_at_once(bench, req)
    assert "is gone" in req.finished_reason.message or "Losing connection" in req.finished_reason.message


@KINDS
def test_what_is_computed_here_needs_no_prefill_any_more(monkeypatch, kind):
    """Its prefill is lost when admission has chosen: it is computed all the same."""
    bench = Bench(monkeypatch, kind, LOCAL)
    local, prefills = bench.world.transfer.local, bench.manager.prefills
    prefills.capabilities[bench.address] = dataclasses.replace(prefills.of(bench.address), others={"drops": 1})
    req = bench.arrive(prompt_len=3)
    bench.step()
    (one,) = local.waiting
    assert one.req is req and one.agreed and one.decode_req.phase is Phase.LOCAL
    prefill_lost(bench, req)
    for _ in range(5):
        bench.step()
    assert local.waiting == [one] and not bench.told(req) and one.decode_req.poll() == KVPoll.Success
    # There are no steps of the model here.
    bench.abort(AbortReq(rid=req.rid))
    (gone,) = local.take_aborted(False)
    assert gone is one.decode_req
    release_kv_cache(req, bench.world.tree, is_insert=False)
    bench.assert_books_closed()
