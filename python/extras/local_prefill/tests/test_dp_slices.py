"""DP ranks that step together: what one computes of prompts, and learns of steps, while another decodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation import local_steps
from sglang.srt.disaggregation.decode_radix.hooks import NO_HOOKS
from sglang.srt.disaggregation.local_policy import Bucket, Policy
from sglang.srt.disaggregation.local_prefill import LocalPrefills, LocalReq
from sglang.srt.disaggregation.local_steps import pick, who_wait
from sglang.srt.model_executor.forward_batch_info import ForwardMode


def step(reqs: int, everywhere: list[int] | None, prompts: bool = False) -> SimpleNamespace:
    """The batch of this rank, which decodes ``reqs``; ``everywhere``: what all DP ranks are told of the step."""
    figures = {"finished_reason": None, "cache_protected_len": 0, "seqlen": 500, "output_ids": [0] * 20}
    found = [SimpleNamespace(rid=f"r{i}", origin_input_ids=[0] * 480, **figures) for i in range(reqs)]
    return SimpleNamespace(
        reqs=found,
        forward_mode=ForwardMode.DECODE if reqs else ForwardMode.IDLE,
        global_num_tokens=everywhere,
        is_extend_in_batch=prompts,
        prefill_stats=None,
    )


class Rank:
    """One that has 16 remainders of 128 tokens to compute and decodes ``running`` requests."""

    def __init__(self, running: int):
        tree = SimpleNamespace(is_eagle=False, page_size=16)
        self.local = LocalPrefills(tree, None, None, None, Policy.of("auto"), True)
        for _ in range(16):
            req = SimpleNamespace(origin_input_ids=[0] * 128, to_finish=None)
            self.local.waiting.append(LocalReq(SimpleNamespace(req=req, kv_receiver=None), 0, agreed=True))
        reqs = step(running, None).reqs
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=reqs, batch_size=lambda: len(reqs)),
            req_to_token_pool=SimpleNamespace(size=64),
            max_running_requests=64,
            waiting_queue=[],
            disagg_decode_transfer_queue=SimpleNamespace(hooks=NO_HOOKS),
        )

    def next_step(self) -> int:
        """Tokens of prompts."""
        return sum(end - one.done for one, end in pick(self.scheduler, self.local))


def test_who_decodes_on_another_rank_is_waited_for_as_here():
    here, elsewhere = Rank(8), Rank(0)
    elsewhere.local.ranks.note_step(step(0, [0, 8]))
    assert who_wait(elsewhere.scheduler, elsewhere.local) == 8
    assert elsewhere.next_step() == here.next_step() < 200
    # Nobody decodes anywhere.
    elsewhere.local.ranks.idle()
    assert elsewhere.next_step() == Policy.of("auto").step


def test_ranks_that_step_together_share_what_the_others_lose():
    """Each step over prompts is all ranks': with four, each has a quarter of the part."""
    waits = []
    for ranks in (1, 4):
        bucket = Bucket()
        bucket.take([1000, 10**7])
        bucket.note_step(step(16, [16] * ranks))
        bucket.spend(3)
        waits.append(bucket.wait(1, 16))
    assert waits[1] == pytest.approx(4 * waits[0], abs=4)


@pytest.mark.parametrize("together", [True, False])
def test_a_step_without_prompts_comes_between_two_where_others_may_decode(monkeypatch, together):
    """What another rank decodes is told of no other; one that decodes nothing itself would never hear of it."""
    rank = Rank(0)
    rank.local.ranks.together = together
    rank.local.launched = SimpleNamespace(reqs=[])
    for name in ("end_aborted", "merge_computed"):
        monkeypatch.setattr(local_steps, name, lambda *args: None)
    begun = []
    monkeypatch.setattr(rank.local, "begin", lambda slices: begun.extend(slices) or [])
    rank.scheduler.running_batch.is_empty = lambda: True
    local_steps._local_batch(rank.scheduler, rank.local)
    assert bool(begun) == (not together)


def test_a_burst_is_not_all_taken_because_nobody_decodes_yet():
    """The first of it decode when the rest has its turn, which then waits for their steps."""
    rank = Rank(0)
    rank.local.bucket.take([1000, 7_000])
    req = SimpleNamespace(
        origin_input_ids=[0] * 128, return_logprob=False, return_hidden_states=False, return_routed_experts=False,
        is_prefill_only=False, input_embeds=None, multimodal_inputs=None, session=None, token_type_ids=None,
        bootstrap_host="10.0.0.1",
    )  # fmt: skip
    found = SimpleNamespace(length=0, path=(), in_last=0)
    rank.local.waiting = rank.local.waiting[:15]
    assert rank.local.should_compute(req, found, lambda: 0) and not rank.local._takes, "what one step computes"
    rank.local.waiting.append(rank.local.waiting[0])
    assert rank.local.should_compute(req, found, lambda: 0) and rank.local._takes == 2
    rank.local.bucket.spend(2)
    assert not rank.local.should_compute(req, found, lambda: 0), "they wait for longer than prefill takes"
