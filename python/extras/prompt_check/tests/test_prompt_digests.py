"""Prompts whose tokens differ are refused; what prefill computes with other images it sends, and decode keeps nothing.

Images it may have fetched another time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation import prompt_digests as module
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.prompt_digests import OTHER_IMAGES, prompt_digest, prompt_digests, say_images
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from test_prompts_compared import PROMPT, make, reasons, req_of

__all__ = ["make"]


@pytest.fixture(autouse=True)
def compares(monkeypatch):
    monkeypatch.setenv(module.COMPARE_PROMPTS, "1")


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
    world.scheduler.disagg_decode_prealloc_queue = world.queue  # type: ignore[attr-defined]

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
    monkeypatch.setattr(module, "prompt_digest", lambda *args: made.append(args) or prompt_digest(*args))
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
        monkeypatch.setenv(module.COMPARE_PROMPTS, compares)
        manager._create_tokenized_object(None, "", PROMPT, None, images)
    assert vars(message.sampling_params) == {"stop_token_ids": None}
