"""A logit processor that fails costs only the requests their answers with which it fails alone."""

from __future__ import annotations

import json
import math
import weakref
from types import SimpleNamespace

import dill
import pytest
import torch
import torch.distributed as dist
from engine_classes import engine_class
from prefill_loop import PrefillLoop
from ranks import assert_same
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.rejected_tokens import check_grammar
from sglang.srt.layers import sampler
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers import batch_failures
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

INF = math.inf


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """One rank samples, but where a test has two."""
    monkeypatch.setattr(sampler, "get_tp_group", lambda: SimpleNamespace(world_size=1))


class Doubles:
    def __call__(self, logits, params):
        return logits * 2


class Raises:
    def __call__(self, logits, params):
        logits.fill_(7)
        raise RuntimeError("boom")


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
    monkeypatch.setattr(engine_class(Scheduler), "process_batch_result", ended)
    scheduler.process_batch_result(batch, result)
    assert [req.to_finish and req.to_finish.message for req in reqs] == [None, "boom", None]
    # The next draft has been made for all that went on.
    assert seen == [[False, not verified, False]]
    scheduler.process_batch_result(SimpleNamespace(reqs=reqs[:1], sampling_info=batch.sampling_info), SimpleNamespace())
    assert reqs[0].to_finish is None


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


class RaisesTogether:
    """Serves each by itself only."""

    def __call__(self, logits, params):
        assert len(params) == 1, "no memory for two"
        return logits * 2


def processors_on_ranks(rank: int, broken: str, failing: int, num_tokens: int) -> list:
    """The processor of the first two of four requests raises on one rank, and that of the third on all."""

    class Info(SimpleNamespace):
        def __len__(self):
            return 4

    wrong = {"each": Raises, "together": RaisesTogether}[broken]
    shared = (wrong if rank == failing else Doubles)(), torch.tensor([True, True, False, False])
    info = Info(
        custom_logit_processor={1: shared, 2: (Raises(), torch.tensor([False, False, True, False]))},
        custom_params=[None] * 4,
        is_all_greedy=True,
    )
    logits = torch.arange(1.0, 4 * num_tokens * 2 + 1).view(-1, 2)
    group = SimpleNamespace(world_size=2, device_group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "get_tp_group", lambda: group)
        apply_custom_logit_processor(logits, info, num_tokens)
    return [logits.argmax(-1).tolist(), logits.tolist(), sorted(info.failed_processors), info.failed_processors]


@pytest.mark.parametrize(
    ("broken", "why", "failing", "num_tokens"),
    [("each", "RuntimeError: boom", 0, 1), ("together", "no memory for two", 1, 1), ("each", "boom", 1, 3)],
)
def test_a_logit_processor_that_fails_on_one_rank_fails_on_all(pair, broken, why, failing, num_tokens):
    """Only there its request ended; the ranks' batches differed from the next step on, and the worker hung."""
    ranks = pair.run(processors_on_ranks, broken, failing, num_tokens)
    *_, failed = assert_same([told[:3] for told in ranks])
    assert failed == [0, 1, 2]
    here, elsewhere = ranks[failing][3], ranks[1 - failing][3]
    assert all(why in here[place] and "another TP rank" in elsewhere[place] for place in (0, 1))
    assert here[2] == elsewhere[2] and "boom" in here[2]


def test_a_logit_processor_that_cannot_be_made_again_costs_only_its_own_request(monkeypatch):
    """Each batch makes it anew; what failed then, by chance or for lack of memory, ended the scheduler."""

    def raises():
        raise MemoryError("by chance")

    args = SimpleNamespace(enable_custom_logit_processor=True, enable_deterministic_inference=False)
    monkeypatch.setattr(sampling_batch_info, "get_global_server_args", lambda: args)
    params = SamplingParams()
    params.normalize(None)
    texts = [json.dumps({"callable": dill.dumps(one, recurse=True).hex()}) for one in (Doubles, raises)]
    reqs = [SimpleNamespace(sampling_params=params, custom_logit_processor=text) for text in (*texts, None)]

    class Batch:  # which is referred to weakly
        pass

    batch = Batch()
    batch.reqs, batch.device = reqs, "cpu"
    info = sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, 4)
    logits = torch.ones(3, 4)
    apply_custom_logit_processor(logits, info)
    assert logits[:, 0].tolist() == [2, 1, 1] and list(info.failed_processors) == [1]
    assert "could not be made: MemoryError: by chance" in info.failed_processors[1]
    # Who takes a request in hears of it at once.
    with pytest.raises(MemoryError):
        CustomLogitProcessor.from_str(texts[1])


def made_on_ranks(rank: int, failing: int | None, stages: int = 1) -> list:
    """Messages with a logit processor, the first of which cannot be made on one rank, and one without any."""
    taken, told, refused = [], [], []

    class Worker(Scheduler):
        def __init__(self):
            self.tree_cache, self.dp_tp_cpu_group = None, dist.group.WORLD
            self.server_args = SimpleNamespace(enable_custom_logit_processor=True)
            self.pp_size = stages
            self.send_to_tokenizer = SimpleNamespace(send_output=lambda out, req: told.append(out.finished_reason))

        def _tell_peer(self, req, reason, at_fault):
            refused.append(req.rid)

    def from_str(text):
        if text == "a file" and rank == failing:
            raise OSError("no such file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CustomLogitProcessor, "from_str", from_str)
        take = lambda self, req: taken.append(req.rid)  # noqa: E731
        patch.setattr(engine_class(Scheduler), "handle_generate_request", take)
        worker = Worker()
        for rid, processor in (("a", "a file"), ("b", None), ("c", "fine")):
            worker.handle_generate_request(SimpleNamespace(rid=rid, custom_logit_processor=processor))
    return [taken, refused, [reason["message"] for reason in told]]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_logit_processor_that_one_rank_cannot_make_is_refused_by_all(pair, failing):
    """The others queued its request, and met nobody in the next reduction."""
    ranks = pair.run(made_on_ranks, failing)
    taken, refused = assert_same([told[:2] for told in ranks])
    wrong = [] if failing is None else ["a"]
    assert refused == wrong and taken == [rid for rid in "abc" if rid not in wrong]
    for *_, told in ranks:
        assert len(told) == len(wrong) and all("OSError: no such file" in reason for reason in told)


def test_pipeline_stages_refuse_no_logit_processor(pair):
    """They met in no collective for that: one refused what another had queued. The last stage samples, and fails it."""
    taken, refused, told = assert_same(pair.run(made_on_ranks, 0, 2))
    assert taken == ["a", "b", "c"] and not refused and not told


# ---- a token that is forced, and that the grammar rejects ----


class Rejects(BaseGrammarObject):
    """A grammar that rejects ``wrong``, and can make no mask from then on, as llguidance."""

    def __init__(self, wrong=(7,), error=ValueError):
        super().__init__()
        self.wrong, self.error, self.accepted = wrong, error, []

    def accept_token(self, token):
        if token in self.wrong:
            raise self.error("not in the grammar")
        self.accepted.append(token)


@pytest.mark.parametrize(
    ("ranks", "overlap", "error"),
    [(1, False, RuntimeError), (2, True, ValueError)],
    ids=["normal", "overlap, TP 2"],
)
def test_a_first_token_that_the_grammar_rejects_costs_only_its_own_request(monkeypatch, ranks, overlap, error):
    """The engine releases it, and releases it again when its transfer ends; what is sent lets decode reject it too."""
    loop = PrefillLoop(monkeypatch, ranks, overlap)
    ends = [{} for _ in range(ranks)]
    for scheduler, told in zip(loop.schedulers, ends, strict=True):

        def tell(reqs, *args, told=told):
            for req in reqs:
                if req.finished() and not req.finished_output:
                    req.finished_output = True
                    assert req.bootstrap_room not in told
                    told[req.bootstrap_room] = req.finished_reason

        monkeypatch.setattr(scheduler, "stream_output", tell)
        monkeypatch.setattr(scheduler, "_prefetch_kvcache", lambda req: None)
    for room, length, wrong in (7001, 100, [7]), (7002, 20, None), (7003, 12, []), (7004, 5, [7]):
        for scheduler, req in zip(loop.schedulers, loop.arrive(length, room), strict=True):
            req.grammar = None if wrong is None else Rejects(wrong, error)
            # It has come into its queue by then.
            with monkeypatch.context() as patch:
                patch.setattr(scheduler.disagg_prefill_bootstrap_queue, "add", lambda req, heads: None)
                scheduler._add_request_to_queue(req)
    loop.run(20)
    for scheduler, told in zip(loop.schedulers, ends, strict=True):
        assert {room: end.to_json().get("status_code") for room, end in told.items()} == {
            7001: 400, 7002: None, 7003: None, 7004: 400,
        }  # fmt: skip
        assert "grammar" in told[7001].message and "not in the grammar" in told[7004].message
        scheduler.assert_nothing_held()


@pytest.mark.parametrize("length", [9, 2], ids=["goes on", "has ended"])
def test_a_later_token_that_the_grammar_rejects(length):
    """The engine aborts the first without a reason, with all whose rid begins with its own, and serves the second."""
    req, grammar = Req("r", "", [1], SamplingParams(max_new_tokens=length), vocab_size=99), Rejects()
    req.sampling_params.normalize(None)
    req.grammar = grammar
    check_grammar(req)
    for token in 5, 7, 8:
        req.output_ids.append(token)
        req.check_finished()
        req.grammar.accept_token(token)
    assert grammar.accepted == [5] and req.finished_reason.status_code == 400
    assert "grammar of the request rejects token 7" in req.finished_reason.message and grammar.is_terminated()
    # Nothing keeps it.
    grammar = weakref.ref(grammar)
    del req
    assert grammar() is None


def sampled(cls, monkeypatch, logits, greedy=True, grammars=None, bias=None, seed=0, **options):
    """What a sampler makes of ``logits`` after the masks have been applied: tokens and output."""
    one = cls.__new__(cls)
    torch.nn.Module.__init__(one)
    off = "use_log_softmax_logprob", "enable_deterministic", "use_ascend_backend", "use_nan_detection"
    vars(one).update(dict.fromkeys(off, False), rl_on_policy_target=None)
    monkeypatch.setattr(cls, "_sync_token_ids_across_tp", lambda self, tokens, info: None)
    info = SimpleNamespace(is_all_greedy=greedy, grammars=grammars, logit_bias=bias, has_custom_logit_processor=False)
    info.need_top_p_sampling = info.need_top_k_sampling = info.need_min_p_sampling = False
    info.temperatures, info.sampling_seed, info.device = torch.full((len(logits), 1), 0.01), None, "cpu"
    vars(info).update(options)
    output = SimpleNamespace(next_token_logits=logits.clone())
    torch.manual_seed(seed)
    tokens = one.forward(output, info, False, [0] * len(logits), [None] * len(logits), None)
    return tokens.tolist(), output


def test_on_a_cpu_what_a_model_has_made_no_numbers_of_fails_its_request_alone(monkeypatch):
    logits = torch.tensor([[0.0, 9.0], [torch.nan, torch.nan], [0.0, 1.0]])
    tokens, output = sampled(sampler.Sampler, monkeypatch, logits, greedy=False)
    assert tokens[0] == 1
    assert list(batch_failures.without_token(SimpleNamespace(logits_output=output))) == [1]
