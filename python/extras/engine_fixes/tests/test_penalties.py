"""What penalties are told of an answer: its first token, which prefill samples, and all tokens before a retraction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlapped_loop import VOCABULARY, Loop, LoopEnds

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
