"""Prompts that decode computes itself: which, in what steps, and that nothing else of a worker is touched by it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation import local_prefill
from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.local_policy import AUTO, Policy
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.computed_answers import COMPUTED_ROUTE, ComputedAnswers
from sglang.srt.managers.io_struct import AbortReq, GetLoadReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.known_prefixes import is_plain
from sglang.srt.observability.metrics_collector import SchedulerStats
from sglang.srt.sampling.sampling_params import SamplingParams
from test_overlap_guard import Play, RankPlay, lives_on_ranks, scripts
from tokenizer_front import Manager, answers, body, until

LOCAL = {"disaggregation_decode_local_prefill": "40"}


# What is measured of a decode step, of a step over prompts and of prefill, as `Pace.own` has it; nothing.
UNPACED = (0, 0)
# A step over prompts takes as long as decode steps of one request earn in 8, and what prefill does much longer, or not.
SLOW_PREFILL, FAST_PREFILL = (3200, 10**7), (3200, 10)


def local_loop(slice_tokens: int, measured: tuple[int, ...] = UNPACED, **sizes: Any) -> Loop:
    """measured: on this rank, in place of the time that its steps take."""
    loop = Loop(options=LOCAL, **sizes)
    local = loop.transfer.local
    local.bucket.own = lambda: list(measured)
    local.policy = Policy(most=12, slice=slice_tokens, step=2 * slice_tokens, debt=24, paced=True)
    return loop


# ---- whole lives ----


@pytest.mark.parametrize(
    "page_size, slice_tokens, measured",
    [
        (1, 3, SLOW_PREFILL),
        (4, 4, UNPACED),
        (4, 7, SLOW_PREFILL),
        (4, 40, FAST_PREFILL),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_every_life_with_prompts_that_are_computed_here(page_size, slice_tokens, measured, overlap):
    """I1 to I8 after each step of the real loop; every answer is the model's; nothing hangs and nothing leaks."""
    computed, sliced, asked = 0, 0, 0

    @given(script=scripts, size=st.sampled_from([32, 40, 64]))
    @settings(max_examples=15, deadline=None)
    def play(script, size):
        nonlocal computed, sliced, asked
        sizes = {"size": size, "page_size": page_size, "reserved": 0, "max_reqs": 4}
        loop = local_loop(slice_tokens, measured, overlap=overlap, **sizes)
        Play(loop, script).run()
        computed += len({rid for rid, *_ in loop.extended})
        sliced += len(loop.extended) - len({rid for rid, *_ in loop.extended})
        asked += len(loop.asked_in)
        assert not loop.transfer.local.busy

    play()
    assert computed and asked
    assert sliced or slice_tokens == 40


def on_ranks(rank: int, page_size: int, size: int, script: list[list[tuple]], lags: list[int]) -> list[tuple]:
    # All go by the first rank's figures.
    measured = (UNPACED, SLOW_PREFILL) if size == 32 else (SLOW_PREFILL, FAST_PREFILL)
    sizes = {"size": size, "page_size": page_size, "reserved": 0, "max_reqs": 4, "group": dist.group.WORLD}
    loop = local_loop(4, measured[rank], **sizes)
    play = RankPlay(loop, rank, script, lags)
    play.run()
    return [*play.turns, ("extended", loop.extended)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_tp_ranks_compute_the_same_in_the_same_steps(pair, page_size):
    assert any(turns[-1][1] for turns in lives_on_ranks(pair, on_ranks, page_size, 12))


def played(
    script: dict[int, Any], slice_tokens: int = 4, page_size: int = 4, measured: tuple[int, ...] = UNPACED, **sizes: Any
) -> Loop:
    """A loop in which ``script`` says what happens before which turn; transfers arrive at once."""
    loop = local_loop(slice_tokens, measured, size=sizes.pop("size", 128), page_size=page_size, reserved=0, **sizes)

    def between() -> None:
        if loop.iterations in script:
            script[loop.iterations](loop)
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.iterations > max(script) and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200, "the loop does not come to an end"

    loop.run(between)
    loop.check_answers()
    return loop


def arrive(prompt: list[int], **options: Any):
    return lambda loop: loop.handshake(loop.arrive(prompt, **options))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_load_balancer_is_told_of_what_is_computed_here(overlap):
    """In every turn each request counts once, from its arrival to its end, and with its tokens until it decodes."""
    made: list[Any] = []
    computed: set[int] = set()

    def come(prompt: list[int], max_new: int) -> None:
        made.append(loop.arrive(prompt, max_new=max_new))
        loop.handshake(made[-1])

    def between() -> None:
        if loop.iterations == 1:
            come([1] * 8 + [2] * 12, 30)
        if loop.iterations == 6:
            come([1] * 8 + [2] * 12 + [3] * 11, 2)
            come([1] * 8 + [2] * 12 + [4] * 9, 2)
        for decode_req in loop.asked:
            loop.complete(decode_req)
        ended = [req for req in loop.scheduler.running_batch.reqs if req.finished()]
        waiting = [dr.req for dr in made if dr.req not in loop.running and not dr.req.finished()]
        load, loads = loop.scheduler.get_load(GetLoadReqInput()), loop.scheduler.get_loads()
        used = loop.size - loop.allocator.available_size() - loop.tree.evictable_size()
        assert load.num_reqs == len(waiting) + len(loop.running) + len(ended)
        assert load.num_waiting_reqs == loads.num_waiting_reqs == len(waiting)
        assert load.num_tokens == used + sum(req.seqlen for req in waiting) and loads.num_used_tokens == used
        computed.add(len(*(beside(()) for beside in loop.transfer.hooks.beside)))
        if len(loop.told) == 3 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 100

    loop = local_loop(4, overlap=overlap, size=128, page_size=4, reserved=0)
    loop.scheduler.stats = SchedulerStats()
    loop.run(between)
    loop.check_answers()
    assert computed == {0, 1, 2}


def test_a_full_hit_computes_the_last_page_anew_and_not_in_place():
    prompt = [1, 2, 1, 1, 2, 2, 1, 2]
    loop = played({1: arrive(prompt, max_new=1), 6: arrive(prompt, max_new=3)})
    assert loop.extended == [("r1", 0, 8), ("r2", 4, 8)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_step_reads_what_it_writes(page_size: int):
    """Remainders that begin alike, for too few tokens to wait for each other; one that does not is in the same step."""
    held = [1] * 8

    def all_four(loop: Loop) -> None:
        for rest in ([2] * 4 + [3] * 8, [2] * 4 + [1] * 8, [3] * 12, [2] * 4 + [3] * 4 + [1] * 4):
            arrive([*held, *rest], max_new=2)(loop)

    loop = played({1: arrive(held, max_new=1), 6: all_four}, slice_tokens=100, page_size=page_size)
    parts = {part[0]: part for part in loop.extended}
    steps = [loop.extended_in[parts[rid]] for rid in ("r2", "r3", "r4", "r5")]
    assert steps[0] == steps[2] < steps[1] and steps[3] > steps[0]
    assert parts["r3"][1] == 12 and parts["r5"][1] == 16


@pytest.mark.parametrize(("chunk", "most", "step"), [(8, 1024, 8), (-1, 16, 16), (64, 4, 64), (8192, 4, 2048)])
def test_a_step_has_no_more_tokens_than_the_engine_keeps_memory_for(chunk: int, most: int, step: int):
    """A chunk, as on workers that compute prompts; without chunks, what a batch of prompts may have there."""
    loop = Loop(options=LOCAL | {"chunked_prefill_size": chunk, "max_prefill_tokens": most})
    local = loop.transfer.local
    assert (local.policy.step, local.policy.slice) == (step, min(AUTO.slice, step)) and local.policy.most == 40
    # With drafts a prompt is computed in one step, or not here.
    assert Policy.of("40").within(step, slices=False).most == min(40, step)


# ---- which ----


def plain(**more: Any) -> Any:
    req = {
        "return_logprob": False,
        "logprob_start_len": 8,
        "origin_input_ids": [1] * 8,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "is_prefill_only": False,
        "input_embeds": None,
        "multimodal_inputs": None,
        "session": None,
        "token_type_ids": None,
        "bootstrap_host": "10.0.0.1",
    }
    return SimpleNamespace(**(req | more))


def test_requests_that_need_prefill():
    assert is_plain(plain()) and is_plain(plain(return_logprob=True))
    assert is_plain(plain(return_logprob=True, logprob_start_len=-1))
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    for more in (
        {"return_logprob": True, "logprob_start_len": 7},
        {"return_hidden_states": True},
        {"return_routed_experts": True},
        {"is_prefill_only": True},
        {"input_embeds": [[0.0]]},
        {"multimodal_inputs": object()},
        {"session": object()},
        {"token_type_ids": [0]},
        {"bootstrap_host": FAKE_BOOTSTRAP_HOST},
    ):
        assert not is_plain(plain(**more)), more


# ---- what prefill has seen ----


# ---- prefill's front ----


class State(SimpleNamespace):
    """That can be referred to weakly, as the engine's."""


class Front:
    """A tokenizer manager as far as `ComputedAnswers` knows it."""

    def __init__(self):
        self.rid_to_state, self.sent, self.released = {}, [], []
        self.server_args = SimpleNamespace(weight_version="v", enable_lora=False, skip_tokenizer_init=False)
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self.sent.append)
        self.remembered = []

    def _remember(self, rid: str, state: Any, life: None) -> None:
        self.remembered.append((rid, state.out_list[-1]["meta_info"]["finish_reason"]["type"]))

    def add(self, rid: str, room: int, sent: bool) -> Any:
        state = State(
            obj=SimpleNamespace(bootstrap_room=room, return_logprob=False, lora_path=None),
            sent=sent,
            finished=False,
            prompt_tokens=9,
            text="",
            out_list=[],
            event=asyncio.Event(),
            time_stats=SimpleNamespace(set_finished_time=lambda: None, get_e2e_latency=lambda: 0.5),
        )
        self.rid_to_state[rid] = state
        return state


def test_a_request_that_waits_is_answered_and_dropped():
    front = Front()
    answers = ComputedAnswers(front)
    other, state = front.add("x", 4, True), front.add("a", 5, True)
    for rid, room in (("x", 4), ("a", 5)):
        assert not answers.answers(SimpleNamespace(rid=rid, bootstrap_room=room, input_ids=[1] * 9))
    answers.note(5)
    assert state.finished and state.event.is_set() and front.sent == [ComputedReq(5, "a")]
    meta = state.out_list[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["prompt_tokens"] == 9
    assert list(front.rid_to_state) == ["x"] and not other.finished
    assert front.remembered == [("a", "length")]
    # The word comes twice: the room is another request's by then, or nobody's.
    answers.note(5)
    assert front.sent == [ComputedReq(5, "a")]


@pytest.mark.parametrize("left", [("a", "b"), ("b", "a"), ("a",), ("b",)])
def test_all_of_one_room_are_answered(left):
    """Of two only the last was; the scheduler dropped both, and the client of the other waited for ever."""
    front = Front()
    answers = ComputedAnswers(front)
    states = {rid: front.add(rid, 5, True) for rid in sorted(left, reverse=left[0] == "b")}
    for aborted in {"a", "b"}.difference(left):
        front.add(aborted, 5, True)
    for rid in (*states, *{"a", "b"}.difference(left)):
        assert not answers.answers(SimpleNamespace(rid=rid, bootstrap_room=5, input_ids=[1] * 9))
    for aborted in {"a", "b"}.difference(left):
        del front.rid_to_state[aborted]
    answers.note(5)
    assert all(state.finished and len(state.out_list) == 1 for state in states.values()) and not front.rid_to_state
    assert {one.rid for one in front.sent} == {*left} and len(front.sent) == len(left)
    # Of a room that is always the same, nothing is kept of those that have ended.
    last = front.add("c", 5, True)
    answers.answers(SimpleNamespace(rid="c", bootstrap_room=5, input_ids=[1]))
    assert not last.finished and last.rids == {"c"}


def test_an_abort_that_comes_from_the_scheduler_after_the_answer_ends_nothing():
    """The abort of a client crosses with decode's word, and the request had waited: the scheduler answers it."""
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.rid_to_state, manager.ended, manager.server_args = {}, None, SimpleNamespace(enable_lora=False)
    manager._handle_abort_req(AbortReq(rid="a"))
    assert not manager.rid_to_state


def test_a_request_that_comes_after_the_word_is_not_sent():
    front = Front()
    answers = ComputedAnswers(front)
    answers.note(5)
    assert front.sent == []
    state = front.add("a", 5, False)
    assert answers.answers(SimpleNamespace(rid="a", bootstrap_room=5, input_ids=[1] * 3))
    assert state.finished and state.out_list[0]["meta_info"]["prompt_tokens"] == 3 and not front.rid_to_state
    again = front.add("b", 5, False)
    assert not answers.answers(SimpleNamespace(rid="b", bootstrap_room=5, input_ids=[1] * 3))
    assert not again.finished and again.prompt_tokens == 3


class BatchManager(Manager):
    """A prefill's tokenizer manager that sends the prompts of a batch together, as the engine does with token ids."""

    _should_use_batch_tokenization = TokenizerManager._should_use_batch_tokenization

    def __init__(self):
        super().__init__(DisaggregationMode.PREFILL, False)
        self.server_args.weight_version, self.server_args.skip_tokenizer_init = "v", False
        self.is_generation = True

    async def _tokenize_one_request(self, obj):
        tokenized_obj = await super()._tokenize_one_request(obj)
        tokenized_obj.input_ids = obj.input_ids
        return tokenized_obj


def test_a_batch_is_served_without_the_prompt_that_decode_computes():
    """Decode's word came before the batch is sent, whose states the engine looks up when it has been."""

    async def serve(*computed: int) -> None:
        front, rooms = BatchManager(), [5, 6, 7]
        for room in computed:
            front.computed.note(room)
        obj = body(1, prompts=[[1, 2], [3, 4], [5, 6, 7]], bootstrap_room=rooms, rid=["a", "b", "c"])
        task = asyncio.ensure_future(answers(front, obj))
        await until(lambda: front.send_to_scheduler.got or len(computed) == len(rooms), task)
        sent = [one for message in front.send_to_scheduler.got for one in message.batch]
        assert [one.bootstrap_room for one in sent] == [room for room in rooms if room not in computed]
        # In its turn: what is called soon has been.
        await asyncio.sleep(0)
        assert [*front.rid_to_state] == [one.rid for one in sent]
        for one in sent:
            front.answer(one, completion_tokens=1)
        meta = [out["meta_info"] for out in await task]
        assert [one["id"] for one in meta] == ["a", "b", "c"]
        assert [one["completion_tokens"] for one in meta] == [int(room not in computed) for room in rooms]
        assert not computed or [meta[room - 5]["prompt_tokens"] for room in computed] == [2, 3][-len(computed) :]
        assert not front.rid_to_state and len(front.send_to_scheduler.got) <= 1

    for computed in ((), (7,), (6, 7)):
        asyncio.run(asyncio.wait_for(serve(*computed), 30))


def test_what_the_scheduler_refuses_of_a_batch_costs_the_prompt_that_decode_computes_nothing():
    """Nor the others: of what the scheduler has, the scheduler tells decode."""

    async def serve() -> None:
        front = BatchManager()
        front.computed.note(6)
        obj = body(1, prompts=[[1, 2], [3, 4], [5, 6]], bootstrap_room=[5, 6, 7], rid=["a", "b", "c"])
        task = asyncio.ensure_future(answers(front, obj))
        await until(lambda: front.send_to_scheduler.got, task)
        (sent,) = front.send_to_scheduler.got
        refused = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": "a bad grammar"}
        front.answer(sent.batch[0], finish_reason=refused)
        with pytest.raises(ValueError, match="a bad grammar"):
            await task
        assert front.send_to_scheduler.got == [sent]

    asyncio.run(asyncio.wait_for(serve(), 30))


def test_a_batch_that_is_given_up_before_its_computed_prompt_is_answered():
    async def serve() -> None:
        front = Front()
        answers = ComputedAnswers(front)
        answers.note(5)
        state = front.add("a", 5, False)
        assert answers.answers(SimpleNamespace(rid="a", bootstrap_room=5, input_ids=[1]), of_batch=True)
        assert not state.finished and front.rid_to_state == {"a": state}
        other = front.add("a", 8, False)
        await asyncio.sleep(0)
        assert not state.finished and not state.out_list and front.rid_to_state == {"a": other}

    asyncio.run(serve())


@pytest.mark.parametrize(("overlap", "places"), [(False, 1), (True, 3)])
def test_who_has_its_kv_decodes_although_short_turns_keep_coming(overlap, places):
    """With more rows than places, each place that came free was first seen, and taken, by the step over prompts."""
    options = {"disaggregation_decode_local_prefill": "128"}
    loop = Loop(options=options, size=4096, page_size=4, reserved=0, max_reqs=12, overlap=overlap)
    scheduler, held = loop.scheduler, [1] * 40
    scheduler.max_running_requests = places
    turns = iter(range(1, 400))
    asked: list[Any] = []
    began: list[int] = []

    def arrive(prompt: list[int], max_new: int) -> Any:
        decode_req = loop.arrive(prompt, max_new=max_new)
        loop.handshake(decode_req)
        return decode_req.req

    def between() -> None:
        for decode_req in loop.asked:
            loop.complete(decode_req)
        turn = loop.iterations
        if turn == 1:
            arrive(held, 2)
        waiting = sum(map(len, (loop.transfer.local.waiting, loop.queue.queue, loop.transfer.queue)))
        if turn > 8 and waiting + len(scheduler.waiting_queue) < 4:
            n = next(turns)
            # Their ends are not those of one step.
            arrive([*held, 2 + n % 90, 2 + n // 90, 3, 4], 24 if n > places else 8 * n)
        if turn == 30:
            asked.append(arrive([77] * 300, 4))
        if asked and asked[0] in loop.running and not began:
            began.append(len(loop.told))
        if turn >= 900 or (began and len(loop.told) >= began[0] + 8):
            raise LoopEnds

    loop.run(between)
    assert began and began[0] <= 16, loop.iterations
    # Nor do the others stand still.
    assert len(loop.told) >= began[0] + 8


def test_prefill_is_told_again_of_a_room_whose_second_request_was_refused(monkeypatch):
    """Its half may come to prefill after the word: nobody would ask for it."""
    told: list[tuple] = []
    monkeypatch.setattr(local_prefill, "tell", lambda *message: told.append(message))

    def come(loop: Loop) -> None:
        loop.transfer.local._tells = True
        arrive([1] * 8 + [2] * 3, max_new=2)(loop)
        again = Req("again", "", [1], SamplingParams(), bootstrap_host="10.0.0.1", bootstrap_room=2)
        loop.queue.add(again)
        assert "a room of its own" in again.finished_reason.message

    played({1: arrive([1] * 9, max_new=40), 6: come, 9: arrive([1] * 8 + [3] * 3, max_new=2)})
    addr = "10.0.0.1:1"
    assert told == [(addr, COMPUTED_ROUTE, [2])] * 2 + [(addr, COMPUTED_ROUTE, [3])]
