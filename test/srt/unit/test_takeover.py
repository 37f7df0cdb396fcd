"""Requests whose prefill is gone or late are computed on decode, and nothing else of a worker is touched by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from decode_world import HostSizes
from hypothesis import Phase as HypothesisPhase
from hypothesis import example, given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from ranks import assert_same
from sglang.srt.disaggregation import takeover
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import prefill_peers
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.local_prefill import Policy
from sglang.srt.disaggregation.no_prefill import PrefillGone, is_taken_over
from sglang.srt.disaggregation.prefix_loads import PrefixLoads
from sglang.srt.disaggregation.request_phase import Phase
from sglang.srt.managers.io_struct import AbortReq
from test_every_state import BEFORE_COMMIT, Bench, arrived, make_room, prefill_lost, time_runs_out
from test_step_in_flight import Play, RankPlay, actions

LOCAL = {"disaggregation_decode_local_prefill": "4"}
# Short enough that most prompts are prefill's, and long enough for slices.
POLICY = Policy(most=4, slice=4, step=8, queued=8, debt=24)


def loop_of(after_s: float | None = None, **sizes: Any) -> Loop:
    loop = Loop(options=LOCAL | {"disaggregation_decode_local_prefill_after": after_s}, reserved=0, **sizes)
    loop.transfer.local.policy = POLICY
    return loop


def lose(decode_req: DecodeRequest) -> None:
    """What a rank's manager knows when its prefill is gone."""
    decode_req.kv_receiver.state, decode_req.kv_receiver.lost = KVPoll.Failed, True


def played(script: dict[int, Callable[[Loop], Any]], after_s: float | None = None, **sizes: Any) -> Loop:
    """A loop in which ``script`` says what happens before which turn; no transfer ever arrives by itself."""
    loop = loop_of(after_s, **{"size": 128, "page_size": 4, **sizes})

    def between() -> None:
        if loop.iterations in script:
            script[loop.iterations](loop)
        if loop.iterations > max(script) and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200, "the loop does not come to an end"

    loop.run(between)
    loop.check_answers()
    assert len(loop.meta_alloc.free_slots) == loop.meta_alloc.size
    return loop


def arrive(prompt: list[int], shakes_hands: bool = True, **options: Any) -> Callable[[Loop], DecodeRequest]:
    def come(loop: Loop) -> DecodeRequest:
        decode_req = loop.arrive(prompt, **options)
        if shakes_hands:
            loop.handshake(decode_req)
        return decode_req

    return come


def in_queue(loop: Loop) -> DecodeRequest:
    (one,) = loop.queue.queue
    return one


def asked(loop: Loop) -> DecodeRequest:
    (one,) = loop.asked
    return one


def ended_well(loop: Loop) -> set[str]:
    return {req.rid for req in loop.told if "abort" not in str(req.finished_reason.to_json())}


# ---- one request ----


def test_lost_before_it_was_asked():
    loop = played({1: arrive([1] * 11, shakes_hands=False), 3: lambda loop: lose(in_queue(loop))})
    assert ended_well(loop) == {"r1"} and loop.extended == [("r1", 0, 8), ("r1", 8, 11)]


@pytest.mark.parametrize("after", [2, 5])
def test_lost_after_it_was_asked(after):
    """It starts over at once; the pages that prefill knows of come back when nobody writes there."""
    ghosts = []

    def die(loop: Loop) -> None:
        ghosts.append(asked(loop))
        loop.deliver(ghosts[0], 1)
        lose(ghosts[0])

    def write_late(loop: Loop) -> None:
        (ghost,) = loop.transfer.quarantine
        for page in ghost.kv_receiver.page_indices:
            loop.kv.k_buffer[0][page * 4 : page * 4 + 4] = -1
        assert not loop.scheduler.rests()

    def end(loop: Loop) -> None:
        ghosts[0].kv_receiver.quiet = True

    loop = played({1: arrive([1] * 11, max_new=9), after: die, after + 4: write_late, 30: end})
    assert ended_well(loop) == {"r1"} and loop.extended == [("r1", 0, 8), ("r1", 8, 11)]
    assert ghosts[0].phase is Phase.RELEASED and ghosts[0].req is not loop.told[0]


def test_what_the_tree_holds_of_it_is_not_computed():
    def next_turn(loop: Loop) -> None:
        arrive([1] * 8 + [2] * 11, max_new=3)(loop)

    loop = played(
        {
            1: arrive([1] * 8, max_new=1),
            2: lambda loop: loop.complete(asked(loop)),
            6: next_turn,
            8: lambda loop: lose(asked(loop)),
            9: lambda loop: setattr(loop.transfer.quarantine[0].kv_receiver, "quiet", True),
        }
    )
    assert loop.extended == [("r2", 8, 16), ("r2", 16, 19)]


def test_a_full_hit_computes_its_last_token_into_a_page_of_its_own():
    loop = played(
        {
            1: arrive([1] * 8, max_new=1),
            2: lambda loop: loop.complete(asked(loop)),
            6: arrive([1] * 8, shakes_hands=False, max_new=3),
            7: lambda loop: lose(in_queue(loop)),
        }
    )
    assert loop.extended == [("r2", 4, 8)]


def test_a_failure_that_is_not_its_prefills_is_one():
    def fail(loop: Loop) -> None:
        in_queue(loop).kv_receiver.state = KVPoll.Failed

    def refuse(loop: Loop) -> None:
        in_queue(loop).kv_receiver.state, in_queue(loop).kv_receiver.lost = KVPoll.Failed, False

    for cause in (fail, refuse):
        loop = played({1: arrive([1] * 11, shakes_hands=False), 3: cause})
        assert not ended_well(loop) and not loop.extended and len(loop.told) == 1


def test_what_needs_prefill_fails_with_it():
    def come(loop: Loop) -> None:
        decode_req = arrive([1] * 11, shakes_hands=False, logprobs=True)(loop)
        decode_req.req.logprob_start_len = 0

    loop = played({1: come, 3: lambda loop: lose(in_queue(loop))})
    assert not ended_well(loop) and not loop.extended


@pytest.mark.parametrize("first", ["abort", "loss"])
def test_an_abort_is_one_whatever_becomes_of_its_prefill(first):
    def both(loop: Loop) -> None:
        one = in_queue(loop)
        if first == "loss":
            lose(one)
        loop.scheduler.abort_request(AbortReq(rid="r1"))
        if first == "abort":
            lose(one)

    loop = played({1: arrive([1] * 11, shakes_hands=False), 3: both})
    assert not ended_well(loop) and not loop.extended and len(loop.told) == 1


def test_one_that_has_been_taken_over_can_be_aborted():
    """Before its admission, and between two slices."""

    def abort(loop: Loop) -> None:
        loop.scheduler.abort_request(AbortReq(rid="r1"))

    for turn, computed in ((4, []), (6, [("r1", 0, 8)])):
        script = {1: arrive([1] * 24, shakes_hands=False), 3: lambda loop: lose(in_queue(loop)), turn: abort}
        loop = played(script)
        assert not ended_well(loop) and loop.extended[:1] == computed and len(loop.told) == 1
        assert ("r1", 16, 24) not in loop.extended


# ---- many ----


def test_short_remainders_go_first_and_others_go_on():
    def come(loop: Loop) -> None:
        arrive([1] * 8, max_new=60)(loop)
        arrive([3] * 72, shakes_hands=False, max_new=2)(loop)

    shorts = {turn: arrive([1] * 8 + [turn] * 3, max_new=2) for turn in range(8, 24, 2)}
    start = {1: come, 2: lambda loop: (loop.complete(asked(loop)), lose(loop.queue.queue[0]))}
    loop = played(start | shorts, size=256)
    order = [rid for rid, _, _ in loop.extended]
    short = [place for place, rid in enumerate(order) if rid != "r2"]
    long = [place for place, rid in enumerate(order) if rid == "r2"]
    assert len(ended_well(loop)) == 2 + len(shorts)
    assert short[-1] < long[-1], "the long one held up the short ones"
    assert any(short[0] < place < short[-1] for place in long), "the long one waited for all of the short ones"


# ---- late ----


def test_a_late_prefill_is_told(monkeypatch):
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(takeover, "tell_prefill", lambda addr, room: told.append((addr, room)))

    def age(loop: Loop) -> None:
        loop.transfer.takeovers._tells = True
        asked(loop).entry.admitted_at -= 100

    def end(loop: Loop) -> None:
        (ghost,) = loop.transfer.quarantine
        assert ghost.kv_receiver.tells_later
        ghost.kv_receiver.quiet = True

    loop = played({1: arrive([1] * 11), 3: age, 6: end}, after_s=50.0)
    assert ended_well(loop) == {"r1"} and told == [("10.0.0.1:1", 1)] and loop.extended


def test_who_is_not_late_or_cannot_be_told_is_waited_for():
    for drops, seconds in ((True, 10), (False, 100)):

        def age(loop: Loop, drops: bool = drops, seconds: float = seconds) -> None:
            one = asked(loop)
            one.kv_receiver.peer_takes_prefix = drops
            one.entry.admitted_at -= seconds

        loop = played({1: arrive([1] * 11), 3: age, 9: lambda loop: loop.complete(asked(loop))}, after_s=50.0)
        assert ended_well(loop) == {"r1"} and not loop.extended


def test_who_waits_for_memory_is_not_late():
    """It is decode that lets it wait."""

    def age(loop: Loop) -> None:
        (one,) = [dr for dr in loop.queue.queue if dr.phase is Phase.READY]
        one.kv_receiver.made_at -= 1000

    def both(loop: Loop) -> None:
        arrive([1] * 30, max_new=9)(loop)
        arrive([2] * 30, max_new=9)(loop)

    def complete(loop: Loop) -> None:
        for decode_req in loop.asked:
            loop.complete(decode_req)

    loop = played({1: both, 3: age, 6: complete, 40: complete}, size=48, after_s=50.0)
    assert ended_well(loop) == {"r1", "r2"} and not loop.extended


def test_who_waits_for_a_storage_is_not_late(monkeypatch):
    """Its prefill has shaken hands; what is waited for is decode's own."""
    monkeypatch.setattr(PrefixLoads, "is_done", lambda self, decode_req: False)

    def age(loop: Loop) -> None:
        (one,) = loop.queue.queue
        assert one.phase is Phase.HANDSHAKE
        one.kv_receiver.made_at -= 1000

    def comes(loop: Loop) -> None:
        monkeypatch.undo()

    def complete(loop: Loop) -> None:
        for decode_req in loop.asked:
            loop.complete(decode_req)

    loop = played({1: arrive([1] * 30, max_new=9), 3: age, 8: comes, 12: complete}, size=64, after_s=50.0)
    assert ended_well(loop) == {"r1"} and not loop.extended


def test_who_decodes_on_another_dp_rank_would_wait_for_a_long_step_too():
    loop = loop_of(50.0, size=64, page_size=4)
    takeovers, ranks = loop.transfer.takeovers, loop.transfer.local.ranks
    assert not takeovers.others()
    ranks.decoding = 7
    assert takeovers.others()


# ---- whole lives ----

which = st.integers(0, 9)
losses = st.one_of(actions, st.tuples(st.just("lose"), which), st.tuples(st.just("write_late"), which))
scripts = st.lists(st.lists(losses, max_size=3), min_size=15, max_size=40)


# One that chance need not find: a prefill is lost before it was asked, and one that was asked.
LONG = {"prompt": [1, 2] * 6, "max_new": 4, "stop": None, "grammar": False, "logprobs": False}
OTHER = LONG | {"prompt": [2] * 12}
SHORT = {"prompt": [1] * 4, "max_new": 1, "stop": None, "grammar": False, "logprobs": False}
HELD_UP = SHORT | {"grammar": True, "logprobs": True}
# Whom the second waits for is gone in the step in which its own prefill is.
LOST_WITH_ITS_LEADER = [
    *[[]] * 11,
    [("arrive", HELD_UP)],
    [("arrive", SHORT | {"prompt": [1, 2, 1, 1], "stop": 1, "logprobs": True}), ("arrive", SHORT | {"stop": 1})],
    [("arrive", HELD_UP), ("arrive", HELD_UP), ("arrive", SHORT | {"grammar": True})],
    [("fail", 0), ("lose", 0)],
]
LOST_TWICE = [[("arrive", LONG), ("lose", 0)], *[[]] * 8, [("arrive", OTHER)], [], [], [("lose", 0)]]


def taken_over(extended: list[tuple[Any, int, int]]) -> int:
    """Of how many requests more was computed here, in any number of slices, than of a short remainder."""
    tokens: Counter[Any] = Counter()
    for rid, start, end in extended:
        tokens[rid] += end - start
    return sum(count > POLICY.most for count in tokens.values())


class LossyPlay(Play):
    """A play in which prefills are lost, and go on to write what nobody reads."""

    def lose(self, index: int) -> None:
        decode_req = self.pick([*self.loop.queue.queue, *self.in_transfer()], index)
        if decode_req is None or is_taken_over(decode_req) or decode_req.phase is Phase.LOCAL:
            return
        if decode_req.kv_receiver.state not in (KVPoll.Success, KVPoll.Failed):
            lose(decode_req)

    def write_late(self, index: int) -> None:
        decode_req = self.pick(self.loop.transfer.quarantine, index)
        page_size = self.loop.page_size
        for page in getattr(decode_req, "kv_receiver", None) and decode_req.kv_receiver.page_indices or ():
            self.loop.kv.k_buffer[0][page * page_size : (page + 1) * page_size] = -1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_life_with_prefills_that_are_lost(page_size, overlap):
    """I1 to I8 after each step of the real loop; every answer is the model's; nothing hangs and nothing leaks."""
    computed = 0

    @given(script=scripts, size=st.sampled_from([32, 40, 64]))
    @example(script=LOST_TWICE, size=64)
    @example(script=LOST_WITH_ITS_LEADER, size=32)
    @settings(max_examples=30, deadline=None)
    def play(script, size):
        nonlocal computed
        loop = loop_of(size=size, page_size=page_size, max_reqs=4, overlap=overlap)
        LossyPlay(loop, script).run()
        computed += taken_over(loop.extended)
        assert not loop.transfer.local.busy

    play()
    assert computed, "nothing was taken over"


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
def test_tp_ranks_take_over_the_same_in_the_same_steps(pair, page_size):
    computed = 0

    @example(script=LOST_TWICE, size=40, lags=[0, 1, 0, 2])
    @given(script=scripts, size=st.sampled_from([32, 40]), lags=st.lists(st.integers(-3, 3), min_size=4, max_size=4))
    @settings(max_examples=10, deadline=None, phases=[HypothesisPhase.explicit, HypothesisPhase.generate])
    def play(script, size, lags):
        nonlocal computed
        turns = assert_same(pair.run(on_ranks, page_size, size, script, lags))
        computed += taken_over(turns[-1][1])

    play()
    assert computed, "nothing was taken over"


# ---- real managers, receivers and senders ----


def no_memory_on_one(rank: int) -> tuple:
    """Who is computed here, whose memory cannot be had on rank 1; and another one."""
    loop = loop_of(size=128, page_size=4, max_reqs=6, group=dist.group.WORLD)
    give, phases = loop.queue.memory.give, []

    def fail(req: Any, *args: Any) -> None:
        if rank == 1 and req.rid == failing.req.rid:
            raise MemoryError("none on this rank")
        give(req, *args)

    loop.queue.memory.give = fail
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
    phases, told = assert_same(pair.run(no_memory_on_one))
    assert "RELEASED" in phases and sorted(kind for *_, kind in told) == ["abort", "length"]


def no_memory_beside_others(rank: int) -> list[str]:
    """The same beside one that decodes; a third request comes in the same step and would not fit into the queue."""
    loop = loop_of(size=256, page_size=4, max_reqs=8, group=dist.group.WORLD)
    give, reqs = loop.queue.memory.give, []

    def fail(req: Any, *args: Any) -> None:
        if rank == 1 and req.rid == "r2":
            raise MemoryError("none on this rank")
        give(req, *args)

    loop.queue.memory.give = fail

    def between() -> None:
        if loop.iterations == 1:
            arrive([1] * 3, max_new=40)(loop)
        if loop.iterations == 5:
            reqs.extend(arrive([token] * 4, max_new=3)(loop) for token in (2, 3, 4))
        if loop.iterations > 12:
            raise LoopEnds

    loop.run(between)
    return [decode_req.phase.name for decode_req in reqs]


def test_what_one_rank_could_not_begin_counts_on_all(pair):
    """Or the next one is computed here on one rank and asked of prefill on the other."""
    assert assert_same(pair.run(no_memory_beside_others)) == ["RELEASED", "COMMITTED", "ASKED"]


@pytest.mark.parametrize("prompts", ["long", "short"])
def test_who_has_all_of_its_kv_begins_beside_prompts_that_are_computed(prompts):
    """However long they are, and however many come, if none of them decodes."""
    loop = loop_of(size=2048, page_size=4, max_reqs=16, overlap=prompts == "long")
    loop.transfer.local.policy = POLICY._replace(most=12, queued=40, debt=400)
    if prompts == "long":
        script = {1: lambda loop: [arrive([9] * 30, max_new=3)(loop), *(arrive([n] * 400)(loop) for n in (6, 7))]}
        script[2] = lambda loop: [lose(one) for one in loop.queue.queue if len(one.req.origin_input_ids) == 400]
    else:
        # One in each turn, whose only token comes of its prompt.
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


def test_what_cannot_be_copied_from_host_memory_is_computed_without_a_prefill():
    """Nobody else could send it."""
    loop = loop_of(size=64, page_size=4, host=HostSizes(256))
    prompt = [1] * 24

    def fail(*args: Any) -> None:
        raise RuntimeError("the copy cannot begin")

    def lost() -> None:
        loop.tree.evict_shortfall(loop.tree.evictable_size())
        assert loop.tier.host.evictable_size() >= 24
        loop.tier.load = fail
        lose(arrive(prompt + [5] * 8, max_new=2)(loop))

    def between() -> None:
        if loop.iterations == 1:
            arrive(prompt, max_new=2)(loop)
        for one in loop.asked:
            loop.complete(one)
        if loop.iterations == 20:
            lost()
        if loop.iterations > 40:
            raise LoopEnds

    loop.run(between)
    loop.check_answers()
    assert ended_well(loop) == {"r1", "r2"} and loop.tier.failed_loads == 1
    assert [part[1:] for part in loop.extended if part[0] == "r2"] == [(0, 8), (8, 16), (16, 24), (24, 32)]


def is_silent(bench: Bench, req: Any) -> None:
    """For as long as anything is waited for."""
    time_runs_out(bench, req)
    if bench.entry(req) in bench.world.queue.pending_reqs:
        bench.receiver(req).made_at += 1e6 - 2 * prefill_peers.UNANSWERED_S


@pytest.mark.parametrize("kind", ["nixl", "mooncake"])
@pytest.mark.parametrize("state", sorted(BEFORE_COMMIT - {arrived}, key=lambda state: state.__name__))
@pytest.mark.parametrize("cause", [prefill_lost, is_silent])
def test_wherever_its_prefill_is_lost_it_is_computed_here(monkeypatch, kind, state, cause):
    """From every place in which it can be; no book mentions its room afterwards."""
    bench = Bench(monkeypatch, kind, LOCAL)
    local = bench.world.transfer.local
    req = state(bench)
    cause(bench, req)
    if cause is is_silent:
        # What waits for memory, or for a step of ours, waits for no prefill.
        if state.__name__ in ("shaken", "short_of_memory", "unasked"):
            return
        bench.dead = True
    elif state.__name__ == "without_metadata":
        # All has been said about it that will be.
        time_runs_out(bench, req)
    make_room(bench)
    bench.step_until(lambda: any(one.req is req for one in local.waiting), "its turn", decode=True)
    bench.step_until(lambda: not bench.world.transfer.quarantine, "the end of its writers")
    assert not bench.told(req)
    (one,) = local.waiting
    assert one.agreed and is_taken_over(one.decode_req) and one.left <= len(req.origin_input_ids)
    # There are no steps of the model here.
    bench.abort(AbortReq(rid=req.rid))
    (gone,) = local.take_aborted(False)
    assert gone.req is req
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, bench.world.tree, is_insert=False)
    bench.assert_books_closed()


# ---- reasons ----


def test_reasons():
    gone, other = PrefillGone("it is gone"), "a page is wrong"
    assert takeover.first_reason(None, gone) is gone and takeover.first_reason(None, other) == other
    assert takeover.first_reason(gone, other) == other and takeover.first_reason(other, gone) == other
    assert takeover.first_reason(gone, PrefillGone("again")) is gone
    assert isinstance(takeover.reason_of(NotTaken("tcp://a:1")), PrefillGone)
    assert not isinstance(takeover.reason_of(ValueError("a")), PrefillGone)
