"""No request ends a worker: what is refused at the door, and what an error costs beyond it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import json
import math
import socket
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import xgrammar
from engine_classes import engine_class
from fastapi import HTTPException
from prefill_front import bootstrap_server
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.disaggregation import peer_calls, refusal, room_notes
from sglang.srt.disaggregation.common import handshakes
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.room_notes import ComputedReq, RoomNotes
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, MetadataBuffers
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers import request_checks
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_checks import (
    check_embeds,
    check_labels,
    check_prompt,
    check_request,
    check_sampling,
    check_types,
    check_without_tokenizer,
    stop_tokens,
)
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_pd_radix.tools.make_model import make_model

VOCAB = 100
ENGINE = engine_class(TokenizerManager)
NAN, INF = math.nan, math.inf


def nested(depth: int) -> str:
    return '{"const":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


# Brackets in strings, and as many objects as a schema may have that refers to none.
FLAT = json.dumps({"enum": ["[{" * 5000, '"[' * 500, "\\"], "anyOf": [{} for _ in range(5000)]})
REFERS = '{"$defs":{"a":%s},"allOf":[' + '{"$ref":"#"},' * 3990 + "{}]}"

# Values of each option that the engine's own checks let pass: those that it serves, and those with which it is refused.
SAMPLING = {
    "max_new_tokens": ([0, 5, 2**70, True, None], [2.5, 5.0, INF]),
    "stop": (["a", ["a", "b"], [], {"a": 1}, None], [[["a", "b"]]]),
    "stop_regex": (["a+", ["a", "b"], None], ["(?<=a*)b"]),
    "temperature": ([0, 0.7, 1, True, 1e38], [NAN, INF, 1e39, 10**400]),
    "top_k": ([-1, 1, 1.5, 2**31 - 1], [2**31, NAN]),
    "min_new_tokens": ([0, 3, 1.5], [2**31]),
    "repetition_penalty": ([1e-20, 0.1, 2], [0, 1e-30]),
    "json_schema": (
        ["{}", "", "{nope", nested(100), FLAT, REFERS % nested(5), {}, None],
        [nested(101), nested(400_000), '{"a":"\\\\","b":' + nested(101), REFERS % nested(20)],
    ),
    "structural_tag": (["{}", "", nested(100), FLAT, None], [nested(101), REFERS % nested(20)]),
    "skip_special_tokens": ([True, False], [None, 1, "yes"]),
    "spaces_between_special_tokens": ([True, False, None, 1, "yes"], [{}, []]),
    "stream_interval": ([1, 50, 0, -1, 1.5, "", None], ["1", [1]]),
    "logit_bias": (
        [{"5": 1.5}, {5: -100}, {"5": -INF}, {" 5": True}, {"5": 1e30}, {"5": -3e38}, {}, None],
        [{"5": NAN}, {"5": INF}, {"5": 1e31}, {"5": -1e39}, {"5": "1"}, [5], [], ""],
    ),
    "sampling_seed": ([0, 2**63 - 1, -(2**63), None], [2**63, 1.5, "1"]),
}
REQUEST = {
    "rid": (["a", None], [f"{HEALTH_CHECK_RID_PREFIX}_of_mine"]),
    "logprob_start_len": ([-1, 0, 5, None], [-2]),
    "top_logprobs_num": ([0, 100, None], [-1, 101, 2**31, [], [1]]),
    "token_ids_logprob": ([[0, 99], [], None], [[100], [-1]]),
    "custom_logit_processor": (["a", [], None], [["a"]]),
    "lora_path": (["a", "", [], None], [["a"], [None]]),
    "bootstrap_host": (
        ["10.0.0.1", "prefill-0.rack_2", "::1", "[fe80::1%eth0]", None],
        [["a"], "", "[::", "10.0.0.1:5", "http://a", "a b", "-a"],
    ),
    "bootstrap_room": ([0, 2**63 - 1, None], [-1, 2**63]),
    "extra_key": (["a", "", None], [["a"], []]),
    "priority": ([-5, 5, -(2**63), None], [2**63]),
}
OF_A_PAIR, OF_KEYS = ("rid", "bootstrap_host", "bootstrap_room"), ("extra_key", "priority")


def request(params: dict | None = None, **options) -> GenerateReqInput:
    obj = GenerateReqInput(**{"input_ids": [1, 2, 3], "sampling_params": params or {}, "rid": "r"})
    for name, value in options.items():
        setattr(obj, name, value)
    return obj


def sampling(stream: bool = True, deterministic: bool = True, **params) -> None:
    """As it comes from the engine's checks."""
    made = SamplingParams(**params)
    made.normalize(None)
    made.verify(VOCAB)
    check_sampling(made, VOCAB, stream=stream, deterministic=deterministic)


def check(obj: GenerateReqInput, pair: bool = True, keyed: bool = True) -> None:
    check_request(obj, VOCAB, pair, keyed=keyed)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options(name):
    good, bad = SAMPLING[name]
    for value in good:
        sampling(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must"):
            sampling(**{name: value})


@pytest.mark.parametrize("name", REQUEST)
def test_request_options(name):
    good, bad = REQUEST[name]
    for value in good:
        check(request(return_logprob=True, **{name: value}))
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must"):
            check(request(return_logprob=True, **{name: value}))


def test_options_that_the_engine_does_not_look_at_may_be_anything():
    for name in (*OF_A_PAIR, *OF_KEYS):
        for value in REQUEST[name][1]:
            check(request(**{name: value}), pair=False, keyed=False)
    for value in REQUEST["logprob_start_len"][1]:
        check(request(logprob_start_len=value))
    for value in (0, 2**31):
        sampling(temperature=0, top_k=value)
    for value in (1.5, 2**64 - 1, "a"):
        sampling(sampling_seed=value, deterministic=False)
    for value in ("1", [1]):
        sampling(stream_interval=value, stream=False)
    # Of KV that is kept under a key it matters, with and without a peer.
    with pytest.raises(ValueError, match="extra_key"):
        check(request(extra_key=["a"]), pair=False)


def test_options_that_do_not_go_together():
    # Of these, a worker without a peer can do what it does without this package.
    for options in (
        {"top_logprobs_num": -1, "return_logprob": True},
        {"session_params": {"id": "a"}},
        {"bootstrap_room": 0, "bootstrap_host": "h"},
    ):
        check(request(**options), pair=False)
        with pytest.raises(ValueError, match=next(iter(options))):
            check(request(**options))
    with pytest.raises(ValueError, match="at most 128"):
        check_request(request(top_logprobs_num=129, return_logprob=True), 1000, True)
    check_request(request(top_logprobs_num=129, return_logprob=True), 1000, False)
    check_request(request(top_logprobs_num=129), 1000, True)
    # One that has not asked for logprobs may be in a batch with one that has.
    with pytest.raises(ValueError, match="at most 100"):
        check(request(top_logprobs_num=VOCAB + 1), pair=False)
    with pytest.raises(ValueError, match="token_ids_logprob"):
        check(request(token_ids_logprob=[VOCAB]), pair=False)
    # A health check's, of which a busy scheduler drops what is called so.
    health = f"{HEALTH_CHECK_RID_PREFIX}_of_mine"
    check(request(rid=health, bootstrap_room=0, bootstrap_host=FAKE_BOOTSTRAP_HOST))


def test_a_stop_token_is_a_token_and_what_the_engine_has_checked_is_checked_again():
    """With ``min_new_tokens`` of one request, the engine makes a tensor of those of its whole batch."""
    values = {5, 6.0, True, 10**9, 2**70, -1, 1.5, "7", None, INF, VOCAB, VOCAB - 1}
    assert stop_tokens(values, VOCAB) == {5, 6, 1, VOCAB - 1}
    assert stop_tokens({10**9}, VOCAB) is None and stop_tokens(None, VOCAB) is None
    made = manager(DisaggregationMode.NULL)
    made.preferred_sampling_params, made.sampling_params_class = {"stop_token_ids": [5, 10**9]}, SamplingParams
    made.tokenizer, made.model_config = None, SimpleNamespace(vocab_size=VOCAB)
    made.server_args.enable_deterministic_inference = False
    made.rid_to_state = {"r": SimpleNamespace(time_stats=SimpleNamespace(set_tokenize_finish_time=int))}
    tokenized = made._create_tokenized_object(request({"min_new_tokens": 2}), "", [1])
    assert tokenized.sampling_params.stop_token_ids == {5}
    with pytest.raises(ValueError, match="top_k must"):
        made._create_tokenized_object(request({"top_k": 2**31}), "", [1])


def test_a_prompt_that_the_scheduler_cannot_take():
    check_prompt([5] * 9, VOCAB, 10)
    check_prompt([0, 99] * 100, VOCAB, None)
    with pytest.raises(ValueError, match="The prompt is empty"):
        check_prompt([], VOCAB, None)
    with pytest.raises(ValueError, match="10 tokens.*fewer than 10"):
        check_prompt([5] * 10, VOCAB, 10)
    for wrong in ([5, 100], [-1], [2**70]):
        with pytest.raises(ValueError, match="input_ids must be"):
            check_prompt(wrong, VOCAB, 10)


# ---- batches ----


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


@pytest.mark.parametrize("options", [{"input_ids": [1]}, {"input_ids": [[1]]}])
def test_samples_by_the_million_are_refused(options):
    """The engine makes all of them at once, and its memory ends."""
    for params in ({"n": 10**9}, [{"n": 2**31}]):
        with pytest.raises(ValueError, match="n must be at most"):
            GenerateReqInput(**options, sampling_params=params).normalize_batch_and_arguments()


# ---- beyond the door ----


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
    monkeypatch.setattr(engine_class(Scheduler), "handle_generate_request", lambda self, req: taken.append(req))
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


def test_a_reference_written_in_numbers_is_one_too():
    hidden = (REFERS % nested(20)).replace("$ref", "\\u0024ref")
    with pytest.raises(ValueError, match="json_schema must have at most 4000 objects and arrays"):
        sampling(json_schema=hidden)


@pytest.mark.parametrize("each", ['{"type":"array","items":', '{"type":"object","additionalProperties":', '{"not":'])
def test_what_may_nest_is_compiled(each):
    """In 0.3 s at most; 1000 levels took 52 s, and of 400,000 both workers died."""
    schema = each * 99 + "{}" + "}" * 99
    sampling(json_schema=schema)
    vocab = xgrammar.TokenizerInfo([chr(i) for i in range(128)], stop_token_ids=[0])
    xgrammar.GrammarCompiler(vocab).compile_json_schema(schema)


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


@pytest.mark.parametrize("low_first", [False, True])
def test_a_prefill_with_priorities_takes_requests_without_one(monkeypatch, low_first):
    """The engine gives them the least where there is no pair, and sorts by it whatever waits."""
    scheduler, added = object.__new__(Scheduler), []
    scheduler.tree_cache, scheduler.disaggregation_mode = None, DisaggregationMode.PREFILL
    scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = True, low_first
    add = lambda self, req, retracted: added.append(req)  # noqa: E731
    monkeypatch.setattr(engine_class(Scheduler), "_add_request_to_queue", add)
    for rid, priority in (("none", None), ("low", -5), ("high", 5)):
        req = Req(rid, "", [1], SamplingParams(), priority=priority)
        req.time_stats.wait_queue_entry_time = 0.0
        scheduler._add_request_to_queue(req)
    SchedulePolicy._sort_by_priority_and_fcfs(added, 1 if low_first else -1)
    assert [req.rid for req in added] == (["low", "high", "none"] if low_first else ["high", "low", "none"])


def test_a_prefill_hears_that_decode_computes_a_prompt_before_it_has_the_request(monkeypatch):
    """With DP attention both come one way each: it waited for decode's question until its time was up.

    Each rank hears of it. Another request of the room, there or later, is none that has been answered.
    """
    scheduler, added = object.__new__(Scheduler), []
    scheduler.tree_cache, scheduler.disaggregation_mode = None, DisaggregationMode.PREFILL
    scheduler.enable_priority_scheduling, scheduler.grammar_manager = False, SimpleNamespace(grammar_queue=[])
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=None)
    scheduler.waiting_queue, scheduler.chunked_req, scheduler.last_batch = [], None, None
    scheduler.enable_overlap, scheduler.disagg_prefill_inflight_queue = False, []
    scheduler.answered = RoomNotes()
    add = lambda self, req, retracted: added.append(req)  # noqa: E731
    monkeypatch.setattr(engine_class(Scheduler), "_add_request_to_queue", add)

    def made(rid: str, room: int) -> Req:
        return Req(rid, "", [1], SamplingParams(), bootstrap_room=room)

    scheduler.handle_computed_request(ComputedReq(7, "one"))
    for rid, room in (("other", 7), ("one", 8), ("one", 7), ("one", 7)):
        scheduler._add_request_to_queue(made(rid, room))
    assert [(req.rid, req.bootstrap_room) for req in added] == [("other", 7), ("one", 8), ("one", 7)]
    # Nor is one of two of a room forgotten for the other.
    for rid in ("third", "fourth"):
        scheduler.handle_computed_request(ComputedReq(7, rid))
    for rid in ("third", "fourth"):
        scheduler._add_request_to_queue(made(rid, 7))
    assert len(added) == 3
    # Of what is here nothing is remembered, wherever it is.
    scheduler.grammar_manager.grammar_queue.append(made("waits", 9))
    scheduler.disagg_prefill_inflight_queue.append(made("is sent", 10))
    scheduler.chunked_req = made("is computed", 11)
    for rid, room in (("waits", 9), ("is sent", 10), ("is computed", 11)):
        scheduler.handle_computed_request(ComputedReq(room, rid))
    assert not scheduler.grammar_manager.grammar_queue and not scheduler.answered


def test_refused_rooms_are_forgotten_in_their_order(monkeypatch):
    monkeypatch.setattr(room_notes, "MOST", 2)
    rooms = refusal.RefusedRooms()
    for room in (1, 2, 3):
        rooms.note(room, "because")
    assert [rooms.reason(room) for room in (1, 2, 3, None)] == [None, "because", "because", None] and len(rooms) == 2
    later = time.monotonic() + refusal.REMEMBERED_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert rooms.reason(3) is None, "who uses it anew means another request"


# ---- the two workers of a pair ----


class _Sent(list):
    def send_pyobj(self, message):
        self.append(message)


def manager(mode: DisaggregationMode) -> TokenizerManager:
    """A tokenizer manager that has not been started."""
    made = object.__new__(TokenizerManager)
    made.disaggregation_mode, made.refused_rooms = mode, refusal.RefusedRooms()
    made.event_loop, made.send_to_scheduler, made.rid_to_state = None, _Sent(), {}
    made.server_args = SimpleNamespace(disaggregation_bootstrap_port=8998, enable_lora=False, dp_size=1)
    return made


@pytest.fixture
def bootstrap_port():
    with bootstrap_server() as port:
        yield port


def test_prefill_hears_what_decode_refuses_and_computes(bootstrap_port, monkeypatch):
    monkeypatch.setattr(peer_calls, "_listeners", {})
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.2)
    prefill, rooms = manager(DisaggregationMode.PREFILL), []
    monkeypatch.setattr(ENGINE, "init_disaggregation", lambda self: None)
    prefill.init_disaggregation()
    prefill.computed.note = rooms.append

    async def hear() -> None:
        # With --skip-server-warmup there is no event loop before the first request.
        obj = request(bootstrap_host=["127.0.0.1"] * 2, bootstrap_port=bootstrap_port, bootstrap_room=[5, 6])
        (told,) = manager(DisaggregationMode.DECODE)._tell_peer(obj, "too long")
        computed = peer_calls.tell(f"127.0.0.1:{bootstrap_port}", peer_calls.COMPUTED_ROUTE, [9])
        await asyncio.sleep(0.1)
        prefill.event_loop = asyncio.get_running_loop()
        await asyncio.gather(asyncio.wrap_future(told), asyncio.wrap_future(computed))

    asyncio.run(asyncio.wait_for(hear(), 60))
    assert prefill.send_to_scheduler == [refusal.RefusedReq(room, "too long", by_decode=True) for room in (5, 6)]
    assert rooms == [9]
    with pytest.raises(ValueError, match="too long"):
        prefill._check_room(6)
    prefill._check_room(7)


@pytest.mark.parametrize("room", [[5], {"a": 1}, "5", 5, None])
def test_a_server_by_itself_takes_anything_for_a_room(monkeypatch, room):
    alone, sent = manager(DisaggregationMode.NULL), []
    monkeypatch.setattr(ENGINE, "_send_one_request", lambda self, one: sent.append(one))
    monkeypatch.setattr(ENGINE, "_send_batch_request", lambda self, ones: sent.extend(ones))
    obj = SimpleNamespace(rid="a", bootstrap_room=room, input_ids=[1])
    alone.rid_to_state["a"] = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
    alone._send_one_request(obj)
    alone._send_batch_request([obj])
    assert sent == [obj, obj] and alone.rid_to_state["a"].sent


def test_a_prefill_that_does_not_say_which_rank_holds_nobody_up(monkeypatch):
    """Without the cache the engine asks as it does, and waits."""
    code = CommonKVReceiver.query_prefill_dp_ranks.__globals__
    monkeypatch.setitem(code, "_rank_answers", code["RankAnswers"]())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addr = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        for _ in range(50):
            assert CommonKVReceiver.query_prefill_dp_ranks(addr, [5]) == {}
        # The engine waits for five seconds, fifty times.
        assert time.monotonic() - began < 5


def test_the_ranks_of_thousands_are_told_and_those_that_nobody_asks_for_are_forgotten(monkeypatch):
    """Of more than 4096 requests at once all that was told was thrown away before it could be used, again and again."""
    questions = []
    monkeypatch.setattr(handshakes, "in_background", lambda work, name: questions.append(work))
    answers = CommonKVReceiver.query_prefill_dp_ranks.__globals__["RankAnswers"]()

    def ask(rooms: range) -> dict[str, int]:
        found = answers.query("a", list(rooms), lambda addr, lacking: {str(room): room % 3 for room in lacking})
        while questions:
            questions.pop()()
        return found

    assert ask(range(10_000)) == {} and ask(range(9_000)) == {str(room): room % 3 for room in range(9_000)}
    # The others have been aborted.
    assert ask(range(9_000, 9_001)) == {} and ask(range(9_000, 9_001)) == {"9000": 0} and not answers._told


@pytest.mark.parametrize(
    ("tp_rank", "attn_tp_rank", "tells"), [(0, 0, True), (1, 1, False), (1, 0, True), (3, 1, False)]
)
def test_of_each_dp_rank_one_scheduler_tells_prefill(monkeypatch, tp_rank, attn_tp_rank, tells):
    """Other DP ranks have not been given the request."""
    told = []
    monkeypatch.setitem(Scheduler._tell_peer.__globals__, "tell_prefill", lambda *what: told.append(what))
    scheduler = object.__new__(Scheduler)
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.tp_rank, scheduler.attn_tp_rank = tp_rank, attn_tp_rank
    scheduler._tell_peer(request(bootstrap_host="h", bootstrap_port=1, bootstrap_room=5), "why")
    assert told == ([("h", 1, [5], "why")] if attn_tp_rank == 0 else [])


def door(mode: DisaggregationMode, **options) -> TokenizerManager:
    """One that has what it looks at requests with."""
    made = manager(mode)
    made.model_config = SimpleNamespace(vocab_size=VOCAB, hidden_size=3)
    made.max_req_input_len, made.mm_processor, made.tokenizer = 9, None, object()
    of_server = {
        "disaggregation_decode_enable_radix_cache": False,
        "allow_auto_truncate": False,
        "disaggregation_transfer_backend": "nixl",
        "keyed": False,
        "enable_deterministic_inference": False,
        "disable_radix_cache": False,
    }
    vars(made.server_args).update(of_server | options)
    return made


def normal(**options) -> GenerateReqInput:
    obj = GenerateReqInput(**{"input_ids": [1, 2, 3], **options})
    obj.normalize_batch_and_arguments()
    return obj


def test_a_worker_of_a_pair_must_be_told_of_the_other():
    """The engine's DP controller ends with a request that has no room, where it chooses ranks by it."""
    for options, missing in (
        ({}, {"prefill": "bootstrap_room", "decode": "bootstrap_room"}),
        ({"bootstrap_room": 5}, {"decode": "bootstrap_host"}),
        ({"bootstrap_room": 5, "bootstrap_host": "h"}, {}),
    ):
        for mode in DisaggregationMode:
            door(mode, disaggregation_transfer_backend="fake")._validate_rid_not_in_flight(normal(**options))
            if mode.value in missing:
                with pytest.raises(ValueError, match=f"{missing[mode.value]} is missing: send"):
                    door(mode)._validate_rid_not_in_flight(normal(**options))
            else:
                door(mode)._validate_rid_not_in_flight(normal(**options))


def test_a_decode_worker_with_a_cache_cuts_no_prompt():
    """Nor would prefill, at the same token: `test_mooncake_wire.py`."""
    room = {"bootstrap_room": 5, "bootstrap_host": "h"}
    for mode, keeps in itertools.product(DisaggregationMode, (False, True)):
        options = {"allow_auto_truncate": True, "disaggregation_decode_enable_radix_cache": keeps}
        made = door(mode, **options)
        if keeps and mode == DisaggregationMode.DECODE:
            with pytest.raises(ValueError, match="has 9 tokens, and this worker takes fewer than 9"):
                made._validate_rid_not_in_flight(normal(input_ids=[1] * 9, **room))
        elif not keeps:
            made._validate_rid_not_in_flight(normal(input_ids=[1] * 9, **room))
        made._validate_rid_not_in_flight(normal(input_ids=[1] * 8, **room))


def test_an_adapter_is_named_and_not_numbered():
    """The engine ends for an id that it has not given. Without adapters, it keeps KV apart by it."""
    alone = DisaggregationMode.NULL
    with pytest.raises(ValueError, match="name the adapter in lora_path"):
        door(alone, enable_lora=True)._validate_rid_not_in_flight(normal(lora_id="x"))
    named = normal(lora_id="x", lora_path="a")
    door(alone, enable_lora=True)._validate_rid_not_in_flight(named)
    assert named.lora_id is None
    door(alone)._validate_rid_not_in_flight(normal(lora_id="x"))


def test_each_prompt_has_one_adapter():
    """What is left over of a list is acquired, and no answer releases it."""
    made, room = door(DisaggregationMode.PREFILL, enable_lora=True), {"bootstrap_room": 5}
    for path, n in (("a", 1), (["a", None], 1), (["a", "b"], 2)):
        made._validate_rid_not_in_flight(normal(input_ids=[[1], [2]], lora_path=path, sampling_params={"n": n}, **room))
    for path, n in ((["a"], 1), (["a", "b", "c"], 1), ([], 1), (["a", "b", "c"], 2)):
        with pytest.raises(ValueError, match="lora_path must have an entry for each of the 2 prompts"):
            made._validate_rid_not_in_flight(
                normal(input_ids=[[1], [2]], lora_path=path, sampling_params={"n": n}, **room)
            )


def test_a_worker_without_a_tokenizer_is_not_asked_for_one():
    for params in ({"stop": "a"}, {"stop": ""}, {"stop_regex": ["a"]}, {"min_new_tokens": 1}):
        for mode in DisaggregationMode:
            made = door(mode, disaggregation_transfer_backend="fake")
            made._validate_rid_not_in_flight(normal(sampling_params=params))
            made.tokenizer = None
            # Prefill makes one token, and looks at no text.
            if mode == DisaggregationMode.PREFILL and "min_new_tokens" not in params:
                made._validate_rid_not_in_flight(normal(sampling_params=params))
                continue
            with pytest.raises(ValueError, match=f"{next(iter(params))} needs a tokenizer"):
                made._validate_rid_not_in_flight(normal(sampling_params=params))
    check_without_tokenizer({"stop": [], "stop_regex": None, "min_new_tokens": 0, "stop_token_ids": [1]}, True)


def test_embeddings_of_a_prompt():
    """The scheduler makes a tensor of those of a whole batch."""
    good, alone = [[0.5, 1.0, -1.0], [1e30, 0.0, 0.0]], DisaggregationMode.NULL
    values = [[[value, 0.5, 0.5]] for value in (NAN, -INF, 1e39)]
    for wrong in ([], [[0.5]], [*good, [0.5]], [[0.5] * 4], *values, 5, ["abc"]):
        with pytest.raises(ValueError, match="input_embeds must be"):
            check_embeds(wrong, 3)
    made = door(alone, disable_radix_cache=True)
    made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=good))
    # From a program that has the engine in itself.
    made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=np.array(good)))
    with pytest.raises(ValueError, match="a list of 3 finite numbers for each token"):
        made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=[good, [[0.5]]]))
    # The engine says that it takes none, and what to do.
    door(alone)._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=[[0.5]]))


def test_what_prefill_refuses_goes_to_its_scheduler():
    prefill = manager(DisaggregationMode.PREFILL)
    prefill._tell_peer(request(bootstrap_host="127.0.0.1", bootstrap_room=5), "why")
    assert prefill.send_to_scheduler == [refusal.RefusedReq(5, "why", by_decode=False)]
    # No room, one that no worker would take, and no pair.
    for room in (None, "5", -1, 0, 2**63):
        prefill._tell_peer(request(bootstrap_room=room), "why")
    alone = manager(DisaggregationMode.NULL)
    alone._tell_peer(request(bootstrap_room=5), "why")
    assert len(prefill.send_to_scheduler) == 1 and alone.send_to_scheduler == []


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("too long"), "too long"),
        (RuntimeError("no image: " + "A" * 9000), "no image: " + "A" * 990),
        (TimeoutError(), "TimeoutError()"),
        (HTTPException(503, "why"), None),
    ],
)
@pytest.mark.parametrize("sent", [False, True])
def test_the_peer_hears_of_whatever_ends_a_request_before_the_scheduler_has_it(monkeypatch, error, said, sent):
    """An image, say, that one of the two workers could not fetch. Of what the scheduler has, the scheduler says it."""
    prefill = manager(DisaggregationMode.PREFILL)
    prefill.own_states = {}
    obj = request(bootstrap_host="127.0.0.1", bootstrap_room=5)
    obj.rid = "a"

    async def generate(self, obj, request):
        state = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
        self.rid_to_state["a"] = self.own_states[id(obj)]["a"] = state
        state.sent = sent
        raise error
        yield

    async def ask() -> None:
        async for _ in prefill.generate_request(obj):
            pass

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    with pytest.raises(type(error)):
        asyncio.run(ask())
    at_fault = isinstance(error, ValueError)
    told = [refusal.RefusedReq(5, said, by_decode=False, at_fault=at_fault)] if said and not sent else []
    assert prefill.send_to_scheduler == told
    assert (not prefill.rid_to_state) == (not sent) and not prefill.own_states


def test_labels_that_the_metrics_do_not_have(monkeypatch):
    """With one of those, the first answer ends the engine's process. What the metrics have may be given."""
    known = {"model_name": "m", "tenant": ""}
    check_labels({}, known), check_labels({"tenant": "\U0001f600", "model_name": "b"}, known)
    # Half of such a pair, which JSON can bring: /metrics could not be read any more.
    with pytest.raises(ValueError, match="surrogates"):
        check_labels({"tenant": "a \ud800"}, known)
    with pytest.raises(ValueError, match="custom_labels has 'a, b'.*--tokenizer-metrics-allowed-custom-labels"):
        check_labels({"b": "1", "tenant": "x", "a": "1"}, known)
    for mode in DisaggregationMode:
        worker = manager(mode)
        worker.enable_metrics, worker.metrics_collector = True, SimpleNamespace(labels=known)
        obj = request(custom_labels={"a": "b"}, bootstrap_host="10.0.0.1", bootstrap_room=5)
        with pytest.raises(ValueError, match="custom_labels"):
            worker._validate_rid_not_in_flight(obj)
        # Nobody reads them.
        worker.enable_metrics = False
        worker.metrics_collector = None
        worker._admission = lambda: SimpleNamespace(check=lambda obj: None)
        worker._validate_rid_not_in_flight(obj)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"routed_dp_rank": 0.5}, "routed_dp_rank has a wrong type"),
        ({"custom_labels": {"a": 5}}, "custom_labels has a wrong type"),
        ({"input_ids": 5}, "input_ids has a wrong type"),
        ({"stream": "perhaps"}, "stream has a wrong type"),
    ],
)
def test_a_request_that_nobody_has_given_types(monkeypatch, options, said):
    """The route for Vertex AI makes it of whatever the client has sent; all others have been checked."""
    worker = manager(DisaggregationMode.PREFILL)
    worker.own_states = {}

    async def generate(self, obj, request):
        yield {"meta_info": {}}

    async def ask(endpoint, **options) -> GenerateReqInput:
        obj = GenerateReqInput(**{"input_ids": [1], **options})
        async for _ in worker.generate_request(obj, SimpleNamespace(scope={"endpoint": endpoint})):
            pass
        return obj

    def vertex_generate() -> None:
        pass

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    with pytest.raises(ValueError, match=said):
        asyncio.run(ask(vertex_generate, **options))
    assert asyncio.run(ask(vertex_generate, routed_dp_rank="1")).routed_dp_rank == 1
    # The engine serves what is null.
    assert asyncio.run(ask(vertex_generate, stream=None, log_metrics=None)).log_metrics is None
    asyncio.run(ask(ask, **options))
    worker.disaggregation_mode = DisaggregationMode.NULL
    with pytest.raises(ValueError, match=said):
        asyncio.run(ask(vertex_generate, **options))
    with pytest.raises(ValueError, match=said):
        check_types(GenerateReqInput(**options))


def test_a_request_that_ends_while_its_state_is_made_leaves_none(monkeypatch):
    worker = manager(DisaggregationMode.DECODE)
    worker.own_states = {}
    obj = request(bootstrap_host="10.0.0.1", bootstrap_room=5)

    def init(self, obj, request=None):
        self.rid_to_state[obj.rid] = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
        raise OverflowError("what the engine cannot compute with")

    async def generate(self, obj, request):
        self._req_stats_init(obj, request)
        yield

    async def ask() -> None:
        async for _ in worker.generate_request(obj):
            pass

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    monkeypatch.setattr(ENGINE, "_req_stats_init", init)
    told = []
    monkeypatch.setattr(refusal, "tell", lambda addr, route, rooms, **said: told.extend(rooms) or Future())
    with pytest.raises(OverflowError):
        asyncio.run(ask())
    assert not worker.rid_to_state and not worker.own_states and told == [5]


def test_prefill_hears_why_a_batch_ends_before_its_other_prompts_are_taken_back(monkeypatch):
    """The other way round, their transfers fail first, and prefill tells its client of an error of its own."""
    decode, told = manager(DisaggregationMode.DECODE), Future()
    decode.own_states, decode.rids_of_samples, decode.enable_metrics = {}, {}, False
    obj = request(bootstrap_host="h", bootstrap_port=1, bootstrap_room=[5, 6])
    monkeypatch.setattr(refusal, "tell", lambda *message, **said: told)

    async def generate(self, obj, request):
        for rid in "ab":
            state = ReqState([], False, asyncio.Event(), obj, SimpleNamespace())
            self.rid_to_state[rid] = self.own_states[id(obj)][rid] = state
            state.sent = rid == "a"
        raise ValueError("the second is too long")
        yield

    async def ask() -> None:
        with pytest.raises(ValueError, match="too long"):
            async for _ in decode.generate_request(obj):
                pass
        await asyncio.sleep(0)
        assert decode.send_to_scheduler == [] and [*decode.rid_to_state] == ["a"]
        told.set_exception(OSError("not told"))
        for _ in range(9):
            await asyncio.sleep(0)
        assert [one.rid for one in decode.send_to_scheduler] == ["a"]

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    asyncio.run(ask())


def test_a_transfer_that_fails_for_a_refusal_is_the_clients_error(monkeypatch):
    prefill, handled = manager(DisaggregationMode.PREFILL), []
    monkeypatch.setattr(ENGINE, "_handle_batch_output", lambda self, out: handled.append(out))
    prefill.rid_to_state = {
        rid: SimpleNamespace(obj=request(bootstrap_room=room)) for rid, room in (("a", 5), ("b", 6))
    }
    ends = [{"type": "abort", "message": "failed", "status_code": 500}, {"type": "abort"}, {"type": "length"}, None]
    out = SimpleNamespace(rids=["a", "b", "a", "gone"], finished_reasons=copy.deepcopy(ends))
    prefill._handle_batch_output(out)
    assert out.finished_reasons == ends
    prefill.refused_rooms.note(5, "too long")
    prefill._handle_batch_output(out)
    assert out.finished_reasons == [{"type": "abort", "message": "too long", "status_code": 400}, *ends[1:]]
    assert handled == [out, out]


def test_a_copy_of_a_request_that_is_served_does_not_end_it():
    """A proxy that asks again: the second is refused for its rid, and their room is the first one's."""
    decode = manager(DisaggregationMode.PREFILL)
    decode.rid_to_state = {"a": SimpleNamespace(obj=request(bootstrap_room=5))}
    decode._tell_peer(request(bootstrap_room=5), "rid is in use", {})
    assert decode.send_to_scheduler == []
    # Its own state does not count.
    decode._tell_peer(request(bootstrap_room=5), "too long", decode.rid_to_state)
    assert len(decode.send_to_scheduler) == 1


def test_a_refused_batch_with_lists_of_other_lengths_tells_whom_it_can():
    prefill = manager(DisaggregationMode.PREFILL)
    prefill._tell_peer(request(bootstrap_host=["a"], bootstrap_room=[5, 6, *range(1000, 3000)]), "why")
    assert len(prefill.send_to_scheduler) == 2002
    manager(DisaggregationMode.DECODE)._tell_peer(request(bootstrap_host=[], bootstrap_room=[5, 6]), "why")


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

    monkeypatch.setattr(ENGINE, "generate_request", generate_request)
    serving = object.__new__(OpenAIServingCompletion)
    serving.template_manager, serving.allowed_custom_labels = SimpleNamespace(completion_template_name=None), None
    made = serving.tokenizer_manager = manager(DisaggregationMode.NULL)
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


@pytest.mark.parametrize("size", ["0", "-16"])
def test_pages_are_pages(tmp_path, size):
    model = make_model(tmp_path / "m")
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu", "--page-size", size])
    with pytest.raises(ValueError, match="--page-size is"):
        args.check_server_args()


def test_the_bound_of_alternatives_is_that_of_the_metadata():
    default = inspect.signature(MetadataBuffers).parameters["max_top_logprobs_num"].default
    assert request_checks.MAX_TOP_LOGPROBS == default
