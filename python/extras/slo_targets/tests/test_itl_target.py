"""Admission by a target for ITL: what it lets through, that one always runs, that nobody starves, and ranks agree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from decode_world import World, asked, queue, serve, tokens
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.admission import ABORT_INTERVAL, DecodeAdder
from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
from sglang.srt.disaggregation.itl_gate import SEED, ItlGate, Load
from sglang.srt.disaggregation.step_time import WIDTH, Estimate, Parts
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from speculating_loop import SpeculatingLoop
from test_overlap_guard import Play, RankPlay, scripts

MS = 10**9
NAMES = itertools.count()


def target(ms: float) -> dict[str, float]:
    return {"disaggregation_decode_itl_target": ms}


def estimate(
    fixed: float = 1.0,
    per_request: float = 1.0,
    per_token: float = 0.0,
    *,
    milli_tokens: int = 1000,
    answer: int = 1,
    requests: int = 1000,
    known_tokens: int = 10**9,
    delay: int = 0,
    waits: int = 1000,
) -> list[int]:
    """An estimate in milliseconds, as ranks tell it."""
    parts = Parts(round(fixed * MS), round(per_request * MS), round(per_token * MS))
    return Estimate(parts, milli_tokens, answer, requests, known_tokens, delay, waits).figures()


def gate_of(world: World) -> ItlGate | None:
    limits = world.transfer.hooks.limit
    return limits[0].__self__.gate if limits else None


def known(world: World, figures: list[int]) -> ItlGate:
    """The gate of ``world``, which takes its steps to be as ``figures`` say."""
    gate = gate_of(world)
    assert gate is not None
    gate.own = lambda: figures  # type: ignore[method-assign]
    gate.take(figures)
    return gate


def made(ms: float, figures: list[int] | None = None, shares: bool = False) -> ItlGate:
    gate = ItlGate(ms, shares)
    if figures is not None:
        gate.take(figures)
    return gate


def req(prompt: int, done: int = 0, most: int = 4, protected: int = 0, node: Any = None) -> Any:
    return SimpleNamespace(
        rid=f"r{next(NAMES)}",
        seqlen=prompt + done,
        output_ids=[0] * done,
        origin_input_ids=[0] * prompt,
        sampling_params=SimpleNamespace(max_new_tokens=most),
        cache_protected_len=protected,
        finished_reason=None,
        last_node=node,
    )


def plan(delta: int, held: int = 0, evictable: int = 0) -> Any:
    return SimpleNamespace(delta=delta, found=SimpleNamespace(length=held, evictable=evictable))


def now(load: Load) -> tuple[int, int]:
    """Requests and tokens of a step now."""
    return len(load.reqs), load.shared + sum(tokens_of_it for tokens_of_it, *_ in load.reqs)


def admitted_by(gate: ItlGate, *more: Any, live: tuple = (), prompt: int = 10) -> int:
    """How many requests of ``prompt`` tokens are added to those live; at most 99."""
    load = gate.load(SimpleNamespace(running=live, coming=()))
    return sum(1 for _ in itertools.takewhile(bool, (gate.add(load, plan(prompt), req(prompt)) for _ in range(99))))


# ---- figures ----


@pytest.mark.parametrize(
    ("ms", "figures", "live", "added"),
    [
        # 1 ms and 1 ms for each request.
        (8.5, estimate(), 0, 7),
        (8.5, estimate(), 5, 2),
        # 1 ms, and 0.1 ms for each of 10 tokens.
        (8.5, estimate(1, 0, 0.1), 0, 7),
        # Steps that give two tokens; and with as long again for prompts beside them.
        (4.5, estimate(milli_tokens=2000), 0, 8),
        (10, estimate(waits=2000), 0, 4),
        # One, whatever it takes, and a few where nothing is known.
        *((0.001, figures, 0, 1) for figures in (estimate(), estimate(per_token=5.0))),
        (0.001, estimate(), 1, 0),
        (0.001, None, 0, SEED),
    ],
)
def test_requests_are_added_as_far_as_a_step_keeps_the_target(ms, figures, live, added):
    assert admitted_by(made(ms, figures), live=tuple(req(10) for _ in range(live))) == added


def test_no_further_than_twice_what_has_been_seen():
    assert admitted_by(made(1000, estimate(requests=6))) == 12
    assert admitted_by(made(1000, estimate(requests=1))) == SEED
    # Tokens: no more than twice 100, but for the first few.
    assert admitted_by(made(1000, estimate(known_tokens=100)), prompt=25) == 8
    assert admitted_by(made(1000, estimate(known_tokens=10)), prompt=25) == SEED


@given(
    reqs=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 300), st.integers(0, 50)), min_size=1, max_size=12),
    shared=st.integers(0, 1000),
    parts=st.tuples(st.integers(0, 10**9), st.integers(0, 10**8), st.integers(0, 10**6)),
)
def test_the_longest_steps_are_those_of_a_simulation(reqs, shared, parts):
    load = Load(shared)
    for held, growth, start in reqs:
        load.add(held, growth, start)
    times = {}
    for step in range(max(start + growth for _, growth, start in reqs) + 1):
        left = [held + step - start for held, growth, start in reqs if start <= step <= start + growth]
        if left:
            times[step] = Parts(*parts).of(len(left), shared + sum(left))
    begin, end = load.steps(Parts(*parts))
    assert end.longest == max(times.values())
    assert begin.longest == max(times[start] for *_, start in reqs)


@pytest.mark.parametrize("delay", [0, 8, 50])
def test_a_retracted_request_comes_back_when_there_is_time(delay):
    world = World(size=512, max_reqs=16, options=target(5.5))
    gate = known(world, estimate(answer=8, delay=delay))
    running = [serve(world, tokens(n, 8), max_new=9).req for n in range(1, 5)]
    world.retract(running[-1])
    gate._target = round(4.5 * MS)
    world.step()
    # 1 ms and 1 ms for each: a fourth would make 5 of 4.5.
    assert running[-1] not in world.running and len(world.running) == 3
    world.finish(running[0])
    world.step()
    world.step()
    assert running[-1] in world.running


@pytest.mark.parametrize("delay", [0, 50])
def test_a_burst_of_prompts_that_are_computed_here_keeps_the_target(delay):
    """Four decode, each with six tokens left, and four short turns come, which decode in the next step."""
    pytest.importorskip("sglang.srt.disaggregation.local_prefill")
    options = {"disaggregation_decode_local_prefill": "40"} | target(5.5)
    loop = Loop(options=options, size=1024, page_size=4, reserved=0, max_reqs=16)
    loop.transfer.local.policy = loop.transfer.local.policy._replace(most=12, slice=64, step=64, debt=1000)
    known(loop, estimate(answer=8))
    most = 0

    def between() -> None:
        nonlocal most
        if loop.iterations in (1, 20):
            known(loop, estimate(answer=28, delay=delay if loop.iterations == 20 else 0))
            for n in range(1, 5):
                loop.handshake(loop.arrive([n] * 8 + [9] * (4 * (loop.iterations == 20)), max_new=30))
        for decode_req in loop.asked:
            loop.complete(decode_req)
        most = max(most, loop.scheduler.running_batch.batch_size())
        if loop.iterations > 24 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300

    loop.run(between)
    # 1 ms and 1 ms for each of them.
    assert most == 4 and len(loop.told) == 8


def test_shared_prefixes_count_once_where_they_are_read_once():
    """Two that run have 900 tokens of the tree in common, and one 100 of its own there."""
    common, own = TreeNode(), TreeNode()
    common.parent, own.parent = TreeNode(), common
    common.key, own.key = RadixKey([1] * 900, None), RadixKey([1] * 100, None)
    live = LiveReqs((req(1050, protected=1000, node=own), req(930, protected=900, node=common)))
    once, each = made(10, estimate(), shares=True), made(10, estimate())
    assert now(once.load(live)) == (2, 1000 + 50 + 30)
    assert now(each.load(live)) == (2, 1050 + 930)
    for gate, tokens_of_it in ((once, 40 + 7), (each, 40 + 900)):
        load = gate.load(live)
        before = now(load)[1]
        assert gate.add(load, plan(40, held=900, evictable=7), req(940))
        assert now(load) == (3, before + tokens_of_it)
        full = made(0.001, estimate(), shares=gate._shares)
        load = full.load(live)
        assert not full.add(load, plan(40, held=900, evictable=7), req(940))
        assert now(load) == (2, before), "what is not added leaves nothing behind"


# ---- measured ----


def batch(reqs: list[Any], mode: ForwardMode = ForwardMode.DECODE, **more: Any) -> Any:
    return SimpleNamespace(reqs=reqs, forward_mode=mode, **{"global_num_tokens": None, "prefill_stats": None, **more})


def test_a_step_lasts_from_result_to_result_and_idle_time_is_no_step():
    gate = made(10)
    result = SimpleNamespace()
    reqs = [req(10), req(20)]
    for now in (1.0, 1.010, 1.020, 1.030):
        gate.note_step(batch(reqs), result, now)
    assert gate.decode.seconds() == pytest.approx(0.010) and gate.decode.most() == (2, 30)
    gate.idle()
    gate.note_step(batch(reqs), result, 99.0)
    gate.note_step(batch(reqs), result, 99.01)
    assert gate.decode.seconds() == pytest.approx(0.010)


def seen(gate: ItlGate) -> list[float]:
    """What clients see of each step from now on, milliseconds."""
    found: list[float] = []
    note = gate.decode.note

    def noted(requests: int, tokens_read: int, seconds: float, waited: float) -> None:
        found.append(round(1000 * (seconds + waited), 6))
        note(requests, tokens_read, seconds, waited)

    gate.decode.note = noted  # type: ignore[method-assign]
    return found


def test_clients_wait_for_steps_over_prompts_as_well():
    """Of three that decode one ends before it, so two have waited, and one has joined: 2/3 of it for each."""
    gate, result, ended = made(10), SimpleNamespace(), req(10, done=5)
    stay, found = [req(10), req(20)], seen(gate)
    gate.note_step(batch([*stay, ended]), result, 1.0)
    ended.finished_reason = FINISH_LENGTH(5)
    gate.note_step(batch([*stay, ended]), result, 1.010)
    gate.note_step(
        batch([req(64)], ForwardMode.EXTEND, prefill_stats=SimpleNamespace(log_input_tokens=64)), result, 1.040
    )
    gate.note_step(batch([*stay, req(64)]), result, 1.050)
    gate.note_step(batch([*stay, req(64)]), result, 1.060)
    assert found == [10, 10 + 20, 10]


def test_nobody_waits_for_a_step_over_prompts_while_nobody_decodes():
    gate, result = made(10), SimpleNamespace()
    stats, found = SimpleNamespace(log_input_tokens=64), seen(gate)
    gate.note_step(batch([req(64)], ForwardMode.EXTEND, prefill_stats=stats), result, 1.0)
    gate.note_step(batch([req(64)], ForwardMode.EXTEND, prefill_stats=stats), result, 1.5)
    gate.note_step(batch([req(64)]), result, 1.510)
    # One that waits for a step over prompts and is aborted meanwhile has the loop idle, and is no client any more.
    gate.note_step(batch([req(64)], ForwardMode.EXTEND, prefill_stats=stats), result, 2.0)
    gate.idle()
    gate.note_step(batch([req(64)]), result, 3.0)
    gate.note_step(batch([req(64)]), result, 3.010)
    assert found == [10, 10]


def test_clients_wait_for_prompts_of_another_dp_rank():
    """Their step gives tokens here and is no step like others: what it took more than these is waited for."""
    gate, result, both = made(10), SimpleNamespace(), [req(10), req(20)]
    found = seen(gate)
    for now in range(40):
        gate.note_step(batch(both, global_num_tokens=[2, 7]), result, now / 100)
    gate.note_step(batch(both, global_num_tokens=[2, 512], is_extend_in_batch=True), result, 0.44)
    gate.note_step(batch(both, global_num_tokens=[2, 7]), result, 0.45)
    assert found[-2:] == [10, 10 + 40]
    assert gate.decode.most()[0] == 7, "of the fullest rank"


def test_accepted_drafts_and_lengths_of_answers():
    gate = made(10)
    for n in range(8):
        gate.note_step(batch([req(10), req(10)]), SimpleNamespace(accept_length_per_req_cpu=[1, 2]), n / 100)
    ended, given_up = req(10, done=30), req(10, done=5)
    ended.finished_reason, given_up.finished_reason = FINISH_LENGTH(30), FINISH_ABORT()
    gate.note_step(batch([ended, given_up]), SimpleNamespace(), 0.08)
    told = Estimate.of(gate.own())
    assert told is not None and told.milli_tokens == 2500 and told.answer == 30


# ---- on a worker ----


def test_without_the_option_there_is_no_gate_and_nothing_is_measured(monkeypatch):
    world = World()
    assert gate_of(world) is None
    made_with: list[Any] = []
    real = DecodeAdder.__init__

    def noted(self, *args):
        made_with.append(args[4]())
        real(self, *args)

    monkeypatch.setattr(DecodeAdder, "__init__", noted)
    serve(world, tokens(1, 8))
    assert made_with and not any(made_with)


def test_who_is_held_back_goes_when_another_ends():
    world = World(size=512, max_reqs=16, options=target(3.5))
    gate = known(world, estimate())
    requests = queue(world, *(tokens(n, 8) for n in range(1, 6)))
    world.step()
    assert asked(requests) == [True, True, False, False, False]
    assert gate.state()["held"] == 3 and gate.state()["held_requests"] == 1
    for _ in range(40):
        world.step()
    assert sum(asked(requests)) == 2 and gate.held_requests == 1
    for decode_req in requests[:2]:
        world.complete(decode_req)
    world.step()
    world.finish(requests[0].req)
    world.step()
    assert asked(requests) == [True, True, True, False, False]
    # The order is kept, and in the end all have been served.
    for _ in range(20):
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
        for running in list(world.running):
            world.finish(running)
    assert all(asked(requests)) and gate.state()["held"] == 0
    world.check()


@pytest.mark.parametrize("unknown", [False, True])
def test_who_is_held_back_since_no_step_was_like_that_is_looked_at_in_each_step(unknown):
    """Steps that are run are what it waits for, and nobody's end."""
    world = World(size=1024, max_reqs=32, options=target(100))
    gate = known(world, [0] * WIDTH if unknown else estimate(requests=2))
    requests = queue(world, *(tokens(n, 8) for n in range(1, 13)))
    for _ in range(3):
        world.step()
        assert sum(asked(requests)) == SEED
    gate.own = lambda: estimate(requests=4)  # type: ignore[method-assign]
    world.step()
    assert sum(asked(requests)) == 8


def test_who_is_held_back_is_looked_at_when_somebody_ends_and_now_and_then(monkeypatch):
    """And not with whatever comes into the tree: a look at a queue of hundreds takes a millisecond."""
    world = World(size=512, max_reqs=16, options=target(5.5))
    known(world, estimate())
    looks: list[int] = []
    admit = world.queue._admit
    monkeypatch.setattr(world.queue, "_admit", lambda *args: (looks.append(1), admit(*args))[1])
    requests = queue(world, *(tokens(n, 8) for n in range(1, 7)))
    world.step()
    assert asked(requests) == [True] * 4 + [False] * 2 and len(looks) == 1
    for decode_req in requests[:3]:
        world.complete(decode_req)
        world.step()
    assert len(looks) == 1 and len(world.running) == 3
    # One ends that decodes, and one whose transfer fails.
    world.finish(requests[0].req)
    world.step()
    assert len(looks) == 2 and sum(asked(requests)) == 5
    requests[3].kv_receiver.state = KVPoll.Failed
    world.step()
    assert len(looks) == 3 and sum(asked(requests)) == 6
    more = queue(world, *(tokens(n, 8) for n in range(7, 9)))
    world.step()
    looks.clear()
    for _ in range(2 * ABORT_INTERVAL):
        world.step()
    assert not any(asked(more)) and len(looks) == 2


def test_ranks_that_could_not_agree_look_again_in_the_next_step(monkeypatch):
    world = World(size=512, max_reqs=16, options=target(2.5))
    known(world, estimate())
    requests = queue(world, *(tokens(n, 8) for n in range(1, 4)))
    world.step()
    world.complete(requests[0])
    world.step()
    world.finish(requests[0].req)
    with monkeypatch.context() as differ:
        differ.setattr(world.queue, "_agree", lambda: None)
        world.step()
    assert sum(asked(requests)) == 1
    world.step()
    assert sum(asked(requests)) == 2


def test_a_higher_priority_goes_first_when_there_is_time_again():
    world = World(size=512, max_reqs=16, options=target(2.5))
    world.scheduler.enable_priority_scheduling, world.scheduler.schedule_low_priority_values_first = True, True
    known(world, estimate())
    (first,) = queue(world, tokens(1, 8), priority=5)
    world.step()
    low = queue(world, *(tokens(n, 8) for n in (2, 3)), priority=5)
    world.step()
    (high,) = queue(world, tokens(4, 8), priority=1)
    world.step()
    assert asked([first, *low, high]) == [True, False, False, False]
    world.complete(first)
    world.step()
    world.finish(first.req)
    world.step()
    assert asked([*low, high]) == [False, False, True]


def test_a_retracted_request_waits_for_time_and_goes_before_others():
    world = World(size=512, max_reqs=16, options=target(4.5))
    gate = known(world, estimate())
    running = [serve(world, tokens(n, 8), max_new=9).req for n in (1, 2, 3)]
    world.retract(running[2])
    known(world, estimate(per_request=1.5))
    (other,) = queue(world, tokens(9, 8))
    for _ in range(3):
        world.step()
    assert running[2] in world.queue.retracted_queue and not other.wire.asked
    assert gate.state()["held"] == 1
    world.finish(running[0])
    world.step()
    assert running[2] in world.running
    for _ in range(3):
        world.step()
    assert not other.wire.asked
    for left in list(world.running):
        world.finish(left)
    world.step()
    assert other.wire.asked
    world.check()


@pytest.mark.parametrize("queued", [0, 1])
def test_one_odd_measurement_keeps_no_retracted_request_back(queued):
    """Until somebody ends, which may take minutes. Nor while nobody else waits."""
    world = World(size=512, max_reqs=16, options=target(4.5))
    known(world, estimate())
    running = [serve(world, tokens(n, 8), max_new=90).req for n in (1, 2)]
    world.retract(running[1])
    gate = known(world, estimate(per_request=9.0))
    for _ in range(queued):
        world.arrive(tokens(9, 8))
    world.step()
    # What is measured from here on.
    gate.own = estimate
    for _ in range(3 * ABORT_INTERVAL):
        world.step()
        if world.queue.retracted_queue:
            # As the scheduler, for transfers and failures.
            world.queue.pop_preallocated()
    assert running[1] in world.running


def shifting(seed: int) -> Iterator[list[int]]:
    """Estimates that change from step to step, some of which let nobody in."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(
            [
                [0] * WIDTH,
                estimate(rng.random(), rng.random(), rng.random() / 10, answer=rng.randint(0, 9)),
                estimate(100, 1),
                estimate(0.1, 0.1, requests=rng.randint(1, 8)),
            ]
        )


def shift(loop: Loop, seed: int) -> None:
    told = shifting(seed)
    gate_of(loop).own = lambda: next(told)


class HeldPlay(Play):
    """Notes whether anybody was admitted beside others although steps were too long."""

    most = 0

    def between(self) -> None:
        self.most = max(self.most, len(self.loop.running) + len(self.loop.transfer.queue))
        super().between()


@pytest.mark.parametrize("loop_type", [Loop, SpeculatingLoop])
def test_every_life_ends_under_a_target(loop_type):
    """The real loop, whatever is estimated: invariants after each step, right answers, and nobody is left."""
    held = 0

    @given(script=scripts, size=st.sampled_from([40, 64]), seed=st.integers(0, 999))
    @settings(max_examples=15, deadline=None)
    def play(script, size, seed):
        nonlocal held
        loop = loop_type(options=target(1.5), size=size, page_size=4, reserved=0, max_reqs=4)
        shift(loop, seed)
        Play(loop, script).run()
        held += gate_of(loop).held_requests

    play()
    assert held


@given(script=scripts)
@settings(max_examples=10, deadline=None)
def test_one_at_a_time_where_the_target_is_out_of_reach(script):
    loop = Loop(options=target(0.001), size=64, page_size=4, reserved=0, max_reqs=4)
    known(loop, estimate())
    play = HeldPlay(loop, script)
    play.run()
    assert play.most <= 1


@given(script=scripts, size=st.sampled_from([40, 64]))
@settings(max_examples=10, deadline=None)
def test_a_target_that_is_never_reached_changes_nothing(script, size):
    seen = []
    for options in ({}, target(10**6)):
        loop = Loop(options=options, size=size, page_size=4, reserved=0, max_reqs=4)
        if options:
            known(loop, estimate(0, 0))
        play = RankPlay(loop, 0, [[*turn] for turn in script], [0])
        play.run()
        seen.append(play.turns)
    assert seen[0] == seen[1]


def test_the_real_loop_measures_its_steps():
    loop = Loop(options=target(10**6), size=256, page_size=4, reserved=0, max_reqs=8)
    for n in range(3):
        loop.handshake(loop.arrive(tokens(n, 8), max_new=12))

    def between() -> None:
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.iterations > 4 and loop.idle() and loop.in_flight is None:
            raise LoopEnds

    loop.run(between)
    gate = gate_of(loop)
    told = Estimate.of(gate.own())
    assert told is not None and told.requests == 3 and 8 < told.tokens <= 3 * 20
    assert 0 < gate.state()["step_ms"] < 10_000 and gate.state()["predicted_ms"] > 0


# ---- ranks ----


def on_ranks(rank: int, script: list[list[tuple]], lags: list[int], seed: int) -> list[tuple]:
    loop = Loop(options=target(1.5), size=64, page_size=4, reserved=0, max_reqs=4, group=dist.group.WORLD)
    # What the second rank measures is another machine's.
    shift(loop, seed + 1000 * rank)
    play = RankPlay(loop, rank, script, lags)
    play.run()
    gate = gate_of(loop)
    return [*play.turns, ("held", gate.held_requests, loop.queue.ranks.disagreements)]


def test_ranks_hold_back_the_same_requests(pair):
    held = 0

    @given(script=scripts, lags=st.lists(st.integers(-3, 3), min_size=4, max_size=4), seed=st.integers(0, 999))
    @settings(max_examples=12, deadline=None, phases=[HypothesisPhase.explicit, HypothesisPhase.generate])
    def play(script, lags, seed):
        nonlocal held
        turns = assert_same(pair.run(on_ranks, script, lags, seed))
        held += turns[-1][1]

    play()
    assert held


def hears_the_first(rank: int) -> list[Any]:
    me = Rank(rank, 512, options=target(3.5))
    known(me.world, estimate(per_request=1.0 if rank == 0 else 0.1)).take([0] * WIDTH)
    requests = queue(me.world, *(tokens(n, 8) for n in range(1, 6)))
    for _ in range(3):
        me.step()
    return [asked(requests), gate_of(me.world).estimate, me.world.queue.ranks.disagreements]


def test_all_go_by_what_the_first_rank_has_measured(pair):
    admitted, told, disagreements = assert_same(pair.run(hears_the_first))
    assert sum(admitted) == 2 and told.decode.per_request == MS and disagreements == 0
