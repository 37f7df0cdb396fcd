"""Each worker makes the tokens of a prompt itself: prefill sends no KV of another prompt than decode's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_mooncake_wire as mooncake_wire
import test_nixl_wire as nixl_wire
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.bootstrap_routes import capabilities
from sglang.srt.disaggregation.common.prefill_peers import parse_capabilities
from sglang.srt.disaggregation.decode_prefix import prompt_digest
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.prefill_delta import PrefillDeltas
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
    """A prefill and a decode worker. compares: whether prefill has said that it compares prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.compares(True)

    def compares(self, said: bool) -> None:
        for rank in self.world.decode:
            known = rank.manager.prefills.capabilities
            known |= {addr: dataclasses.replace(can, prompts=said) for addr, can in known.items()}

    def arrive(self, of_prefill: Req, of_decode: Req, room: int = 1) -> Any:
        """A request of both, of which decode holds two pages, up to where decode has asked."""
        request = self.world.request(room, len(of_prefill.origin_input_ids), 8).start_prefill()
        queue = object.__new__(PrefillBootstrapQueue)
        queue.scheduler = SimpleNamespace(max_req_input_len=1000)
        self.monkeypatch.setattr(PrefillBootstrapQueue.__mro__[1], "add", lambda *args: None)
        for sender in request.senders:
            of_prefill.disagg_kv_sender = sender
            queue.add(of_prefill, 1)
        request.start_decode()
        for receiver in request.receivers:
            PrefillDeltas._ask(
                SimpleNamespace(
                    req=of_decode,
                    kv_receiver=receiver,
                    metadata_buffer_index=1,
                    page_indices=np.arange(34, 34 + request.num_pages - 2, dtype=np.int32),
                    state_indices=None,
                    advance=lambda phase: None,
                )
            )
        return request

    def serve(self, request: Any) -> None:
        request.wait_senders(KVPoll.WaitingForInput)
        for sender in request.senders:
            sender.init(request.num_pages, 1)
        request.send()
        request.wait_senders(KVPoll.Success)
        request.wait_receivers(KVPoll.Success)


@pytest.fixture(params=[nixl_wire, mooncake_wire], ids=["nixl", "mooncake"])
def make(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def build(**sizes: int) -> Pair:
        made.append(Pair(monkeypatch, request.param.World(monkeypatch, **sizes)))
        return made[0]

    yield build
    for pair in made:
        if hasattr(pair.world, "close"):
            pair.world.close()


@pytest.mark.parametrize(
    "of_decode",
    [[*PROMPT[:3], 8, *PROMPT[4:]], [*PROMPT[:-1], 1], [*PROMPT, 121], PROMPT[:-1]],
    ids=["in the prefix", "in the last page", "a token more in the last page", "one less"],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_another_prompt_fails_its_request_on_both_sides(make, prefill_tp, decode_tp, of_decode):
    pair = make(prefill_tp=prefill_tp, decode_tp=decode_tp)
    request = pair.arrive(req_of(PROMPT), req_of(of_decode))
    request.wait_senders(KVPoll.Failed)
    request.wait_receivers(KVPoll.Failed)
    for reason in mooncake_wire.reasons([*request.senders, *request.receivers]):
        assert "refused decode's request for KV: the prompts of prefill and decode differ" in reason
        assert "chat template" in reason
    pair.serve(pair.arrive(req_of(PROMPT), req_of(PROMPT), room=2))


def test_an_image_whose_features_differ_in_the_last_bit_is_sent(make):
    pair = make()
    pair.serve(pair.arrive(req_of(PROMPT, image=2**40), req_of(PROMPT, image=2**40 + 1)))


def test_a_decode_worker_that_does_not_say_its_prompt_is_served(make):
    """One of an earlier release, whose prompt is not known."""
    pair = make()
    pair.compares(False)
    request = pair.arrive(req_of(PROMPT), req_of([*PROMPT[:-1], 1]))
    assert all(not receiver.prompt for receiver in request.receivers)
    pair.serve(request)


@pytest.mark.parametrize("offered", [False, True])
def test_the_message_has_two_frames_more_at_its_end(offered):
    receiver, asked = nixl_wire.bare(), np.array([7], np.int32)
    receiver.offered = np.array([3, 4], np.int32) if offered else None
    receiver.kv_mgr.weights = None

    def frames() -> list[bytes]:
        return nixl_wire.sent_frames(receiver, lambda: receiver.send_metadata(asked, 3, None, decode_prefix_len=8))[0]

    plain = frames()
    receiver.prompt = b"prompt", prompt_digest(PROMPT, len(PROMPT))
    assert frames() == [*plain, *receiver.prompt] and len(receiver.prompt[1]) == 16
    without = nixl_wire.sent_frames(receiver, lambda: receiver.send_metadata(asked, 3, None))[0]
    assert len(without) == 9, "the engine's message has none"


def test_any_token_and_the_length_count():
    digest = prompt_digest([1, 2, 3], 3)
    assert digest == prompt_digest((1, 2, 3), 3) != prompt_digest([1, 2, 4], 3)
    assert prompt_digest([1, 2, 3], 4) != digest, "an image that is padded to more tokens"
    # Some models mark images by numbers that are no tokens.
    assert prompt_digest([1, -200], 2) != prompt_digest([1, -201], 2)
    assert prompt_digest([1, 2**40], 2) != prompt_digest([1, 2**41], 2)


def test_it_is_said_only_where_prefill_has_said_that_it_compares():
    answer = asyncio.run(capabilities(1, 1, 1, True, True, True))
    assert answer["prompts"] == 1 and parse_capabilities(answer, False).prompts
    assert not parse_capabilities(answer | {"version": 0}, False).prompts
    del answer["prompts"]
    assert not parse_capabilities(answer, False).prompts
