"""The engine's loop of a decode worker that speculates, overlapped (v2) or not (v1), with a model that is a formula.

As `overlapped_loop`, with a second pool, the draft model's: its KV of a token depends on all tokens up to the *next*.
What a draft starts from (hidden states) is a number too, which depends on all tokens so far; a step looks at it. What
is drafted is right for as many tokens as chance has it, and the rest is wrong; rejected drafts leave their KV behind.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from decode_world import kv_of
from overlapped_loop import VOCABULARY, Loop, LoopScheduler, Step, next_token
from sglang.srt.disaggregation.draft_budget import DraftLengths, DraftSlots
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

STEPS, DRAFT = 3, 4
FIRST_TOKEN, GARBAGE = 7, 13
# Added to the number of the weights, to tell apart what is computed with them.
DRAFT_KV, HIDDEN = 1000, 2000


def draft_kv_of(tokens: list[int], weights: int) -> list[int]:
    """The draft model's KV of all of ``tokens`` but the last."""
    return [kv_of(tokens[: i + 2], weights + DRAFT_KV) for i in range(len(tokens) - 1)]


class SpeculatingStep(Step):
    """Writes to both pools."""

    def __init__(self, kv: torch.Tensor, steps: list[Step], draft_kv: torch.Tensor):
        super().__init__(kv, steps)
        self._draft_kv = draft_kv
        self.drafted: list[tuple[int, int]] = []

    def draft(self, slot: int, value: int) -> None:
        self.drafted.append((slot, value))
        self._draft_kv[slot] = value

    def synchronize(self) -> None:
        if not self.over:
            super().synchronize()
            for step in self._steps[self._steps.index(self) :]:
                for slot, value in step.drafted:  # type: ignore[attr-defined]
                    self._draft_kv[slot] = value


class SpeculatingScheduler(LoopScheduler):
    """The real scheduler with EAGLE."""

    def __init__(self, loop: Loop):
        super().__init__(loop)
        args = self.server_args
        args.speculative_algorithm, args.speculative_eagle_topk = "EAGLE", 1
        args.speculative_num_steps, args.speculative_num_draft_tokens = STEPS, DRAFT
        args.enable_multi_layer_eagle, args.attention_backend = False, "triton"
        self.model_config.hidden_size, self.model_config.dtype = 16, torch.float32
        self.spec_algorithm = SpeculativeAlgorithm.EAGLE
        self.future_map = FutureMap(loop.pool.size, None, loop.pool.max_context_len, "cpu", self.spec_algorithm)
        self.draft_worker = SimpleNamespace(speculative_num_draft_tokens=DRAFT, clear_cache_pool=lambda: None)
        self.spec_num_accepted_tokens = self.spec_num_forward_ct = 0

    def update_cache_from_scheduler(self, batch: Any, result: Any) -> None:
        pass


class SpeculatingLoop(Loop):
    """overlap: v2."""

    def __init__(self, flag: bool = True, overlap: bool = True, **sizes: Any):
        size, page_size = sizes["size"], sizes["page_size"]
        self.draft_kv = MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, "cpu", False)
        self.draft_kv.cpu_offloading_chunk_size = 8
        super().__init__(flag, overlap, **sizes)
        self.queue.draft_token_to_kv_pool = self.allocator.draft_kv_pool = self.draft_kv
        self.transfer.spec_algorithm = self.scheduler.spec_algorithm
        self.tree.is_eagle = True
        if flag:
            # The scheduler that the queue was made with did not speculate.
            plain, drafts = self.queue.accounts.lengths, DraftSlots.of(self.scheduler)
            lengths = DraftLengths(plain.page_size, plain.most_new_tokens, self.tree.pool_size, drafts)
            self.queue.accounts.lengths = lengths
        if self.tier is not None:
            self.tier.host.is_eagle = True
        # The tokens that the device has of each request; and how often a draft's state was looked at.
        self.sequences: dict[str, list[int]] = {}
        self.states_seen = 0

    def draft_pools(self, sizes: Any, page_size: int) -> list:
        pool = MHATokenToKVPoolHost(self.draft_kv, 2 + sizes.tokens / self.draft_kv.size, 0, page_size, "layer_first")
        return [(self.draft_kv, pool)]

    def _make_scheduler(self) -> SpeculatingScheduler:
        return SpeculatingScheduler(self)

    # ---- the wire ----

    def arrive(self, prompt: list[int], **options: Any) -> Any:
        options.update(grammar=False, logprobs=False)
        decode_req = super().arrive(prompt, **options)
        decode_req.req.sampling_params.top_k = 1  # greedy
        return decode_req

    def deliver(self, decode_req: Any, num_pages: int) -> None:
        receiver, req = decode_req.kv_receiver, decode_req.req
        first = receiver.sent_pages
        super().deliver(decode_req, num_pages)
        tokens = [*req.origin_input_ids, FIRST_TOKEN]
        values = draft_kv_of(tokens, self.weights)
        for i in range(first, receiver.sent_pages):
            start = receiver.prefix_len + i * self.page_size
            slot = receiver.page_indices[i] * self.page_size
            for offset, value in enumerate(values[start : start + self.page_size]):
                self.draft_kv.k_buffer[0][slot + offset] = value

    def complete(self, decode_req: Any, first_token: int = FIRST_TOKEN) -> None:
        super().complete(decode_req, first_token)
        tokens = [*decode_req.req.origin_input_ids, first_token]
        self.meta.output_hidden_states[decode_req.kv_receiver.aux_index] = kv_of(tokens, self.weights + HIDDEN)

    # ---- the model ----

    def _start(self, batch: Any, lens: list[int], verified: list[int]) -> list[tuple[Any, list[int], int, list[int]]]:
        """Of each request: itself, its tokens, how many drafts are right, and the DRAFT + 1 tokens that come."""
        found = []
        for i, (req, length) in enumerate(zip(batch.reqs, lens, strict=True)):
            known = req.origin_input_ids + req.output_ids
            tokens = known[: length + 1] if len(known) > length else self.sequences[req.rid]
            assert len(tokens) == length + 1 and tokens[-1] == verified[i]
            state = batch.spec_info.hidden_states[i]
            expected = kv_of(tokens, self.weights_of[req.rid] + HIDDEN)
            assert state.tolist() == [expected] * len(state), f"{req.rid} drafts from another state"
            self.states_seen += 1
            right = kv_of(tokens, 5) % DRAFT
            ahead = list(tokens)
            for _ in range(DRAFT):
                ahead.append(next_token(ahead))
            found.append((req, tokens, right, ahead[length:]))
        return found

    def _verify(self, step: Any, slots: list[int], req: Any, tokens: list[int], right: int, ahead: list[int]) -> None:
        """The target's KV of the drafts, and the draft model's as it drafted."""
        drafts = [*ahead[: right + 1], *(3 - token for token in ahead[right + 1 : DRAFT])]
        for j, slot in enumerate(slots):
            step.write(slot, kv_of([*tokens, *drafts[1 : j + 1]], self.weights_of[req.rid]))
            step.draft(slot, GARBAGE)

    def _take_in(self, step: Any, slots: list[int], req: Any, tokens: list[int], ahead: list[int]) -> None:
        """The draft model's KV of what was accepted."""
        weights = self.weights_of[req.rid]
        for j, slot in enumerate(slots):
            step.draft(slot, kv_of([*tokens, *ahead[1 : j + 2]], weights + DRAFT_KV))

    def _state(self, found: list, accepted: list[int], rows: list[int] | None = None) -> dict[str, torch.Tensor]:
        """What the next draft starts from, of the requests at ``rows``."""
        numbers = []
        for i in range(len(found)) if rows is None else rows:
            req, tokens, _, ahead = found[i]
            self.sequences[req.rid] = [*tokens, *ahead[1 : accepted[i] + 2]]
            numbers.append(kv_of(self.sequences[req.rid], self.weights_of[req.rid] + HIDDEN))
        count = len(numbers)
        return {
            "hidden_states": torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, 16),
            "topk_p": torch.ones((count, 1)),
            "topk_index": torch.ones((count, 1), dtype=torch.int64),
        }

    def _forward(self, batch: Any) -> GenerationBatchResult:
        step = SpeculatingStep(self.kv.k_buffer[0], self.steps, self.draft_kv.k_buffer[0])
        self.steps.append(step)
        step.rows = set(batch.req_pool_indices.tolist())
        lens, verified = batch.seq_lens.tolist(), batch.spec_info.verified_id.tolist()
        found = self._start(batch, lens, verified)
        return (
            self._forward_v2(batch, step, lens, found) if self.overlap else self._forward_v1(batch, step, lens, found)
        )

    def _forward_v2(self, batch: Any, step: Any, lens: list[int], found: list) -> GenerationBatchResult:
        predicted: list[int] = []
        for row, length, (req, tokens, right, ahead) in zip(batch.req_pool_indices.tolist(), lens, found, strict=True):
            slots = self.pool.req_to_token[row, length : length + DRAFT].tolist()
            assert len(set(slots)) == DRAFT
            self._verify(step, slots, req, tokens, right, ahead)
            # For rejected drafts too, of which something else comes out.
            self._take_in(step, slots[: right + 1], req, tokens, ahead)
            predicted += [*ahead[1 : right + 2], *[0] * (DRAFT - right - 1)]
        accepted = [right for _, _, right, _ in found]
        new_lens = torch.tensor([length + right + 1 for length, right in zip(lens, accepted, strict=True)])
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.tensor(predicted),
            accept_lens=torch.tensor(accepted) + 1,
            next_draft_input=EagleDraftInput(
                **self._state(found, accepted),
                verified_id=torch.tensor([ahead[right + 1] for _, _, right, ahead in found]),
                new_seq_lens=new_lens,
            ),
        )

    def _forward_v1(self, batch: Any, step: Any, lens: list[int], found: list) -> GenerationBatchResult:
        """The engine's own verification, of logits that leave no doubt; without overlap a step ends when it returns."""
        count, page = len(found), self.page_size
        drafts = [[*ahead[: right + 1], *(3 - t for t in ahead[right + 1 : DRAFT])] for _, _, right, ahead in found]
        index = torch.arange(count * DRAFT).view(count, DRAFT)
        verify = EagleVerifyInput(
            draft_token=torch.tensor(drafts).flatten(),
            custom_mask=None,
            positions=None,
            retrive_index=index,
            retrive_next_token=index,
            retrive_next_sibling=index,
            retrive_cum_len=None,
            spec_steps=STEPS,
            topk=1,
            draft_token_num=DRAFT,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=sum(lens),
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        verify.prepare_for_verify(batch, page)
        slots = batch.out_cache_loc.view(count, DRAFT).tolist()
        logits = torch.zeros(count, DRAFT, VOCABULARY)
        for i, (req, tokens, right, ahead) in enumerate(found):
            self._verify(step, slots[i], req, tokens, right, ahead)
            for j in range(right + 1):
                logits[i, j, ahead[j + 1]] = 1
        output = LogitsProcessorOutput(next_token_logits=logits.view(count * DRAFT, VOCABULARY))
        verify.hidden_states = torch.zeros(count * DRAFT, 16)
        batch.spec_info = verify
        res = verify.verify(batch, output, self.allocator, page)
        accepted = res.accept_length_per_req_cpu
        going = [i for i, (req, *_) in enumerate(found) if not req.finished()]
        for i in going:
            req, tokens, right, ahead = found[i]
            assert accepted[i] == right
            self._take_in(step, slots[i][: right + 1], req, tokens, ahead)
        batch.spec_info = res.draft_input
        if going:
            for name, value in self._state(found, accepted, going).items():
                setattr(batch.spec_info, name, value)
            batch.spec_info.verified_id = torch.tensor([found[i][3][accepted[i] + 1] for i in going])
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=res.verified_id,
            accept_length_per_req_cpu=accepted,
            num_accepted_tokens=sum(accepted),
        )

    # ---- invariants ----

    def check_answer(self, req: Any, expected: list[int]) -> None:
        """The engine may miss a stop string in what a step accepts, and looks for the length before a stop token."""
        said = req.output_ids_through_stop
        assert said[: len(expected)] == expected
        assert len(said) < len(expected) + DRAFT or req.sampling_params.stop_strs

    def check(self) -> None:
        super().check()
        # Trap 35: no reader sees draft KV of another continuation.
        for req in self.waiting + self.running:
            self._check_draft_kv(req, req.kv_committed_len)
        if self.flag:
            for pairs, slots in super()._tree_paths(self.tree):
                tokens = [*(first for first, _ in pairs), pairs[-1][1]]
                assert all(a[1] == b[0] for a, b in zip(pairs, pairs[1:], strict=False))
                got = self.draft_kv.k_buffer[0][slots].flatten().int().tolist()
                assert got == draft_kv_of(tokens, self.weights), "stale draft KV in the tree"

    def _check_draft_kv(self, req: Any, length: int) -> None:
        tokens = (req.origin_input_ids + req.output_ids)[: length + 1]
        slots = self.pool.req_to_token[req.req_pool_idx, :length].tolist()
        got = self.draft_kv.k_buffer[0][slots].flatten().int().tolist()
        assert got == draft_kv_of(tokens, self.weights_of[req.rid]), f"stale draft KV of {req.rid}"

    def _tree_paths(self, tree):
        for pairs, slots in super()._tree_paths(tree):
            yield [first for first, _ in pairs], slots
