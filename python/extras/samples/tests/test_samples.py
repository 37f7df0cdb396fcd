"""n > 1: each sample has a room, the same on both workers, and what one worker refuses the other hears of."""

from __future__ import annotations

import ast
import asyncio
import copy
import gc
import inspect
import textwrap
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import samples_front
from engine_classes import engine_class
from samples_front import ROOMS, Manager, looped
from sglang.srt.disaggregation import refusal, room_notes
from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.peer_calls import listen
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers import samples
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.samples import MAX_SAMPLES, SAMPLE_ROUTE, STRIDE, sample_room, samples_asked
from tokenizer_front import MODES, answers, body, run, until, with_adapters

from sglang_pd_radix.patching import syntax
from sglang_pd_radix.tools.cluster import free_ports

server, no_shared_memory = samples_front.server, samples_front.no_shared_memory
EDGES = [1, 2, STRIDE - 1, STRIDE, STRIDE + 1, 7 * STRIDE, 2**62, 2**63 // STRIDE * STRIDE, 2**63 - STRIDE, 2**63 - 1]


# ---- rooms ----


@pytest.mark.parametrize("room", EDGES)
def test_rooms_of_samples(room):
    rooms = [sample_room(room, i) for i in range(MAX_SAMPLES)]
    assert len({*rooms, room}) == MAX_SAMPLES + 1
    assert 0 < min(rooms) and max(rooms) < 2**63
    for dp_size in (*range(1, 17), 32, 64, 128, 256):
        assert STRIDE % dp_size == 0 and {one % dp_size for one in rooms} == {room % dp_size}


def test_rooms_are_the_same_in_every_version():
    """They are part of the protocol: a change of them needs another DERIVATION."""
    assert [sample_room(5, i) for i in range(2)] == [9121191657396698885, 9121191657408230405]
    assert sample_room(2**63 - 1, 3) == 6383416139643062527


# ---- a prompt for each sample ----


def expanded(**options) -> GenerateReqInput:
    obj = GenerateReqInput(**options)
    rid = obj.rid
    obj.normalize_batch_and_arguments()
    samples.give_rooms(obj, rid)
    return obj


def test_samples_become_prompts():
    obj = expanded(
        input_ids=[[1], [2]],
        sampling_params=[{"n": 2, "temperature": 0.5, "sampling_seed": 3}, {"n": 2, "top_k": 7}],
        bootstrap_host=["a", "b"],
        bootstrap_port=[1, 2],
        bootstrap_room=[5, 6],
        extra_key=["x", "y"],
        rid=["one", "two"],
        return_hidden_states=[True, False],
        token_ids_logprob=[8, 9],
    )
    obj.normalize_batch_and_arguments()
    assert obj.batch_size == 4 and obj.parallel_sample_num == 1 and list(obj.request_rooms) == [5, 6]
    items = [obj[i] for i in range(4)]
    assert [item.input_ids for item in items] == [[1], [1], [2], [2]]
    assert [item.bootstrap_room for item in items] == [sample_room(room, i) for room in (5, 6) for i in range(2)]
    assert [(item.bootstrap_host, item.bootstrap_port) for item in items] == [("a", 1)] * 2 + [("b", 2)] * 2
    assert obj.extra_key == ["x", "x", "y", "y"]
    assert [item.rid for item in items] == ["one_0", "one_1", "two_0", "two_1"]
    assert [item.return_hidden_states for item in items] == [True, True, False, False]
    assert [item.token_ids_logprob for item in items] == [[8, 9]] * 4
    assert items[0].sampling_params == items[1].sampling_params == {"n": 1, "temperature": 0.5, "sampling_seed": 3}
    assert items[2].sampling_params == items[3].sampling_params == {"n": 1, "top_k": 7}


def test_every_list_of_the_engine_is_expanded():
    """What the engine takes from a list for each prompt."""
    source = textwrap.dedent(inspect.getsource(engine_class(GenerateReqInput).__getitem__))
    taken = {
        node.value.attr
        for node in ast.walk(syntax.parse(source))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
    }
    # rid and lora_id come otherwise, the latter after this.
    assert taken - {"rid", "lora_id"} <= set(samples._LISTS)


@pytest.mark.parametrize("rooms", [5, [5], [5, 6, 7]])
def test_the_room_of_one_prompt_however_it_is_given(rooms):
    """The router gives a chat request with n = 3 three rooms; the engine makes more of one."""
    obj = expanded(
        text="a",
        sampling_params={"n": 3},
        bootstrap_room=rooms,
        bootstrap_host="h" if rooms == 5 else ["h"] * len(rooms),
        rid="r" * 3,
        modalities=[],
    )
    assert obj.bootstrap_room == [sample_room(5, i) for i in range(3)] and obj.bootstrap_host == ["h"] * 3
    assert obj.rid == ["rrr_0", "rrr_1", "rrr_2"]


def test_no_sample_is_called_by_the_beginning_of_another():
    names = expanded(text="a", sampling_params={"n": 12}, rid="r").rid
    assert not any(a != b and b.startswith(a) for a in names for b in names)


def test_rooms_that_are_none_stay_what_they_are():
    obj = expanded(text="a", sampling_params={"n": 2}, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_room=[9])
    assert obj.bootstrap_room == [9, 9]
    for room in (0, None, "5", -1):
        assert expanded(text="a", sampling_params={"n": 2}, bootstrap_room=[room]).bootstrap_room == [room] * 2


def test_what_cannot_be_a_room():
    """The checks of requests, which come after, refuse it; nothing fails before."""
    obj = expanded(
        text=["a", "b", "c"],
        sampling_params={"n": 2},
        bootstrap_room=[5, [5], None],
        bootstrap_host=["h", ["h"], None],
    )
    assert list(obj.request_rooms) == [5, None, None]
    assert obj.bootstrap_room[2:] == [[5], [5], None, None]


def test_lists_that_are_too_short():
    with pytest.raises(IndexError):
        expanded(text=["a", "b"], sampling_params={"n": 2}, decode_tp_size=[1])
    with pytest.raises(ValueError, match="Duplicate"):
        expanded(text=["a", "b"], sampling_params={"n": 2}, rid=["x", "x"])
    # Nor one that is too long, of which an adapter would be left out.
    for paths in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="lora_path"):
            expanded(text=["a", "b"], sampling_params={"n": 2}, lora_path=paths)
    assert expanded(text="a", sampling_params={"n": 2}, lora_path=["x"]).lora_path == ["x"] * 2


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"])
def test_lists_of_the_router_that_are_empty(name):
    """The other worker is told of it."""
    prefill = Manager(DisaggregationMode.PREFILL, False)
    with pytest.raises(IndexError):
        asyncio.run(answers(prefill, body(2, prompts=[[1, 2]], **{"bootstrap_room": [11], name: []})))
    assert [message.room for message in prefill.send_to_scheduler.got] == [11] * (name != "bootstrap_room")


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        (None, False),
        ({}, False),
        ({"n": 1}, False),
        ({"n": 2}, True),
        ([{"n": 2}, {"n": 2}], True),
        ([{"n": 2}], True),
        ([], False),
        ([5], False),
        ({"n": True}, False),
        ({"n": 0}, False),
        ({"n": "2"}, False),
        ({"n": MAX_SAMPLES}, True),
        ({"n": MAX_SAMPLES + 1}, False),
    ],
)
def test_what_asks_for_samples(params, asked):
    assert samples_asked(GenerateReqInput(text="a", sampling_params=params)) == asked


# ---- both workers ----


@looped
async def test_prefill_that_is_told_first_sends_the_samples_only():
    prefill = Manager(DisaggregationMode.PREFILL, False)
    prefill.samples.announced([11, 12])
    task = asyncio.ensure_future(answers(prefill, body()))
    await until(lambda: len(prefill.send_to_scheduler.requests) == 6, task)
    sent = prefill.send_to_scheduler.got
    assert [message.bootstrap_room for message in sent] == ROOMS
    assert {message.sampling_params.n for message in sent} == {1}
    for message in sent[::-1]:
        prefill.answer(message)
    assert [out["meta_info"]["id"] for out in await task] == [message.rid for message in sent]
    assert not prefill.samples._announcements and not prefill.samples._told and not prefill.rid_to_state


@looped
async def test_prefill_that_is_told_later_gives_its_warmup_up():
    """It is dropped, and nobody answers it: one that is aborted is logged and counted as failed, with each request."""
    prefill = Manager(DisaggregationMode.PREFILL, False)
    task = asyncio.ensure_future(answers(prefill, body(rid="r")))
    await until(lambda: prefill.send_to_scheduler.requests, task)
    (warmup,) = prefill.send_to_scheduler.got
    assert warmup.bootstrap_room == 11 and warmup.sampling_params.max_new_tokens == 0
    await asyncio.sleep(0.05)
    prefill.samples.announced([11, 12])
    await until(lambda: len(prefill.send_to_scheduler.requests) == 7, task)
    assert [one for one in prefill.send_to_scheduler.got if isinstance(one, ComputedReq)] == [
        ComputedReq(11, warmup.rid)
    ]
    assert not prefill.send_to_scheduler.aborts
    sent = prefill.send_to_scheduler.requests[1:]
    assert [message.bootstrap_room for message in sent] == ROOMS
    assert [message.rid for message in sent] == [f"r_{i}" for i in range(6)]
    for message in sent:
        prefill.answer(message)
    assert len(await task) == 6
    # What a generator leaves that was not read to its end goes with it.
    gc.collect()
    await until(lambda: not prefill.own_states and not prefill.rids_of_samples, asyncio.Future())
    assert not prefill.rid_to_state


@looped
async def test_samples_of_a_request_that_nobody_has_given_types():
    """Of Vertex AI: with its samples it has fields of the engine's own forms, which are no types of a client's."""
    pytest.importorskip("sglang.srt.managers.request_checks")

    def vertex_generate() -> None:
        pass

    async def ask(prefill: Manager, **more):
        request = SimpleNamespace(scope={"endpoint": vertex_generate})
        async for out in prefill.generate_request(body(**more), request):
            return out

    for told in (True, False):
        prefill = Manager(DisaggregationMode.PREFILL, False)
        if told:
            prefill.samples.announced([11, 12])
        with pytest.raises(ValueError, match="stream has a wrong type"):
            await ask(prefill, stream="perhaps")
        # Decode finds it out by itself.
        assert [sent.room for sent in prefill.send_to_scheduler.got] == [11, 12]
        prefill = Manager(DisaggregationMode.PREFILL, False)
        if told:
            prefill.samples.announced([11, 12])
        task = asyncio.ensure_future(ask(prefill))
        await until(lambda prefill=prefill: prefill.send_to_scheduler.requests, task)
        if not told:
            prefill.samples.announced([11, 12])
        await until(lambda prefill=prefill, n=6 + (not told): len(prefill.send_to_scheduler.requests) == n, task)
        for message in prefill.send_to_scheduler.requests[not told :]:
            prefill.answer(message)
        assert len(await task) == 6


@looped
async def test_prefill_that_is_not_told_does_what_the_engine_does():
    """Decode without the flag, or without the package."""

    async def serve(prefill) -> list:
        task = asyncio.ensure_future(answers(prefill, body()))
        for count in range(1, 3):
            await until(lambda count=count: len(prefill.send_to_scheduler.got) == count, task)
            prefill.answer(prefill.send_to_scheduler.got[-1])
        await until(lambda: len(prefill.send_to_scheduler.got) == 8, task)
        got = copy.copy(prefill.send_to_scheduler.got)
        if not isinstance(prefill, Bare):
            with pytest.raises(ValueError, match="decode worker that gives samples no rooms"):
                prefill.samples.announced([11])
        for message in got[2:]:
            prefill.answer(message)
        assert len(await task) == 6
        return [(m.bootstrap_room, vars(m.sampling_params), m.stream) for m in got]

    class Bare(Manager):
        """The engine's way, which asks nobody."""

        generate_request = RefusedRequests.generate_request

    sent = await serve(Manager(DisaggregationMode.PREFILL, False))
    assert sent == await serve(Bare(DisaggregationMode.PREFILL, False))
    assert [room for room, _, _ in sent] == [11, 12, *[11] * 3, *[12] * 3]


@pytest.mark.parametrize("sent", [0, 1, 2])
@looped
async def test_samples_of_the_engine_that_decode_refuses_leave_no_states(sent):
    """While the prompt is tokenized, or when its warm-up and a sample have been sent. The engine has given them names
    of their own."""

    class Refusing(Manager):
        def _send_one_request(self, tokenized_obj):
            if len(self.send_to_scheduler.requests) == sent:
                self._refuse_rooms([11], "max_new_tokens is too large")
            super()._send_one_request(tokenized_obj)

    prefill = Refusing(*MODES[0])
    task = asyncio.ensure_future(answers(prefill, body(prompts=[[1, 2]])))
    if sent:
        await until(lambda: prefill.send_to_scheduler.requests, task)
        prefill.answer(prefill.send_to_scheduler.requests[0])
    with pytest.raises(ValueError, match="too large"):
        await task
    requests = prefill.send_to_scheduler.requests
    assert len(requests) == sent and [*prefill.rid_to_state] == [one.rid for one in requests[1:]]


@looped
async def test_decode_asks_for_nothing_before_prefill_knows(server):
    prefill, decode = (Manager(mode, flag) for mode, flag in MODES)
    listen(SAMPLE_ROUTE, prefill.samples.announced)
    task = asyncio.ensure_future(answers(decode, body(port=server)))
    await until(lambda: len(decode.send_to_scheduler.requests) == 6, task)
    assert [message.bootstrap_room for message in decode.send_to_scheduler.got] == ROOMS
    assert prefill.samples.expect([11]).told and prefill.samples.expect([12]).told
    for message in decode.send_to_scheduler.got:
        decode.answer(message)
    await task


def test_each_prompt_is_announced_to_its_own_prefill(monkeypatch):
    """Also to one that comes twice, and once for both."""
    told = []

    def ask(addr, route, rooms, **said):
        told.append((addr, rooms))
        answer: Future[tuple[int, str]] = Future()
        answer.set_result((200, "OK"))
        return answer

    monkeypatch.setattr(samples, "ask", ask)
    obj = expanded(
        input_ids=[[1], [2], [3]],
        sampling_params={"n": 3},
        bootstrap_host=["a", "b", "a"],
        bootstrap_port=[1, None, 1],
        bootstrap_room=[11, 12, 13],
    )
    run(samples.announce(obj, 7))
    assert told == [("a:1", [11, 13]), ("b:7", [12])]


@pytest.mark.parametrize(
    ("route", "said"),
    [("/no_such_route", "prefill 127.0.0.1.*Install"), (SAMPLE_ROUTE, "rooms of samples in another way")],
)
def test_decode_refuses_where_prefill_cannot(server, monkeypatch, route, said):
    refused = []
    monkeypatch.setattr(refusal, "tell", lambda addr, route, rooms, **said: refused.extend(rooms) or Future())
    monkeypatch.setattr(samples, "SAMPLE_ROUTE", route)
    # Of another version.
    listen(SAMPLE_ROUTE, lambda rooms, derivation: samples.SampleRooms().announced(rooms, derivation + 1))

    async def ask():
        decode = Manager(*MODES[1])
        with pytest.raises(ValueError, match="n must be 1: .*" + said):
            await answers(decode, body(port=server))
        assert not decode.send_to_scheduler.got and not decode.rid_to_state
        # Prefill may know of any of them.
        assert refused == [11, 12, *ROOMS]

    run(ask())


@looped
async def test_a_prefill_that_does_not_answer_is_no_fault_of_the_client():
    decode = Manager(*MODES[1])
    (port,) = free_ports(1)
    with pytest.raises(Exception, match="cannot be notified") as error:
        await answers(decode, body(port=port))
    assert error.value.status_code == 500 and not decode.send_to_scheduler.got


@looped
async def test_what_prefill_has_refused_decode_hears_when_it_announces(server):
    prefill, decode = Manager(*MODES[0], context_len=2), Manager(*MODES[1])
    listen(SAMPLE_ROUTE, prefill.samples.announced)
    with pytest.raises(ValueError, match="longer than"):
        await answers(prefill, body(port=server))
    with pytest.raises(ValueError, match="longer than"):
        await answers(decode, body(port=server))


@looped
async def test_what_prefill_refuses_when_told_it_tells_of_each_sample():
    prefill = Manager(*MODES[0], context_len=2)
    prefill.samples.announced([11, 12])
    with pytest.raises(ValueError, match="longer than"):
        await answers(prefill, body())
    told = prefill.send_to_scheduler.got
    assert [message.room for message in told if isinstance(message, refusal.RefusedReq)] == [11, 12, *ROOMS]
    assert not prefill.rid_to_state


@looped
async def test_the_failure_of_one_sample_ends_the_others():
    prefill = Manager(*MODES[0])
    prefill.samples.announced([11, 12])
    task = asyncio.ensure_future(answers(prefill, body()))
    await until(lambda: len(prefill.send_to_scheduler.requests) == 6, task)
    first, *others = prefill.send_to_scheduler.requests
    prefill.answer(first, finish_reason={"type": "abort", "status_code": 500, "message": "lost"})
    with pytest.raises(Exception, match="lost"):
        await task
    assert prefill.send_to_scheduler.aborts == [message.rid for message in others]


@looped
async def test_aborts():
    prefill = Manager(*MODES[0])
    prefill.samples.announced([11])
    task = asyncio.ensure_future(answers(prefill, body(prompts=[[1, 2]], rid="r")))
    await until(lambda: len(prefill.send_to_scheduler.requests) == 3, task)
    prefill.abort_request("r_1")
    assert prefill.send_to_scheduler.aborts == ["r_1"]
    prefill.abort_request("r")
    assert prefill.send_to_scheduler.aborts == ["r_1", "r_0", "r_1", "r_2"]
    prefill.abort_request("other")
    assert len(prefill.send_to_scheduler.aborts) == 4
    for message in prefill.send_to_scheduler.requests:
        prefill.answer(message)
    await task


@looped
async def test_a_rid_in_use_costs_its_request_nothing():
    prefill = Manager(*MODES[0])
    prefill.samples.announced([11])
    task = asyncio.ensure_future(answers(prefill, body(prompts=[[1, 2]], rid="r")))
    await until(lambda: len(prefill.send_to_scheduler.requests) == 3, task)
    prefill.samples.announced([12])
    with pytest.raises(ValueError, match="Duplicate"):
        await answers(prefill, body(prompts=[[1, 2]], rid="r", bootstrap_room=[12]))
    assert prefill.send_to_scheduler.aborts == [] and list(prefill.rids_of_samples) == ["r"]
    for message in prefill.send_to_scheduler.requests:
        prefill.answer(message)
    assert len(await task) == 3


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(room_notes, "MOST", 10)
    book = samples.SampleRooms()
    for room in range(1, 30):
        book.announced([room])

    async def told() -> list[int]:
        return [room for room in range(1, 30) if book.expect([room]).told]

    assert asyncio.run(told()) == list(range(20, 30))


@looped
async def test_a_prompt_is_tokenized_once_for_all_of_its_samples():
    """On both workers, by the loop that serves all requests."""
    made, read = Manager(*MODES[0]), []
    made.last_text, made.async_dynamic_batch_tokenizer = ("", []), None
    made.tokenizer = lambda texts: {"input_ids": [read.append(text) or [len(text)] for text in texts]}
    obj = GenerateReqInput(text=["one prompt", "another"], sampling_params={"n": 3}, bootstrap_room=[11, 12])
    obj.normalize_batch_and_arguments()
    samples.give_rooms(obj, None)
    tokens = [(await made._tokenize_texts(obj[i].text))[0] for i in range(obj.batch_size)]
    assert tokens == [[10]] * 3 + [[7]] * 3 and read == ["one prompt", "another"]
    # Where a prompt is cut, it is its own.
    assert len(set(map(id, tokens))) == 6
    with pytest.raises(ValueError, match="cannot be empty"):
        await made._tokenize_texts("")
    assert await made._tokenize_texts(["a", "bc"]) == ([[1], [2]], None)


# ---- adapters, which are held for each sample ----


@looped
async def test_an_adapter_is_held_by_what_was_sent_only():
    prefill = with_adapters(Manager(*MODES[0]))
    task = asyncio.ensure_future(answers(prefill, body(lora_path=["a", None])))
    await until(lambda: prefill.send_to_scheduler.requests, task)
    prefill.samples.announced([11, 12])
    await until(lambda: len(prefill.send_to_scheduler.requests) == 7, task)
    assert prefill.lora_registry.held == ["id of a"] * 3
    warmup, *others = prefill.send_to_scheduler.requests
    # Its end releases nothing.
    assert warmup.rid not in prefill.rid_to_state
    for message in others:
        prefill.answer(message)
    await task


@looped
async def test_an_adapter_of_samples_that_were_not_sent_is_released():
    prefill = with_adapters(Manager(*MODES[0], context_len=2))
    prefill.samples.announced([11, 12])
    with pytest.raises(ValueError, match="longer than"):
        await answers(prefill, body(3, lora_path="a"))
    assert prefill.lora_registry.held == []
