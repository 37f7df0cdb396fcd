"""What decode answers its client, of a request that prefill alone refuses."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import nixl_world
import pytest
import requests
from engine_classes import engine_class
from prefill_front import bootstrap_server
from sglang.srt import server_args
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
from sglang.srt.disaggregation.refusal import REFUSED_RANK_ROUTE, RefusedReq, blames_request
from sglang.srt.lora.lora_registry import LoRARegistry
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from test_refusals import ROOM, RefusingPrefill
from tokenizer_front import MODES, Manager, answers, body
from waiting import until


class Pair:
    """A decode worker with the flag asks a prefill for a room, and is answered that it is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
        self.world = world
        self.prefill = RefusingPrefill(monkeypatch, self.world.prefill)
        self.request = self.world.request(ROOM, 26, 8).start_decode()

    def ask(self) -> None:
        self.request.ask()
        until(lambda: ROOM in self.world.prefill[0].manager.transfer_infos, "asked")

    def refuse(self, told: RefusedReq) -> None:
        """The scheduler of prefill hears it from its tokenizer manager."""
        for scheduler in self.prefill.schedulers:
            scheduler.handle_refused_request(told)

    def answer(self) -> Any:
        """How decode ends the request."""
        self.request.wait_receivers(KVPoll.Failed)
        req = Req("r", "", [1] * 26, SamplingParams(), bootstrap_room=ROOM, bootstrap_host="10.0.0.9")
        queue: Any = object.__new__(DecodeTransferQueue)
        queue.policy = SimpleNamespace(leave=lambda entry: None)
        queue._fail(DecodeRequest(req, self.request.receivers[0], entry=QueueEntry(0, 0, None)))
        return req.finished_reason


@pytest.mark.parametrize("asked_before", [True, False])
def test_decode_answers_as_prefill_does(monkeypatch, wire, asked_before):
    """It answered 500, counted that as a failure of its own, and a router sent the request to other workers."""
    pair = Pair(monkeypatch, wire)
    if asked_before:
        pair.ask()
        pair.prefill.refuse()
    else:
        pair.prefill.refuse()
        pair.request.ask()
    reason = pair.answer()
    assert reason.status_code == HTTPStatus.BAD_REQUEST
    assert reason.message.endswith(": prefill reported: the request is refused: its grammar is none")


@pytest.mark.parametrize(
    "why, at_fault",
    [
        ("Failed to compile regex grammar: Unbalanced parenthesis", True),
        # As in a drain whose time is up.
        ("Aborted by AbortReq.", False),
        ("Grammar preprocessing timed out: req.grammar_key=('regex', 'a+')", False),
        ("Failed to compile regex grammar: Grammar preprocessing timed out", False),
        (ValueError("The input is longer than the model's context length"), True),
        (ValueError("Duplicate request IDs detected: ['r']"), False),
        (ValueError("Failed to implicitly load LoRA adapter a: out of memory"), False),
        (ValueError("LoRA adapter 'a' was requested, but LoRA is not enabled"), True),
        (RuntimeError("While loading an image"), False),
    ],
)
def test_what_cannot_be_served_now_is_no_fault_of_the_request(why, at_fault):
    """A router tries another prefill after a 500, and none after a 400."""
    assert blames_request(why) == at_fault


def test_what_passes_is_no_fault_of_the_request(monkeypatch):
    pair = Pair(monkeypatch, nixl_world.World(monkeypatch))
    pair.ask()
    refuse(pair.prefill, ended=FINISH_ABORT("Aborted by AbortReq."))
    answer = pair.answer()
    assert answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR and "Aborted by AbortReq." in answer.message


@pytest.mark.parametrize("at_fault", [True, False])
def test_what_is_prefills_own_fault_is_no_fault_of_the_request(monkeypatch, wire, at_fault):
    """It shuts down, or cannot fetch an image: with another prefill it may go well."""
    pair = Pair(monkeypatch, wire)
    pair.ask()
    pair.refuse(RefusedReq(ROOM, "its prompt is too long", by_decode=False, at_fault=at_fault))
    reason = pair.answer()
    assert reason.status_code == (HTTPStatus.BAD_REQUEST if at_fault else HTTPStatus.INTERNAL_SERVER_ERROR)
    assert "prompt is too long" in reason.message and ("the request is refused" in reason.message) == at_fault


@pytest.mark.parametrize("unloading", [False, True])
def test_an_adapter_that_only_this_prefill_lacks_is_no_fault_of_the_request(unloading):
    """It was restarted since, or unloads it. Decode, which has it, answered 400, and no router asked another prefill.

    Where decode lacks it too, that refuses the request itself.
    """

    class Unloading(LoRARegistry):
        async def get_unregistered_loras(self, names):
            """It is gone when it is taken."""
            return set() if unloading else await super().get_unregistered_loras(names)

    prefill = Manager(*MODES[0])
    prefill.server_args.enable_lora, prefill.server_args.max_loaded_loras = True, None
    prefill.lora_registry, prefill.lora_ref_cache = Unloading(), {}
    with pytest.raises(ValueError, match="adapter"):
        asyncio.run(answers(prefill, body(1, prompts=[[1, 2]], rid=["r"], lora_path="sql")))
    (told,) = prefill.send_to_scheduler.got
    assert told.room == 11 and not told.at_fault


# ---- a prefill of whose DP ranks decode has to ask for the one that has a room ----


class AskedForRanks:
    """The bootstrap server of a prefill whose DP ranks are chosen by load, and decode workers that ask it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        self.monkeypatch, self.port = monkeypatch, port
        self.options = {"dp_size": 3, "load_balance_method": "total_tokens", "disaggregation_bootstrap_port": port}

    def ask(self, *rooms: int, flag: bool = True) -> dict[str, int]:
        """The engine's question, as a decode worker with or without the flag asks it."""
        args = SimpleNamespace(disaggregation_decode_enable_radix_cache=flag)
        self.monkeypatch.setattr(server_args, "_global_server_args", args)
        engine: Any = engine_class(CommonKVReceiver)
        return engine.query_prefill_dp_ranks(f"127.0.0.1:{self.port}", list(rooms))

    def wait_for(self, *rooms: int) -> dict[str, int]:
        until(lambda: len(self.ask(*rooms)) == len(rooms), "their ranks", timeout=20)
        return self.ask(*rooms)

    def schedulers(self, rank: int, **shape: int) -> RefusingPrefill:
        """Of one DP rank."""
        ranks = nixl_world.World(self.monkeypatch, **shape).prefill
        for one in ranks:
            vars(one.manager.server_args).update(self.options)
            one.manager.attn_dp_rank = rank
        return RefusingPrefill(self.monkeypatch, ranks)

    def front(self, **more: Any) -> Manager:
        made = Manager(*MODES[0], **more)
        vars(made.server_args).update(self.options, host="127.0.0.1")
        return made


@pytest.fixture
def asked(monkeypatch, named):
    with bootstrap_server() as port:
        yield AskedForRanks(monkeypatch, port)


@pytest.fixture
def named(monkeypatch):
    """All that prefill's processes tell its bootstrap server of ranks."""
    told: list[list[int]] = []
    note = refusal.RefusedRanks.note
    monkeypatch.setattr(
        refusal.RefusedRanks,
        "note",
        lambda ranks, rooms, dp_rank: (told.append(rooms), note(ranks, rooms, dp_rank)),
    )
    return told


def refuse(prefill: RefusingPrefill, ended: FINISH_ABORT | None = None) -> None:
    for scheduler in prefill.schedulers:
        req = Req("r", "", [0], SamplingParams(), bootstrap_room=ROOM, bootstrap_host="127.0.0.1")
        req.to_finish = ended or FINISH_ABORT("its grammar is none", HTTPStatus.BAD_REQUEST)
        scheduler._add_request_to_queue(req)


@pytest.mark.parametrize("shape", [{}, {"prefill_tp": 2}, {"prefill_cp": 2}, {"stages": (1, 1)}], ids=str)
def test_decode_is_told_which_dp_rank_has_refused(asked, named, shape):
    """Only a sender says which rank has a room: decode could not ask it, and answered 500 after 300 s."""
    refuse(asked.schedulers(2, **shape))
    assert asked.wait_for(ROOM) == {str(ROOM): 2}
    # One without the flag is given its one token, as by the engine.
    assert asked.ask(ROOM, flag=False) == {str(ROOM): 2}
    assert named == [[ROOM]]


def test_what_decode_has_refused_has_no_rank(asked, named):
    prefill, front = asked.schedulers(2), asked.front()
    prefill.schedulers[0].handle_refused_request(RefusedReq(ROOM, "too long", by_decode=True))
    refuse(prefill)
    front.refused_rooms.note(11, "too long")
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(answers(front, body(1, prompts=[[1, 2]], rid=["r"])))
    # What is told later has come.
    front._tell_peer(SimpleNamespace(bootstrap_room=5, bootstrap_host="h", bootstrap_port=1), "why")
    assert asked.wait_for(5) == {"5": 0} and named == [[5]]


def test_what_a_front_refuses_any_dp_rank_knows(asked, named):
    """All are told of it."""
    with pytest.raises(ValueError, match="longer than"):
        asyncio.run(answers(asked.front(context_len=2), body(1)))
    assert asked.wait_for(11, 12) == {"11": 0, "12": 0}
    rooms = [13, 14, 15]
    asked.front()._tell_peer(SimpleNamespace(bootstrap_room=rooms, bootstrap_host="h", bootstrap_port=1), "why")
    assert asked.wait_for(*rooms) == dict.fromkeys(map(str, rooms), 0)
    assert named == [[11, 12], rooms]


def test_the_rank_of_a_request_goes_before_that_of_a_refused_copy(asked):
    refuse(asked.schedulers(2))
    asked.wait_for(ROOM)
    url = f"http://127.0.0.1:{asked.port}"
    said = {"bootstrap_room": ROOM, "dp_rank": 1}
    assert requests.post(f"{url}/register_dp_rank", json=said, timeout=20).status_code == 200
    assert asked.ask(ROOM) == asked.ask(ROOM, flag=False) == {str(ROOM): 1}


def test_where_decode_knows_the_rank_nobody_names_it(asked, named):
    for options in ({"dp_size": 1}, {"load_balance_method": "follow_bootstrap_room"}):
        with pytest.MonkeyPatch.context() as other:
            other.setattr(asked, "options", asked.options | options)
            refuse(asked.schedulers(0))
            asked.front()._tell_peer(SimpleNamespace(bootstrap_room=5, bootstrap_host="h", bootstrap_port=1), "why")
    asked.front()._tell_peer(SimpleNamespace(bootstrap_room=6, bootstrap_host="h", bootstrap_port=1), "why")
    assert asked.wait_for(6) == {"6": 0} and named == [[6]]


def test_what_cannot_be_meant_as_a_rank(asked):
    url = f"http://127.0.0.1:{asked.port}{REFUSED_RANK_ROUTE}"
    good = {"rooms": [5], "dp_rank": 1, "to_all": True}
    assert requests.post(url, json={**good, "dp_rank": -1}, timeout=20).status_code == 400
    assert asked.ask(5) == {}
    assert requests.post(url, json=good, timeout=20).status_code == 200
    assert asked.ask(5) == {"5": 1}
    # As the engine answers it.
    wrong = requests.post(f"http://127.0.0.1:{asked.port}/query_dp_ranks", data=b"{", timeout=20)
    assert wrong.status_code == 500
