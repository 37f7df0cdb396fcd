"""What decode answers its client, of a request that prefill alone refuses."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest
import test_mooncake_wire
import test_nixl_wire
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.deferred_release import abort_transfer
from sglang.srt.disaggregation.refusal import RefusedReq, blames_request
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from test_refusals import ROOM, RefusingPrefill
from waiting import until

WORLDS = {"nixl": test_nixl_wire.World, "mooncake": test_mooncake_wire.World}


class Pair:
    """A decode worker with the flag asks a prefill for a room, and is answered that it is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.world: Any = WORLDS[backend](monkeypatch)
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
        abort_transfer(DecodeRequest(req, self.request.receivers[0]))
        getattr(self.world, "close", lambda: None)()
        return req.finished_reason


@pytest.mark.parametrize("backend", WORLDS)
@pytest.mark.parametrize("asked_before", [True, False])
def test_decode_answers_as_prefill_does(monkeypatch, backend, asked_before):
    """It answered 500, counted that as a failure of its own, and a router sent the request to other workers."""
    pair = Pair(monkeypatch, backend)
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
    "reason, at_fault",
    [
        ("its grammar is none", True),
        ("Failed to compile regex grammar: Unbalanced parenthesis", True),
        # As in a drain whose time is up.
        ("Aborted by AbortReq.", False),
        ("Grammar preprocessing timed out: req.grammar_key=('regex', 'a+')", False),
        ("Failed to compile regex grammar: Grammar preprocessing timed out", False),
    ],
)
def test_what_passes_is_no_fault_of_the_request(monkeypatch, reason, at_fault):
    """A router tries another prefill after a 500, and none after a 400."""
    pair = Pair(monkeypatch, "nixl")
    pair.ask()
    for scheduler in pair.prefill.schedulers:
        req = Req("r", "", [1] * 26, SamplingParams(), bootstrap_room=ROOM, bootstrap_host="10.0.0.9")
        req.to_finish = FINISH_ABORT(reason)
        scheduler._add_request_to_queue(req)
    answer = pair.answer()
    assert (answer.status_code == HTTPStatus.BAD_REQUEST) == at_fault and reason in answer.message


@pytest.mark.parametrize(
    "error, at_fault",
    [
        (ValueError("The input is longer than the model's context length"), True),
        (ValueError("Duplicate request IDs detected: ['r']"), False),
        (ValueError("Failed to implicitly load LoRA adapter a: out of memory"), False),
        (RuntimeError("While loading an image"), False),
    ],
)
def test_what_a_front_cannot_serve_now_is_no_fault_of_the_request(error, at_fault):
    assert blames_request(error) == at_fault


@pytest.mark.parametrize("backend", WORLDS)
@pytest.mark.parametrize("at_fault", [True, False])
def test_what_is_prefills_own_fault_is_no_fault_of_the_request(monkeypatch, backend, at_fault):
    """It shuts down, or cannot fetch an image: with another prefill it may go well."""
    pair = Pair(monkeypatch, backend)
    pair.ask()
    pair.refuse(RefusedReq(ROOM, "its prompt is too long", by_decode=False, at_fault=at_fault))
    reason = pair.answer()
    assert reason.status_code == (HTTPStatus.BAD_REQUEST if at_fault else HTTPStatus.INTERNAL_SERVER_ERROR)
    assert "prompt is too long" in reason.message and ("the request is refused" in reason.message) == at_fault
