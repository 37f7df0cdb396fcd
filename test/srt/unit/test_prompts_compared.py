"""Each worker makes the tokens of a prompt itself: prefill sends no KV of another prompt than decode's.

Images it may have fetched another time: what it computes with others it sends, and decode keeps nothing of it.
"""

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
import torch
from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation import decode_prefix
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks, capabilities
from sglang.srt.disaggregation.common.prefill_peers import parse_capabilities
from sglang.srt.disaggregation.decode_prefix import OTHER_IMAGES, pages, prompt_digest, prompt_digests, say_images
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.prefill_delta import PrefillDeltas
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import TokenizerManager
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

    says_prompts = True

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
            PrefillDeltas._ask(
                SimpleNamespace(_compares=self.says_prompts),  # type: ignore[arg-type]
                SimpleNamespace(
                    req=of_decode,
                    kv_receiver=receiver,
                    metadata_buffer_index=1,
                    page_indices=np.arange(34, 34 + num_pages, dtype=np.int32),
                    state_indices=None,
                    advance=lambda phase: None,
                ),
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

    def build(page_size: int = 4, **sizes: int) -> Pair:
        if request.param is mooncake_wire:
            sizes["page_size"] = page_size
        monkeypatch.setattr(nixl_wire, "PAGE", page_size)
        made.append(Pair(monkeypatch, request.param.World(monkeypatch, **sizes)))
        return made[0]

    yield build
    for pair in made:
        if hasattr(pair.world, "close"):
            pair.world.close()


def reasons(request: Any) -> list[str]:
    """Why ``request`` has failed, of each rank of both workers."""
    request.wait_senders(KVPoll.Failed)
    request.wait_receivers(KVPoll.Failed)
    return mooncake_wire.reasons([*request.senders, *request.receivers])


@pytest.mark.parametrize(
    ("of_decode", "page_size", "prefix_len"),
    [
        ([*PROMPT[:3], 8, *PROMPT[4:]], 4, 8),
        ([*PROMPT[:-1], 1], 4, 8),
        ([*PROMPT, 121], 4, 8),
        (PROMPT[:-1], 4, 8),
        ([*PROMPT, *range(121, 125)], 4, 8),
        ([*PROMPT, 121], 1, 8),
        (PROMPT[:-1], 1, 8),
        ([*PROMPT, *range(121, 131)], 4, 32),
    ],
    ids=[
        "in the prefix",
        "in the last page",
        "a token more in the last page",
        "one less",
        "a page more",
        "page size 1",
        "page size 1, one less",
        "prefix beyond the prompt",
    ],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_another_prompt_fails_its_request_on_both_sides(make, prefill_tp, decode_tp, of_decode, page_size, prefix_len):
    pair, req = make(page_size, prefill_tp=prefill_tp, decode_tp=decode_tp), req_of(of_decode)
    req.transfer_prefix_len = prefix_len
    for reason in reasons(pair.arrive(req_of(PROMPT), req)):
        assert "refused decode's request for KV: the prompts of prefill and decode differ" in reason
        assert "chat template" in reason and "--reasoning-parser" in reason
    pair.serve(pair.arrive(req_of(PROMPT), req_of(PROMPT), room=2))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("of_decode", [[*PROMPT, 121], PROMPT[:-1]], ids=["a token more", "one less"])
def test_without_the_variable_lengths_are_compared(make, of_decode, page_size):
    pair = make(page_size)
    pair.says_prompts = False
    for reason in reasons(pair.arrive(req_of(PROMPT), req_of(of_decode))):
        assert "the prompts of prefill and decode differ" in reason
    request = pair.arrive(req_of(PROMPT, image=5), req_of([*PROMPT[:-1], 1], image=6), room=2)
    assert all(len(receiver.prompt[1]) == 8 for receiver in request.receivers)
    pair.serve(request)


def test_a_prompt_that_prefill_has_cut_is_told_as_that(make):
    """The same tokens but for those that were cut: another length, and another digest."""
    request = make().arrive(req_of(PROMPT), req_of([*PROMPT, *range(121, 135)]), longest=len(PROMPT))
    for reason in reasons(request):
        assert "prefill has cut the prompt to the longest that it takes (--allow-auto-truncate)" in reason


def test_an_image_whose_features_differ_in_the_last_bit_is_sent(make):
    pair = make()
    pair.serve(pair.arrive(req_of(PROMPT, image=2**40), req_of(PROMPT, image=2**40 + 1)))


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "said"), [(None, None, 0), (5, 5, 0), (5, 6, 1), (None, 6, 1), (5, None, 1)]
)
def test_prefill_says_in_the_metadata_whether_it_has_other_images(make, of_prefill, of_decode, said):
    pair, req = make(), req_of(PROMPT, of_prefill)
    request = pair.arrive(req, req_of(PROMPT, of_decode))
    request.wait_senders(KVPoll.WaitingForInput)
    # An earlier request of this row had.
    buffers = SimpleNamespace(output_ids=torch.zeros((3, 16), dtype=torch.int32))
    buffers.output_ids[2, OTHER_IMAGES] = 1
    req.metadata_buffer_index = 2
    for req.disagg_kv_sender in request.senders:
        say_images(req, buffers)
        assert buffers.output_ids[2].tolist() == [said if i == OTHER_IMAGES else 0 for i in range(16)]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("retracted", [False, True])
@pytest.mark.parametrize("states", [None, 6])
def test_what_prefill_computed_with_other_images_is_served_and_not_kept(caplog, held, retracted, states):
    world = World(size=192, page_size=4, states=states)
    prompt = [7] * 22

    def serve(tokens: list[int], other: int) -> int:
        """Tokens of the prompt that decode held."""
        decode_req = world.arrive(tokens)
        req, receiver = decode_req.req, decode_req.kv_receiver
        world.handshake(decode_req)
        world.step()
        world.complete(decode_req)
        world.meta.output_ids[receiver.aux_index, OTHER_IMAGES] = other
        world.check()
        assert world.step() == [req]
        world.decode()
        if retracted:
            world.retract(req)
            assert world.step() == [req]
        while world.running:
            world.check()
            world.decode()
        assert len(req.output_ids) == 4
        world.check()
        return receiver.prefix_len

    if held:
        assert serve(prompt[:8], 0) == 0
    assert serve(prompt, 1) == serve(prompt, 0) == (8 if held else 0)
    assert serve(prompt, 0) == 20
    assert caplog.text.count("the images of prefill and decode differ, so none of its KV is kept on decode") == 1
    assert world.tree.locks_taken == world.tree.locks_released


@pytest.mark.parametrize("images", [True, False])
def test_nobody_waits_for_a_transfer_of_which_nothing_would_be_kept(images):
    """A herd with one image was served one by one."""
    world = World(size=1024, page_size=4, max_reqs=8)

    def arrive(number: int) -> Any:
        decode_req = world.arrive([9] * 60 + [number] * 4)
        if images:
            decode_req.req.origin_input_ids_unpadded = [*decode_req.req.origin_input_ids]
        world.handshake(decode_req)
        return decode_req

    # The first herd is the one that finds out, and who is kept says that it is over.
    for other, at_once in ((1, 1), (0, 3 if images else 1), (0, 1)):
        left = [(decode_req, decode_req.kv_receiver) for decode_req in map(arrive, range(3))]
        world.step()
        assert sum(bool(receiver.asked) for _, receiver in left) == at_once
        while left:
            for decode_req, receiver in [one for one in left if one[1].asked]:
                left.remove((decode_req, receiver))
                world.complete(decode_req)
                world.meta.output_ids[receiver.aux_index, OTHER_IMAGES] = other and images
            world.step()
            while world.running:
                world.decode()
        world.tree.reset()


def test_the_tokenizer_process_makes_the_digest(monkeypatch):
    """On the scheduler it would be part of a step, which makes it of images only, and of what was cut."""
    made = []
    monkeypatch.setenv(decode_prefix.COMPARE_PROMPTS, "1")
    monkeypatch.setattr(decode_prefix, "prompt_digest", lambda *args: made.append(args) or prompt_digest(*args))
    message = SimpleNamespace(sampling_params=SimpleNamespace(stop_token_ids=None))
    monkeypatch.setattr(engine_class(TokenizerManager), "_create_tokenized_object", lambda *args: message)
    manager = object.__new__(TokenizerManager)
    manager.model_config = SimpleNamespace(vocab_size=1000)
    manager.disaggregation_mode = DisaggregationMode.DECODE
    assert manager._create_tokenized_object(None, "", PROMPT, None, None) is message
    req = req_of(PROMPT)
    req.sampling_params = message.sampling_params
    assert prompt_digests(req) == prompt_digest(PROMPT, len(PROMPT)) and not made
    req.origin_input_ids_unpadded = [*PROMPT]
    assert len(prompt_digests(req)) == 32 and len(made) == 2
    req.origin_input_ids = req.origin_input_ids_unpadded = PROMPT[:-1]
    assert prompt_digests(req) == prompt_digest(PROMPT[:-1], len(PROMPT) - 1) and len(made) == 3
    message.sampling_params = SimpleNamespace(stop_token_ids=None)
    prefill = DisaggregationMode.PREFILL
    for mode, images, compares in (DisaggregationMode.NULL, None, "1"), (prefill, [1], "1"), (prefill, None, "0"):
        manager.disaggregation_mode = mode
        monkeypatch.setenv(decode_prefix.COMPARE_PROMPTS, compares)
        manager._create_tokenized_object(None, "", PROMPT, None, images)
    assert vars(message.sampling_params) == {"stop_token_ids": None}


def test_a_decode_worker_that_does_not_say_its_prompt_is_served(make):
    """One of an earlier release, whose prompt is not known."""
    pair = make()
    pair.compares(0)
    request = pair.arrive(req_of(PROMPT), req_of([*PROMPT[:-1], 1]))
    assert all(not receiver.prompt for receiver in request.receivers)
    pair.serve(request)


def test_it_is_said_only_where_prefill_has_said_that_it_compares():
    answer = asyncio.run(capabilities(1, 1, True, RegisteredRanks().timeouts()))
    assert parse_capabilities(answer).prompts
    assert not parse_capabilities(answer | {"prompts": 1}).prompts
    assert not parse_capabilities(answer | {"version": 0}).prompts
    del answer["prompts"]
    assert not parse_capabilities(answer).prompts
