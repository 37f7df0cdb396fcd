"""First tokens on decode, and logprobs and draft inputs of other requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_classes import engine_class
from overlapped_loop import Loop, LoopEnds, LoopScheduler, next_token
from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

SHARED = [20 + i for i in range(8)]


# ---- tokens of reasoning ----

END_OF_THOUGHT = 2


class Thinking(Loop):
    def _make_scheduler(self) -> LoopScheduler:
        scheduler = super()._make_scheduler()
        scheduler._think_end_id = END_OF_THOUGHT
        return scheduler

    def answer(self, prompt: list[int], first: int) -> Req:
        """To a prompt of which the KV comes from prefill, with that first token."""

        def between() -> None:
            if self.iterations == 1:
                decode_req = self.arrive(prompt, max_new=8)
                decode_req.req.require_reasoning = True
                self.handshake(decode_req)
            for decode_req in self.asked:
                self.complete(decode_req, first_token=first)
            if self.told:
                raise LoopEnds
            assert self.iterations < 100, "no end"

        self.run(between)
        return self.told[0]


def prompt_whose_answer_ends_its_thought(first: int) -> list[int]:
    """A prompt after which, and after a ``first`` token, the loop's model ends a thought, not with its next token."""
    for n in range(1000):
        tokens = [*SHARED, n, first]
        for _ in range(7):
            tokens.append(next_token(tokens))
        if END_OF_THOUGHT in tokens[-6:] and tokens[-7] != END_OF_THOUGHT:
            return [*SHARED, n]
    raise AssertionError


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("first, flag", [(1, True), (END_OF_THOUGHT, True), (1, False)])
def test_the_first_token_counts_as_reasoning(overlap, first, flag):
    loop = Thinking(flag=flag, overlap=overlap, size=128, page_size=4, reserved=0, max_reqs=4)
    req = loop.answer(prompt_whose_answer_ends_its_thought(first), first)
    # Without the flag the engine leaves it out.
    assert req.reasoning_tokens == req.output_ids.index(END_OF_THOUGHT) + (1 if flag else 0)


# ---- what prefill was not asked for ----


def written(buffers: MetadataBuffers, token: int, told: int | None, top: int = 0, drafts: bool = True) -> None:
    """A request of prefill writes its first ``token``. told: what its numbers are made of, None: it asks for none."""
    req = Req("p", "", [1], SamplingParams(), return_logprob=told is not None, bootstrap_room=token)
    req.metadata_buffer_index, req.output_ids, req.hidden_states_tensor = 0, [token], None
    if told is not None:
        req.output_token_logprobs_val, req.output_token_logprobs_idx = [-float(told)], [token]
        if top:
            req.output_top_logprobs_val, req.output_top_logprobs_idx = [[-float(told)] * top], [[told] * top]
    if drafts:
        req.output_topk_p, req.output_topk_index = torch.full((2,), 0.5), torch.full((2,), token)
        req.hidden_states_tensor = torch.full((4,), float(token))
    buffers.set_buf(req)


def read(buffers: MetadataBuffers, room: int, top: int = 2, **options: Any) -> Req:
    """The real commit of a request that decode was asked for logprobs of."""
    queue: Any = object.__new__(DecodeTransferQueue)
    queue.metadata_buffers, queue.tree_cache, queue.spec_algorithm = buffers, None, SpeculativeAlgorithm.EAGLE
    queue.scheduler = SimpleNamespace(server_args=SimpleNamespace(disaggregation_transfer_backend="nixl"))
    queue.scheduler.server_args.enable_metrics = False
    queue.scheduler.server_args.served_model_name = queue.scheduler.server_args.disaggregation_mode = "m"
    req = Req("d", "", [1], SamplingParams(), return_logprob=True, top_logprobs_num=top, bootstrap_room=room, **options)
    decode_req = DecodeRequest(req, SimpleNamespace(clear=lambda: None))
    decode_req.metadata_buffer_index = 0
    assert queue._commit_transfer_to_req(decode_req)
    return req


def logprobs(req: Req) -> tuple:
    return (
        req.output_token_logprobs_val,
        req.output_token_logprobs_idx,
        req.output_top_logprobs_val,
        req.output_top_logprobs_idx,
    )


@pytest.fixture
def buffers() -> MetadataBuffers:
    buffers = MetadataBuffers(1, hidden_size=4, hidden_states_dtype=torch.float32, max_top_logprobs_num=8)
    written(buffers, 77, told=9, top=8)
    return buffers


def test_what_prefill_was_not_asked_for_is_no_other_requests(buffers):
    """Its row still had all of it, for decode to read."""
    written(buffers, 5, told=None, drafts=False)
    req = read(buffers, 5)
    assert req.output_ids == [5] and logprobs(req) == ([None], [5], [[None]], [[5]])
    for left in req.output_topk_p, req.output_topk_index, req.hidden_states_tensor:
        assert not left.any()


@pytest.mark.parametrize("top, came", [(0, [None]), (1, [-3.0]), (2, [-3.0] * 2), (3, [-3.0] * 2)])
def test_as_many_alternatives_as_prefill_was_asked_for(buffers, top, came):
    written(buffers, 5, told=3, top=top)
    req = read(buffers, 5)
    assert logprobs(req) == ([-3.0], [5], [came], [[3] * len(came) if top else [5]])
    assert logprobs(read(buffers, 5, top=0)) == ([-3.0], [5], [[]], [[]])
    assert req.output_topk_index.tolist() == [5, 5] + [0] * 14


def test_a_prefill_without_the_package(buffers):
    """Decode sees that there are none if the token is not the same."""
    engine_utils = engine_class(MetadataBuffers)
    for told, expected in (None, ([None], [5], [[None]], [[5]])), (3, ([-3.0], [5], [[-3.0] * 2], [[3] * 2])):
        buffers.output_token_logprobs_idx[0, 0] = 77
        buffers.__class__ = engine_utils
        written(buffers, 5, told, top=2)
        assert logprobs(read(buffers, 5)) == expected
