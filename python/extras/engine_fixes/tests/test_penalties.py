"""What penalties are told of an answer: its first token, which prefill samples, and all tokens before a retraction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from overlapped_loop import VOCABULARY, Loop, LoopEnds
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penalized_tokens import tell_earlier
from sglang.srt.sampling.sampling_params import SamplingParams

SHARED = [20 + i for i in range(8)]


class Penalized(Loop):
    """Requests with a frequency penalty of 1; each step notes which tokens were penalized, and which had to be."""

    def __init__(self, **sizes: Any):
        super().__init__(page_size=4, reserved=0, max_reqs=4, **sizes)
        self.penalized: list[tuple[str, list[int]]] = []
        self.due: list[tuple[str, list[int]]] = []

    def arrive(self, prompt: list[int], **options: Any) -> Any:
        decode_req = super().arrive(prompt, **options)
        decode_req.req.sampling_params.frequency_penalty = 1.0
        return decode_req

    def _forward(self, batch: Any) -> Any:
        if batch.forward_mode.is_decode():
            self._note(batch)
        return super()._forward(batch)

    def _note(self, batch: Any) -> None:
        penalties = torch.zeros(len(batch.reqs), VOCABULARY)
        batch.sampling_info.apply_logits_bias(penalties)
        for req, row, length in zip(batch.reqs, penalties, batch.seq_lens.tolist(), strict=True):
            if req.finished():
                continue
            sampled = length - len(req.origin_input_ids)
            # In an aggregated engine's overlapped steps the last token is still on the device.
            due = [req.origin_input_ids[-1], *req.output_ids][:sampled] if self.overlap else req.output_ids[:sampled]
            self.due.append((req.rid, sorted(due)))
            self.penalized.append((req.rid, [token for token in range(VOCABULARY) for _ in range(int(-row[token]))]))

    def play(self, script: dict[int, Any], ends: int) -> Penalized:
        """``script`` says what arrives before which turn; transfers arrive at once. ends: how many requests end."""

        def between() -> None:
            if self.iterations in script:
                prompt, max_new = script[self.iterations]
                self.handshake(self.arrive(prompt, max_new=max_new))
            for decode_req in self.asked:
                self.complete(decode_req)
            if len(self.told) == ends:
                raise LoopEnds
            assert self.iterations < 300, "no end"

        self.run(between)
        return self


def local(overlap: bool) -> Penalized:
    """With prompts that are computed here in slices, between which others decode."""
    local_policy = pytest.importorskip("sglang.srt.disaggregation.local_policy")
    loop = Penalized(overlap=overlap, size=128, options={"disaggregation_decode_local_prefill": "40"})
    loop.transfer.local.policy = local_policy.Policy(most=12, slice=4, step=8, debt=24)
    return loop


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_are_told_what_the_aggregated_engine_tells_them(overlap):
    """One joins another that decodes."""
    script = {1: ([*SHARED, 3], 12), 6: ([*SHARED, 4, 5], 6)}
    loop = Penalized(overlap=overlap, size=128).play(script, 2)
    assert loop.penalized == loop.due and len({rid for rid, _ in loop.due}) == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_do_not_depend_on_who_computes_a_prompt_nor_on_steps_between(overlap):
    script = {1: ([*SHARED, *range(40, 52)], 30), 6: ([*SHARED, *range(40, 63)], 4)}
    loop = local(overlap).play(script, 2)
    assert [rid for rid, *_ in loop.extended] == ["r2"] * 3
    assert loop.penalized == loop.due and len({rid for rid, _ in loop.due}) == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_resumed_request_is_penalized_for_its_answer_so_far(overlap):
    loop = Penalized(overlap=overlap, size=48)
    loop.play({n: ([40 + 10 * n + i for i in range(8)], 22) for n in range(1, 4)}, 3)
    assert max(req.retraction_count for req in loop.told) > 1
    assert loop.penalized == loop.due


@pytest.mark.parametrize("flag", [True, False])
def test_a_prompt_that_ends_with_an_image_ends_nobody(flag):
    """The engine has a hash of it in the place of its last token, which is no token of the model."""

    class Loop(Penalized):
        def arrive(self, prompt: list[int], **options: Any) -> Any:
            decode_req = super().arrive(prompt, **options)
            decode_req.req.origin_input_ids = [*prompt[:-1], prompt[-1] + VOCABULARY]
            decode_req.req.origin_input_ids_unpadded = prompt
            return decode_req

    loop = Loop(flag=flag, size=128)
    loop._forward = super(Penalized, loop)._forward  # type: ignore[method-assign]
    loop.play({1: ([*SHARED, 3], 4)}, 1)
    assert len(loop.told[0].output_ids) == 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("answer", [[7], [7, 7, 8], [9, 7, 9, 9, 8]])
def test_every_penalty_learns_of_an_answer_so_far_what_it_would_have_been_told(overlap, answer):
    """Beside a request that has no answer yet; min_new_tokens is a penalty too."""
    params = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5, "min_new_tokens": 4}
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    reqs = [Req(rid, "", [5, 6], SamplingParams(**params)) for rid in "ab"]
    for req in reqs:
        req.tokenizer = tokenizer
    batch = ScheduleBatch(reqs=reqs, device="cpu", enable_overlap=overlap)
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
    }
    told, again = (penaltylib.BatchedPenalizerOrchestrator(16, batch, kinds) for _ in range(2))
    # The last of the second is of an image.
    reqs[1].origin_input_ids = [5, 1_000_006]
    steps = [6, *answer] if overlap else answer
    # The step that comes next tells one.
    for token in steps[: len(answer) - 1]:
        told.cumulate_output_tokens(torch.tensor([0, token]))
    reqs[1].output_ids, batch.sampling_info = answer, SimpleNamespace(penalizer_orchestrator=again)
    tell_earlier(batch, 1)
    for kind in kinds:
        for name, tensor in vars(told.penalizers[kind]).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor[1], vars(again.penalizers[kind])[name][1]), name
    assert not again.penalizers[penaltylib.BatchedFrequencyPenalizer].cumulated_frequency_penalties[0].any()
    assert again.penalizers[penaltylib.BatchedMinNewTokensPenalizer].len_output_tokens[0] == 0
