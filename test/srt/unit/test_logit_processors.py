"""A logit processor that fails costs only the requests their answers with which it fails alone."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers import batch_failures
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

INF = math.inf


class Doubles:
    def __call__(self, logits, params):
        return logits * 2


class Raises:
    def __call__(self, logits, params):
        logits.fill_(7)
        raise RuntimeError("boom")


class Forbids:
    def __call__(self, logits, params):
        return torch.full_like(logits, -INF)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("wrong", "said"), [(Raises, "Raises failed: RuntimeError: boom"), (Forbids, "no token")])
def test_a_logit_processor_that_fails_changes_nobodys_logits(wrong, said, greedy):
    class Info(SimpleNamespace):
        def __len__(self):
            return 3

    masks = torch.tensor([[True, False, False], [False, True, False]])
    processors = {1: (wrong(), masks[0]), 2: (Doubles(), masks[1])}
    info = Info(custom_logit_processor=processors, custom_params=[None] * 3, failed_processors={}, is_all_greedy=greedy)
    logits = torch.ones(3, 4)
    apply_custom_logit_processor(logits, info)
    assert logits[:, 0].tolist() == [1, 2, 1]
    assert list(info.failed_processors) == [0] and said in info.failed_processors[0]


class TogetherOnly:
    """Serves nobody beside another."""

    def __call__(self, logits, params):
        assert len(params) == 1
        return logits * 2


class ForbidsForAll:
    """Makes of what each forbids what all forbid."""

    def __call__(self, logits, params):
        logits[:, [token for one in params for token in one["token_ids"]]] = -INF
        return logits


@pytest.mark.parametrize("tokens", [1, 3], ids=["a token each", "drafts to verify"])
@pytest.mark.parametrize(
    ("processor", "params", "left", "failed"),
    [
        (DisallowedTokensLogitsProcessor, [[0], [0], [0]], [(1, 1), (1, 1), (1, 1)], []),
        (DisallowedTokensLogitsProcessor, [[0], [1], [0]], [(1, 1), (0, 1), (1, 1)], []),
        (DisallowedTokensLogitsProcessor, [[0], [9], [1]], [(1, 1), (0, 2), (0, 1)], [1]),
        (DisallowedTokensLogitsProcessor, [[0], [0, 1], [1]], [(1, 1), (0, 2), (0, 1)], [1]),
        (ForbidsForAll, [[0], [1], [0]], [(1, 1), (0, 1), (1, 1)], []),
        (TogetherOnly, [[0], [1], [0]], [(0, 2), (0, 2), (0, 2)], []),
    ],
)
def test_requests_that_share_a_logit_processor_do_not_share_its_error(processor, params, left, failed, tokens):
    """left: of each request, the first token that it may have and how many those are."""

    class Info(SimpleNamespace):
        def __len__(self):
            return 4

    # The last has none.
    mask = torch.tensor([True, True, True, False])
    info = Info(
        custom_logit_processor={5: (processor(), mask)},
        custom_params=[*({"token_ids": one} for one in params), None],
        is_all_greedy=True,
    )
    logits = torch.ones(4 * tokens, 2)
    apply_custom_logit_processor(logits, info, tokens)
    assert list(info.failed_processors) == failed
    possible = [[i for i, value in enumerate(row) if value > -INF] for row in logits.tolist()]
    assert [(row[0], len(row)) for row in possible] == [one for one in [*left, (0, 2)] for _ in range(tokens)]


@pytest.mark.parametrize("verified", [False, True], ids=["sampled", "verified drafts"])
def test_only_the_request_whose_logit_processor_failed_ends(monkeypatch, verified):
    reqs = [Req(rid, "", [1], SamplingParams(), custom_logit_processor="shared") for rid in "abc"]
    left, seen = {1: "boom", 2: "bang"}, []
    if verified:
        batch = SimpleNamespace(reqs=reqs, sampling_info=SimpleNamespace(failed_processors=left))
        result = SimpleNamespace(logits_output=SimpleNamespace(), accept_length_per_req_cpu=[0, 0, 0])
    else:
        batch = SimpleNamespace(reqs=reqs, sampling_info=SimpleNamespace())
        result = SimpleNamespace(logits_output=SimpleNamespace(failed_processors=left))
    reqs[2].finished_reason = FINISH_LENGTH(length=1)
    scheduler = object.__new__(Scheduler)
    scheduler.tree_cache = None
    ended = lambda self, batch, result: seen.append([req.to_finish is not None for req in batch.reqs])  # noqa: E731
    monkeypatch.setattr(Scheduler.__bases__[-1], "process_batch_result", ended)
    scheduler.process_batch_result(batch, result)
    assert [req.to_finish and req.to_finish.message for req in reqs] == [None, "boom", None]
    # The next draft has been made for all that went on.
    assert seen == [[False, not verified, False]]
    scheduler.process_batch_result(SimpleNamespace(reqs=reqs[:1], sampling_info=batch.sampling_info), SimpleNamespace())
    assert reqs[0].to_finish is None


class Undefined:
    def __call__(self, logits, params):
        logits[:, 0] = torch.nan
        return logits


@pytest.mark.parametrize("greedy", [True, False])
def test_a_nan_that_the_engine_replaces_fails_nobody(greedy):
    """With --enable-nan-detection."""
    for replaces in (True, False):
        logits = torch.ones(1, 4)
        info = SimpleNamespace(
            custom_logit_processor={1: (Undefined(), torch.tensor([True]))},
            custom_params=[None],
            is_all_greedy=greedy,
            replaces_nan=replaces,
        )
        apply_custom_logit_processor(logits, info)
        assert bool(info.failed_processors) is not replaces and logits[0, 0].isnan() == replaces


def test_every_pipeline_stage_hears_for_whom_no_token_was_left():
    """Else the engine gives back its pages when its grammar refuses what was sampled, and again after its transfer."""
    stage, batch = object.__new__(Scheduler), SimpleNamespace(return_logprob=False, reqs=[])
    last = SimpleNamespace(
        next_token_ids=torch.tensor([1, 0]), logits_output=SimpleNamespace(hopeless=torch.tensor([False, True]))
    )
    sent = stage._pp_prepare_tensor_dict(last, batch)
    result = stage._pp_prep_batch_result(batch, SimpleNamespace(can_run_cuda_graph=False), PPProxyTensors(sent))
    said = batch_failures.without_token(result)
    assert list(said) == [1] and "No token can be chosen" in said[1]


def test_every_pipeline_stage_hears_whose_logit_processor_failed():
    """The last one samples; all go on from what it sends round."""
    stage, batch = object.__new__(Scheduler), SimpleNamespace(return_logprob=False, reqs=[])
    tokens, metadata = torch.tensor([1]), SimpleNamespace(can_run_cuda_graph=False)
    for failed in ({0: "boom"}, {}):
        last = SimpleNamespace(next_token_ids=tokens, logits_output=SimpleNamespace(failed_processors=failed))
        sent = stage._pp_prepare_tensor_dict(last, batch)
        # Without an error, what the engine sends.
        assert set(sent) == {"next_token_ids", *(["failed_processors"] if failed else [])}
        result = stage._pp_prep_batch_result(batch, metadata, PPProxyTensors(sent))
        assert batch_failures.failed_processors(batch, result) == failed
