"""What a request asks of the engine costs no other request its answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import xgrammar
from engine_classes import engine_class
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.disaggregation.refusal import RefusedRooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

ENGINE = engine_class(Scheduler)
# The engine's, which makes the messages.
MESSAGES = engine_class(SchedulerOutputProcessorMixin)


def test_what_one_request_asks_for_is_told_to_no_other(monkeypatch):
    """An option of some of a batch: the tokenizer manager takes the nth entry for the nth request."""

    def ended(rid: str, **of_its_own) -> Req:
        req = Req(rid, "", [1, 2, 3], SamplingParams(max_new_tokens=1))
        req.output_ids, req.finished_reason, req.finished_len = [4], FINISH_LENGTH(length=1), 1
        vars(req).update(of_its_own)
        return req

    scheduler, messages = object.__new__(Scheduler), []
    scheduler.spec_algorithm, scheduler.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.NULL
    scheduler.dp_rank, scheduler.attn_tp_rank, scheduler.get_load = None, 1, lambda: None
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=messages.append)
    monkeypatch.setattr(Scheduler, "_get_cached_tokens_details", lambda self, req: None)
    reqs = [
        ended("plain"),
        ended("states", return_hidden_states=True, hidden_states=["of states"]),
        ended("experts", return_routed_experts=True, routed_experts="of experts"),
        ended("more", customized_info={"score": ["of more"]}),
        ended("other", customized_info={"rank": ["of other"]}),
        ended("plain too"),
    ]
    # Of these the scheduler has been told when they came.
    scheduler.note_optional_parts(asked=reqs[1])
    scheduler.stream_output_generation(reqs, False)
    told = {}
    for message in messages:
        parts = {
            "hidden_states": message.output_hidden_states,
            "routed_experts": message.routed_experts,
            **message.customized_info,
        }
        for i, rid in enumerate(message.rids):
            told[rid] = {name: values[i] for name, values in parts.items() if values}
    assert told == {
        "plain": {},
        "states": {"hidden_states": ["of states"]},
        "experts": {"routed_experts": "of experts"},
        "more": {"score": ["of more"]},
        "other": {"rank": ["of other"]},
        "plain too": {},
    }
    # As the engine: one message where all are alike, and one of nobody for a batch of nobody.
    assert [message.rids for message in messages][0] == ["plain", "plain too"]
    scheduler.stream_output_generation([], False, is_idle_batch=True)
    assert messages[-1].rids == []


def test_an_empty_logit_processor_is_none(monkeypatch):
    """The engine takes it for none, and beside a real one in the same batch it ends the scheduler."""
    taken = []
    monkeypatch.setattr(ENGINE, "handle_generate_request", lambda self, req: taken.append(req))
    scheduler = object.__new__(Scheduler)
    scheduler.tree_cache, scheduler.server_args = None, SimpleNamespace(enable_custom_logit_processor=True)
    scheduler.handle_generate_request(SimpleNamespace(rid="r", custom_logit_processor=""))
    assert [req.custom_logit_processor for req in taken] == [None]


def test_a_grammar_that_makes_its_compiler_raise_is_an_invalid_one():
    class Backend(BaseGrammarBackend):
        def dispatch_regex(self, key_string):
            raise KeyError("begin")

    future, hit = Backend().get_cached_or_future_value(("regex", "a"), False)
    grammar = future.result()
    assert not hit and isinstance(grammar, InvalidGrammarObject) and "KeyError: 'begin'" in grammar.error_message


@pytest.mark.parametrize("held, ends", [(None, True), (0, False)])
def test_a_resumed_request_tells_its_last_token_to_no_grammar_twice(held: int | None, ends: bool):
    """``held``: what decode's tree had of it; without a tree it is as the engine has it."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    end_of_thought, end = 130, 129
    vocab = xgrammar.TokenizerInfo([chr(i) for i in range(128)] + ["", "", ""], stop_token_ids=[end])
    context = xgrammar.GrammarCompiler(vocab).compile_regex("ab")
    grammar = ReasonerGrammarObject(
        XGrammarGrammar(xgrammar.GrammarMatcher(context), 131, context, None, "ab"), end_of_thought
    )
    grammar.maybe_init_reasoning(True)
    req = Req("r", "", [1, 2, 3], SamplingParams(max_new_tokens=9))
    req.grammar, req.decode_prefix_len = grammar, held
    batch = object.__new__(ScheduleBatch)
    batch.reqs, batch.device, batch.spec_algorithm = [req], "cpu", SpeculativeAlgorithm.NONE
    batch.tree_cache = SimpleNamespace(cache_unfinished_req=lambda req: None)
    req.output_ids = [end_of_thought]
    batch.process_prebuilt(None, None)
    req.output_ids.append(ord("a"))
    grammar.accept_token(ord("a"))
    req.reset_for_retract()
    batch.process_prebuilt(None, None)
    assert (req.to_finish is not None) == ends
    if not ends:
        grammar.accept_token(ord("b"))


@pytest.fixture
def scheduler(monkeypatch):
    """One whose engine is told of batches and does nothing with them."""
    made = object.__new__(Scheduler)
    made.told = []
    monkeypatch.setattr(MESSAGES, "stream_output_generation", lambda self, reqs, *_: self.told.append(reqs))
    monkeypatch.setattr(ENGINE, "process_batch_result", lambda self, batch, result: None)
    made.tree_cache, made.disaggregation_mode = object.__new__(ChunkCache), DisaggregationMode.DECODE
    return made


@pytest.mark.parametrize("part", ["return_hidden_states", "return_routed_experts"])
def test_a_request_with_parts_of_its_own_is_noted_when_it_comes(scheduler, monkeypatch, part):
    scheduler.server_args = SimpleNamespace(enable_custom_logit_processor=False)
    monkeypatch.setattr(ENGINE, "handle_generate_request", lambda self, req: None)
    plain = {"rid": "r", "custom_logit_processor": None, "return_hidden_states": False, "return_routed_experts": False}
    scheduler.handle_generate_request(SimpleNamespace(**plain))
    assert not scheduler.has_optional_parts
    scheduler.handle_generate_request(SimpleNamespace(**{**plain, part: True}))
    assert scheduler.has_optional_parts


# ---- the OpenAI endpoints ----


def completion(**options):
    serving = object.__new__(OpenAIServingCompletion)
    serving.template_manager = SimpleNamespace(completion_template_name=None)
    serving.allowed_custom_labels = None
    body = CompletionRequest(model="m", prompt=["a", "b"], **options)
    return serving._convert_to_internal_request(body, None)[0]


def test_echo_with_logprobs_0_asks_for_the_prompts_logprobs():
    asked = completion(echo=True, logprobs=0)
    assert asked.return_logprob and asked.logprob_start_len == 0
    answer: dict = {"meta_info": {}}
    asked.amend(answer)
    assert answer == {"meta_info": {"input_top_logprobs": []}}
    assert completion(echo=True).logprob_start_len == completion(logprobs=0).logprob_start_len == -1


@pytest.mark.parametrize("prompt", ["the prompt", ["one", "a longer one"], [1, 2, 3], [[1], [2, 3]]])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_stream_with_echo_has_the_whole_answer(monkeypatch, prompt, logprobs):
    """The engine left out as many of the answer's letters as the prompt has."""
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    asked = CompletionRequest(model="m", prompt=prompt, echo=True, stream=True, logprobs=logprobs, n=2)
    answers = [f"answer {place} of all" for place in range(4 if several else 2)]

    async def generate_request(self, obj, request=None):
        assert not hasattr(obj, "amend")
        for end in (7, 7, 12, 99):
            for place, text in enumerate(answers):
                meta = {"id": "r", "finish_reason": {"type": "stop"} if end == 99 else None}
                meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
                yield {"text": text[:end], "index": place, "meta_info": meta}

    monkeypatch.setattr(engine_class(TokenizerManager), "generate_request", generate_request)
    serving = object.__new__(OpenAIServingCompletion)
    serving.template_manager, serving.allowed_custom_labels = SimpleNamespace(completion_template_name=None), None
    made = serving.tokenizer_manager = object.__new__(TokenizerManager)
    made.disaggregation_mode, made.refused_rooms, made.rid_to_state = DisaggregationMode.NULL, RefusedRooms(), {}
    made.server_args = SimpleNamespace(enable_lora=False)
    made.own_states, made.tokenizer = {}, SimpleNamespace(decode=lambda ids, **_: f"<{ids}>")
    made.server_args.stream_response_default_include_usage = False
    made.server_args.disaggregation_decode_enable_radix_cache = False

    async def sent() -> list[str]:
        texts = [""] * len(answers)
        async for line in serving._generate_completion_stream(*serving._convert_to_internal_request(asked), None):
            for choice in json.loads(line[6:])["choices"] if line != "data: [DONE]\n\n" else ():
                texts[choice["index"]] += choice["text"]
        return texts

    echoes = [one if isinstance(one, str) else f"<{one}>" for one in (prompt if several else [prompt])]
    assert asyncio.run(sent()) == [echoes[place // 2] + text for place, text in enumerate(answers)]


def test_each_prompt_of_a_batch_has_its_own_key():
    obj = GenerateReqInput(input_ids=[[1], [2]], extra_key=["a", "b"])
    obj.normalize_batch_and_arguments()
    assert [obj[i].extra_key for i in range(2)] == ["a", "b"]
    one = GenerateReqInput(input_ids=[[1], [2]], extra_key="a")
    one.normalize_batch_and_arguments()
    assert [one[i].extra_key for i in range(2)] == ["a", "a"]
    samples = GenerateReqInput(input_ids=[[1], [2]], extra_key=["a", "b"], sampling_params={"n": 2})
    samples.normalize_batch_and_arguments()
    assert [samples[i].extra_key for i in range(2)] == ["a", "b"]
    # Others are left to a worker that has a use for keys.
    for keys in (["a"], ["a", "b", "c"], []):
        other = GenerateReqInput(input_ids=[[1], [2]], extra_key=keys)
        other.normalize_batch_and_arguments()
        assert [other[i].extra_key for i in range(2)] == [keys, keys]


def test_a_request_whose_name_is_empty_gets_one():
    """The engine serves it, and aborts every other request with it."""
    one, batch = GenerateReqInput(input_ids=[1], rid=""), GenerateReqInput(input_ids=[[1], [2], [3]], rid=["", "a", ""])
    for obj in one, batch:
        obj.normalize_batch_and_arguments()
    assert one.rid and batch.rid[1] == "a" and len(set(batch.rid)) == 3 and all(batch.rid)
