"""Each worker makes the tokens of a prompt itself: prefill sends no KV of a prompt of another length than decode's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wire_ends
from engine_classes import engine_class
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks, capabilities
from sglang.srt.disaggregation.common.prefill_peers import parse_capabilities
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = [7] * 5 + [*range(100, 121)]
IMAGE = range(2, 8)


def req_of(token_ids: list[int], image: int | None = None) -> Req:
    """A request as the scheduler of either worker has it. image: hash of the picture in it, if there is one."""
    req = Req("r", "", token_ids, SamplingParams())
    if image is not None:
        req.origin_input_ids = [image if i in IMAGE else token for i, token in enumerate(token_ids)]
    req.time_stats, req.transfer_prefix_len = SimpleNamespace(set_decode_transfer_queue_entry_time=lambda: None), 8
    return req


class Pair:
    """A prefill and a decode worker, which says its prompts. compares: what prefill has said that it compares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.compares(2)

    def compares(self, said: int) -> None:
        for rank in self.world.decode:
            known = rank.manager.prefills.capabilities
            known |= {addr: dataclasses.replace(can, prompts=said) for addr, can in known.items()}

    def arrive(self, of_prefill: Req, of_decode: Req, room: int = 1, longest: int = 1000) -> Any:
        """A request of both, of which decode holds its ``transfer_prefix_len``, up to where decode has asked.

        longest: tokens of a prompt from which on prefill cuts it.
        """
        request = self.world.request(room, len(of_prefill.origin_input_ids), 8).start_prefill()
        queue = object.__new__(PrefillBootstrapQueue)
        queue.scheduler = SimpleNamespace(max_req_input_len=longest)
        self.monkeypatch.setattr(engine_class(PrefillBootstrapQueue), "add", lambda *args: None)
        for sender in request.senders:
            of_prefill.disagg_kv_sender = sender
            queue.add(of_prefill, 1)
        request.start_decode()
        delta = len(of_decode.origin_input_ids) - of_decode.transfer_prefix_len
        for receiver in request.receivers:
            num_pages = pages(delta, receiver.kv_mgr.kv_args.page_size)
            asked = DecodeRequest(of_decode, receiver, metadata_buffer_index=1)
            asked.page_indices = np.arange(34, 34 + num_pages, dtype=np.int32)
            PrefillDeltas._ask(object.__new__(PrefillDeltas), asked)
        return request

    def serve(self, request: Any) -> None:
        request.wait_senders(KVPoll.WaitingForInput)
        for sender in request.senders:
            sender.init(request.num_pages, 1)
        request.send()
        request.wait_senders(KVPoll.Success)
        request.wait_receivers(KVPoll.Success)


@pytest.fixture
def make(make_wire: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    return lambda page_size=4, **sizes: Pair(monkeypatch, make_wire(page_size=page_size, **sizes))


def reasons(request: Any) -> list[str]:
    """Why ``request`` has failed, of each rank of both workers."""
    request.wait_senders(KVPoll.Failed)
    request.wait_receivers(KVPoll.Failed)
    return wire_ends.reasons([*request.senders, *request.receivers])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("of_decode", [[*PROMPT, 121], PROMPT[:-1]], ids=["a token more", "one less"])
def test_lengths_are_compared(make, of_decode, page_size):
    pair = make(page_size)
    for reason in reasons(pair.arrive(req_of(PROMPT), req_of(of_decode))):
        assert "the prompts of prefill and decode differ" in reason
    request = pair.arrive(req_of(PROMPT, image=5), req_of([*PROMPT[:-1], 1], image=6), room=2)
    assert all(len(receiver.prompt[1]) == 8 for receiver in request.receivers)
    pair.serve(request)


def test_a_prompt_that_prefill_has_cut_is_told_as_that(make):
    """The same tokens but for those that were cut: another length."""
    request = make().arrive(req_of(PROMPT), req_of([*PROMPT, *range(121, 135)]), longest=len(PROMPT))
    for reason in reasons(request):
        assert "prefill has cut the prompt to the longest that it takes (--allow-auto-truncate)" in reason


def test_a_decode_worker_that_does_not_say_its_prompt_is_served(make):
    """One of an earlier release, whose prompt is not known."""
    pair = make()
    pair.compares(0)
    request = pair.arrive(req_of(PROMPT), req_of([*PROMPT[:-1], 1]))
    assert all(not receiver.prompt for receiver in request.receivers)
    pair.serve(request)


def test_it_is_said_only_where_prefill_has_said_that_it_compares():
    answer = capabilities(1, 1, RegisteredRanks().timeouts())
    assert parse_capabilities(answer).prompts
    assert not parse_capabilities(answer | {"prompts": 1}).prompts
    assert not parse_capabilities(answer | {"version": 0}).prompts
    del answer["prompts"]
    assert not parse_capabilities(answer).prompts
