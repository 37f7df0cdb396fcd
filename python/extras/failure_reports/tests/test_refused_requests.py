"""What an error costs a request, and how the other worker of a pair hears of it."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from engine_classes import engine_class
from fastapi import HTTPException
from prefill_front import bootstrap_server
from sglang.srt.disaggregation import peer_calls, refusal
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from tokenizer_front import MODES, Manager, answers, body, run, with_adapters

ENGINE = engine_class(TokenizerManager)


def request(params: dict | None = None, **options) -> GenerateReqInput:
    obj = GenerateReqInput(**{"input_ids": [1, 2, 3], "sampling_params": params or {}, "rid": "r"})
    for name, value in options.items():
        setattr(obj, name, value)
    return obj


# ---- the two workers of a pair ----


class _Sent(list):
    def send_pyobj(self, message):
        self.append(message)


def manager(mode: DisaggregationMode) -> TokenizerManager:
    """A tokenizer manager that has not been started."""
    made = object.__new__(TokenizerManager)
    made.disaggregation_mode, made.refused_rooms = mode, refusal.RefusedRooms()
    made.event_loop, made.send_to_scheduler, made.rid_to_state = None, _Sent(), {}
    made.server_args = SimpleNamespace(disaggregation_bootstrap_port=8998, enable_lora=False, dp_size=1)
    made.server_args.disaggregation_decode_enable_radix_cache = False
    return made


@pytest.fixture
def bootstrap_port():
    with bootstrap_server() as port:
        yield port


def test_prefill_hears_what_decode_refuses(bootstrap_port, monkeypatch):
    monkeypatch.setattr(peer_calls, "_listeners", {})
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.2)
    prefill = manager(DisaggregationMode.PREFILL)
    monkeypatch.setattr(ENGINE, "init_disaggregation", lambda self: None)
    prefill.init_disaggregation()

    async def hear() -> None:
        # With --skip-server-warmup there is no event loop before the first request.
        obj = request(bootstrap_host=["127.0.0.1"] * 2, bootstrap_port=bootstrap_port, bootstrap_room=[5, 6])
        (told,) = manager(DisaggregationMode.DECODE)._tell_peer(obj, "too long")
        await asyncio.sleep(0.1)
        prefill.event_loop = asyncio.get_running_loop()
        await asyncio.wrap_future(told)

    asyncio.run(asyncio.wait_for(hear(), 60))
    assert prefill.send_to_scheduler == [refusal.RefusedReq(room, "too long", by_decode=True) for room in (5, 6)]
    with pytest.raises(ValueError, match="too long"):
        prefill._check_room(6)
    prefill._check_room(7)


@pytest.mark.parametrize("room", [[5], {"a": 1}, "5", 5, None])
def test_a_server_by_itself_takes_anything_for_a_room(monkeypatch, room):
    alone, sent = manager(DisaggregationMode.NULL), []
    monkeypatch.setattr(ENGINE, "_send_one_request", lambda self, one: sent.append(one))
    monkeypatch.setattr(ENGINE, "_send_batch_request", lambda self, ones: sent.extend(ones))
    obj = SimpleNamespace(rid="a", bootstrap_room=room, input_ids=[1])
    alone.rid_to_state["a"] = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
    alone._send_one_request(obj)
    alone._send_batch_request([obj])
    assert sent == [obj, obj] and alone.rid_to_state["a"].sent


@pytest.mark.parametrize(
    ("tp_rank", "attn_tp_rank", "tells"), [(0, 0, True), (1, 1, False), (1, 0, True), (3, 1, False)]
)
def test_of_each_dp_rank_one_scheduler_tells_prefill(monkeypatch, tp_rank, attn_tp_rank, tells):
    """Other DP ranks have not been given the request."""
    told = []
    monkeypatch.setitem(Scheduler._tell_peer.__globals__, "tell_prefill", lambda *what: told.append(what))
    scheduler = object.__new__(Scheduler)
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.tp_rank, scheduler.attn_tp_rank = tp_rank, attn_tp_rank
    scheduler._tell_peer(request(bootstrap_host="h", bootstrap_port=1, bootstrap_room=5), "why")
    assert told == ([("h", 1, [5], "why")] if attn_tp_rank == 0 else [])


def test_what_prefill_refuses_goes_to_its_scheduler():
    prefill = manager(DisaggregationMode.PREFILL)
    prefill._tell_peer(request(bootstrap_host="127.0.0.1", bootstrap_room=5), "why")
    assert prefill.send_to_scheduler == [refusal.RefusedReq(5, "why", by_decode=False)]
    # No room, one that no worker would take, and no pair.
    for room in (None, "5", -1, 0, 2**63):
        prefill._tell_peer(request(bootstrap_room=room), "why")
    alone = manager(DisaggregationMode.NULL)
    alone._tell_peer(request(bootstrap_room=5), "why")
    assert len(prefill.send_to_scheduler) == 1 and alone.send_to_scheduler == []


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("too long"), "too long"),
        (RuntimeError("no image: " + "A" * 9000), "no image: " + "A" * 990),
        (TimeoutError(), "TimeoutError()"),
        (HTTPException(503, "why"), None),
    ],
)
@pytest.mark.parametrize("sent", [False, True])
def test_the_peer_hears_of_whatever_ends_a_request_before_the_scheduler_has_it(monkeypatch, error, said, sent):
    """An image, say, that one of the two workers could not fetch. Of what the scheduler has, the scheduler says it."""
    prefill = manager(DisaggregationMode.PREFILL)
    prefill.own_states = {}
    obj = request(bootstrap_host="127.0.0.1", bootstrap_room=5)
    obj.rid = "a"

    async def generate(self, obj, request):
        state = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
        self.rid_to_state["a"] = self.own_states[id(obj)]["a"] = state
        state.sent = sent
        raise error
        yield

    async def ask() -> None:
        async for _ in prefill.generate_request(obj):
            pass

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    with pytest.raises(type(error)):
        asyncio.run(ask())
    at_fault = isinstance(error, ValueError)
    told = [refusal.RefusedReq(5, said, by_decode=False, at_fault=at_fault)] if said and not sent else []
    assert prefill.send_to_scheduler == told
    assert (not prefill.rid_to_state) == (not sent) and not prefill.own_states


def test_prefill_hears_why_a_batch_ends_before_its_other_prompts_are_taken_back(monkeypatch):
    """The other way round, their transfers fail first, and prefill tells its client of an error of its own."""
    decode, told = manager(DisaggregationMode.DECODE), Future()
    decode.own_states, decode.enable_metrics = {}, False
    obj = request(bootstrap_host="h", bootstrap_port=1, bootstrap_room=[5, 6])
    monkeypatch.setattr(refusal, "tell", lambda *message, **said: told)

    async def generate(self, obj, request):
        for rid in "ab":
            state = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
            self.rid_to_state[rid] = self.own_states[id(obj)][rid] = state
            state.sent = rid == "a"
        raise ValueError("the second is too long")
        yield

    async def ask() -> None:
        with pytest.raises(ValueError, match="too long"):
            async for _ in decode.generate_request(obj):
                pass
        await asyncio.sleep(0)
        assert decode.send_to_scheduler == [] and [*decode.rid_to_state] == ["a"]
        told.set_exception(OSError("not told"))
        for _ in range(9):
            await asyncio.sleep(0)
        assert [one.rid for one in decode.send_to_scheduler] == ["a"]

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    asyncio.run(ask())


def test_a_transfer_that_fails_for_a_refusal_is_the_clients_error(monkeypatch):
    prefill, handled = manager(DisaggregationMode.PREFILL), []
    monkeypatch.setattr(ENGINE, "_handle_batch_output", lambda self, out: handled.append(out))
    prefill.rid_to_state = {
        rid: SimpleNamespace(obj=request(bootstrap_room=room)) for rid, room in (("a", 5), ("b", 6))
    }
    ends = [{"type": "abort", "message": "failed", "status_code": 500}, {"type": "abort"}, {"type": "length"}, None]
    out = SimpleNamespace(rids=["a", "b", "a", "gone"], finished_reasons=copy.deepcopy(ends))
    prefill._handle_batch_output(out)
    assert out.finished_reasons == ends
    prefill.refused_rooms.note(5, "too long")
    prefill._handle_batch_output(out)
    assert out.finished_reasons == [{"type": "abort", "message": "too long", "status_code": 400}, *ends[1:]]
    assert handled == [out, out]


def test_a_copy_of_a_request_that_is_served_does_not_end_it():
    """A proxy that asks again: the second is refused for its rid, and their room is the first one's."""
    decode = manager(DisaggregationMode.PREFILL)
    decode.rid_to_state = {"a": SimpleNamespace(obj=request(bootstrap_room=5))}
    decode._tell_peer(request(bootstrap_room=5), "rid is in use", {})
    assert decode.send_to_scheduler == []
    # Its own state does not count.
    decode._tell_peer(request(bootstrap_room=5), "too long", decode.rid_to_state)
    assert len(decode.send_to_scheduler) == 1


def test_a_refused_batch_with_lists_of_other_lengths_tells_whom_it_can():
    prefill = manager(DisaggregationMode.PREFILL)
    prefill._tell_peer(request(bootstrap_host=["a"], bootstrap_room=[5, 6, *range(1000, 3000)]), "why")
    assert len(prefill.send_to_scheduler) == 2002
    manager(DisaggregationMode.DECODE)._tell_peer(request(bootstrap_host=[], bootstrap_room=[5, 6]), "why")


@pytest.mark.parametrize("obj", [body(1), body(1, prompts=[[1, 2]])], ids=["batch", "one"])
def test_an_adapter_of_a_request_that_was_not_sent_is_released(obj):
    async def test():
        prefill = with_adapters(Manager(*MODES[0], context_len=2))
        with pytest.raises(ValueError, match="longer than"):
            await answers(prefill, copy.copy(obj))
        assert prefill.lora_registry.held == []

    obj.lora_path = "a"
    run(test())
