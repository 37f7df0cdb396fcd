"""LoRA on decode: a batch has no more adapters than are loaded at once, and each has a tree of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engine_classes import engine_class
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.decode_radix.hooks import NO_HOOKS
from sglang.srt.disaggregation.decode_radix.retraction import joins
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.managers.lora_batch import AdapterHooks
from sglang.srt.managers.schedule_batch import Req, keep_extra_key
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams


class Named(SimpleNamespace):
    """A request, by its adapter."""

    over = False

    def finished(self) -> bool:
        return self.over


def scheduler(monkeypatch, queue: str, running: str, tree: type = DecodeRadixCache, room: int = 99) -> Scheduler:
    """A request is called by its adapter; the base model is one as well. The engine's method takes ``room`` of them."""
    made = object.__new__(Scheduler)
    made.enable_lora, made.tree_cache = True, object.__new__(tree)
    made.waiting_queue = [Named(lora_id=adapter) for adapter in queue]
    made.running_batch = SimpleNamespace(reqs=[Named(lora_id=adapter) for adapter in running])
    manager = SimpleNamespace(validate_lora_batch=lambda adapters: len(adapters) <= 2)
    made.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))

    made.server_args = SimpleNamespace(disaggregation_decode_max_overtaken=32)
    made.room = room

    def take(self):
        taken, self.waiting_queue = self.waiting_queue[: self.room], self.waiting_queue[self.room :]
        return "".join(req.lora_id for req in taken)

    made.disagg_decode_transfer_queue = SimpleNamespace(scheduler=made, hooks=NO_HOOKS)
    monkeypatch.setattr(engine_class(decode.SchedulerDisaggregationDecodeMixin), "get_new_prebuilt_batch", take)
    return made


@pytest.mark.parametrize(
    ("running", "queue", "taken", "left"),
    [("", "abcab", "abab", "c"), ("a", "bcab", "bab", "c"), ("ab", "ccab", "ab", "cc"), ("", "", "", "")],
)
def test_a_batch_has_no_more_adapters_than_fit(monkeypatch, running, queue, taken, left):
    """The engine looks at that on prefill only; one too many ends the scheduler."""
    made = scheduler(monkeypatch, queue, running)
    assert made.get_new_prebuilt_batch() == taken
    assert [req.lora_id for req in made.waiting_queue] == list(left)


@pytest.mark.parametrize("most", [0, 1, 32])
@pytest.mark.parametrize(("start", "late"), [("ab", "c"), ("abab", "cdc"), ("aab", "ccc")])
def test_adapters_that_run_do_not_keep_others_out_for_ever(monkeypatch, start, late, most):
    """Two that are loaded, one of which gets a request a step: a third one's turn comes, and then the others' again."""
    made = scheduler(monkeypatch, "", "", room=3)
    made.server_args.disaggregation_decode_max_overtaken = most
    rotation, begun = itertools.cycle(start), []
    for step in range(800):
        # Three places, of which the first comes free in each step; whoever has not begun goes on waiting.
        made.running_batch.reqs = made.running_batch.reqs[1:]
        made.waiting_queue += [Named(lora_id=next(rotation))]
        if step % 100 == 5:
            made.waiting_queue += [Named(lora_id=adapter) for adapter in late]
        made.room = 3 - len(made.running_batch.reqs)
        taken = made.get_new_prebuilt_batch()
        made.running_batch.reqs += [Named(lora_id=adapter) for adapter in taken]
        assert len({req.lora_id for req in made.running_batch.reqs}) <= 2
        begun += [(step, adapter) for adapter in taken]
    found = [step for step, adapter in begun if adapter in late]
    assert len(found) == 8 * len(late)
    # Overtaken as often as may be, by one a step or two, and then until the smaller of two adapters has run out.
    assert all(step % 100 < 5 + 2 * most + 30 for step in found)
    assert {adapter for step, adapter in begun if step > 700} >= {*start, *late}


# ---- beside prompts that decode computes ----


def adapter_loop(overlap: bool, overtaken: int, **policy: int) -> Loop:
    """The real loop of a worker that loads two adapters at once and computes prompts; see `Policy`."""
    options = {"disaggregation_decode_local_prefill": "40", "enable_lora": True}
    loop = Loop(options=options, reserved=0, overlap=overlap, size=2048, page_size=4, max_reqs=6)
    loop.transfer.local.policy = Policy(slice=4, step=8, debt=10**6, **policy)
    manager = SimpleNamespace(validate_lora_batch=lambda adapters: len(adapters) <= 2)
    loop.scheduler.tp_worker.model_runner = SimpleNamespace(lora_manager=manager)
    loop.scheduler.server_args.disaggregation_decode_max_overtaken = overtaken
    return loop


def arrivals(loop: Loop) -> Callable[[int, str, int], Any]:
    """Has a request of so many tokens come for an adapter, with an answer of so many, and shake hands; returns it."""
    rnd = random.Random(1)

    def come(tokens: int, adapter: str, max_new: int) -> Any:
        decode_req = loop.arrive([rnd.randrange(1, 90) for _ in range(tokens)], extra_key=adapter, max_new=max_new)
        decode_req.req.lora_id = adapter
        loop.handshake(decode_req)
        return decode_req.req

    return come


def late_among_others(loop: Loop, late: int, others: int, turns: int) -> tuple[Any, list[tuple[int, int]]]:
    """Requests of two adapters come from prefill in turns, and one of a third in turn 30, of ``late`` tokens.

    Returns its request when it has its first token, or when the time is up, and in which turns what of it was computed.
    """
    come, came = arrivals(loop), []

    def between() -> None:
        turn = loop.iterations
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if turn % 3 == 0:
            come(others, "ab"[turn // 3 % 2], 8)
        if turn == 30:
            came.append(come(late, "c", 4))
        assert len({req.lora_id for req in loop.running}) <= 2
        if turn >= turns or (came and came[0].output_ids):
            raise LoopEnds

    loop.run(between)
    computed = [(loop.extended_in[step], step[2]) for step in loop.extended if step[0] == came[0].rid]
    return came[0], computed


@pytest.mark.parametrize("overlap", [True, False])
def test_who_is_computed_here_has_a_turn_beside_those_from_prefill(overlap):
    """Who waits for it was looked for among those whose KV has arrived only."""
    req, computed = late_among_others(adapter_loop(overlap, 4, most=12), late=8, others=20, turns=300)
    assert req.output_ids and computed


@pytest.mark.parametrize("overlap", [True, False])
def test_a_turn_lasts_until_the_last_slice(overlap):
    """Between two, its adapter was nobody's, and each slice waited for another turn."""
    loop = adapter_loop(overlap, 8, most=40)
    req, computed = late_among_others(loop, late=40, others=48, turns=600)
    turns = [turn for turn, _ in computed]
    assert req.output_ids and len(turns) > 4
    # A decode step between two.
    assert turns[-1] - turns[0] <= 3 * len(turns)
    # Counted once, as the others that have begun.
    begun = sum(1 for one in loop.told if one.output_ids) + len(loop.running)
    assert loop.scheduler.adapter_turns.began <= begun + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_who_is_computed_in_slices_ends_though_another_waits_for_its_place(overlap):
    """Its own next slice was held back with those that are new: neither went on."""
    loop, came = adapter_loop(overlap, 4, most=200), {}
    come = arrivals(loop)

    def between() -> None:
        turn = loop.iterations
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if turn % 3 == 0:
            come(204, "a", 8)
        if turn == 10:
            came["b"] = come(160, "b", 4)
        if turn == 14:
            came["c"] = come(208, "c", 4)
        if turn >= 300 or (came.keys() >= {"b", "c"} and all(req.output_ids for req in came.values())):
            raise LoopEnds

    loop.run(between)
    assert came["b"].output_ids and came["c"].output_ids


# ---- beside requests that were retracted ----


@pytest.mark.parametrize("overlap", [True, False])
def test_who_comes_back_waits_for_its_adapter_without_kv(overlap):
    """With KV, which no retraction brings, it left who ran too little to its end: "Out of memory", status 500."""
    loop = Loop(options={"enable_lora": True}, overlap=overlap, size=100, page_size=1, reserved=6)
    manager = SimpleNamespace(validate_lora_batch=lambda adapters: len(adapters) <= 1)
    loop.scheduler.tp_worker.model_runner = SimpleNamespace(lora_manager=manager)
    loop.scheduler.server_args.disaggregation_decode_max_overtaken = 32
    come, made, was_retracted = arrivals(loop), [], False
    comes = {1: (1, "a", 52), 3: (1, "a", 50), 5: (10, "b", 60)}

    def between() -> None:
        nonlocal was_retracted
        if loop.iterations in comes:
            made.append(come(*comes[loop.iterations]))
        for decode_req in loop.asked:
            loop.complete(decode_req)
        was_retracted |= bool(loop.queue.retracted_queue)
        if len(loop.told) == 3 and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300, "they do not end"

    loop.run(between)
    assert was_retracted and [len(req.output_ids) for req in made] == [52, 50, 60]


def test_who_comes_back_need_not_fit_beside_one_that_has_ended(monkeypatch):
    """With the last step over prompts, which is of this turn: its adapter may have been unloaded."""
    made = scheduler(monkeypatch, "", "a")
    made.max_running_requests, made.req_to_token_pool = 9, SimpleNamespace(size=9)
    last = [Named(lora_id="b"), Named(lora_id="c")]
    hooks = SimpleNamespace(reqs=[lambda: last], in_step=[lambda: last], begun=[])
    queue = made.disagg_decode_transfer_queue = SimpleNamespace(scheduler=made, hooks=hooks)
    hooks.joins = [AdapterHooks(queue).joins]
    assert not joins(made, hooks)(Named(lora_id="d"))
    last[0].over = last[1].over = True
    test = joins(made, hooks)
    assert test(Named(lora_id="d")) and not test(Named(lora_id="b"))


def test_without_the_flag_it_is_the_engines(monkeypatch):
    made = scheduler(monkeypatch, "abc", "", tree=RadixCache)
    assert made.get_new_prebuilt_batch() == "abc"


def test_an_adapter_is_part_of_the_key():
    """Trap 14; the key of a client's own goes with it."""

    sampling = SamplingParams()

    def key(**options) -> str | None:
        return Req("r", "", [1], sampling, **options).extra_key

    assert key() is None and key(extra_key="k") == "k"
    keep_extra_key(SimpleNamespace(sampling_params=sampling, extra_key="k"))
    assert len({key(), key(lora_id="a"), key(lora_id="b")}) == 3 and key(lora_id="a") == "ka"
