"""What a client gets of each route of a decode worker where its request is refused, fails or is aborted."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore
from sglang.srt.entrypoints.openai.utils import process_cached_tokens_details_from_ret
from sglang.srt.managers import samples, tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from test_prompts_computed_here import arrive, played
from test_samples import Manager, body, until

from sglang_pd_radix.tools.cluster import free_ports

MESSAGES = [{"role": "user", "content": "hello"}]
PLAIN = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}


class Worker(Manager):
    """A decode worker's manager, with what the engine's routes ask of it."""

    def __init__(self, flag: bool):
        super().__init__(DisaggregationMode.DECODE, flag)
        self.served_model_name = "m"
        chat = {"apply_chat_template": lambda *args, **kwargs: [1, 2, 3]}
        self.tokenizer = SimpleNamespace(vocab_size=50, eos_token_id=1, **chat)
        self.server_args.multi_item_scoring_delimiter = None
        self.request_logger.log_requests = False

    def create_abort_task(self, obj):
        return None


@pytest.fixture
def client(monkeypatch):
    """Of the engine's HTTP server on a decode worker. Takes whether that has the flag."""
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda message: message)

    def connect(flag: bool) -> TestClient:
        manager = Worker(flag)
        chat, score = map(object.__new__, (OpenAIServingChat, OpenAIServingScore))
        for serving in (chat, score):
            serving.tokenizer_manager = manager
        chat._validate_request = lambda request: None
        asked = GenerateReqInput(input_ids=[1, 2, 3], sampling_params={})
        chat._convert_to_internal_request = lambda request, raw=None: (asked, request)
        monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
        state = http_server.app.state
        state.openai_serving_chat, state.openai_serving_score = chat, score
        return TestClient(http_server.app, raise_server_exceptions=False)

    return connect


def ask(client: TestClient, path: str, request: dict) -> tuple[int, str]:
    with client.stream("POST", path, json=request) as reply:
        return reply.status_code, b"".join(reply.iter_raw()).decode()


ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 11}


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/generate", PLAIN),
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
        ("/v1/score", {"model": "m", "query": [1], "items": [[2]], "label_token_ids": [3]}),
    ],
)
def test_a_request_without_a_room_is_refused_with_the_reason(client, path, request_):
    status, said = ask(client(True), path, request_)
    assert status == 400 and "bootstrap_room is missing" in said


def test_a_stream_of_samples_says_why_prefill_cannot_be_told(client):
    (port,) = free_ports(1)
    asked = {**PLAIN, "sampling_params": {"n": 3}, **ROOM, "bootstrap_port": port}
    assert ask(client(True), "/generate", asked)[0] == 500
    status, said = ask(client(True), "/generate", {**asked, "stream": True})
    error, done, rest = said.split("\n\n")
    assert status == 200 and (done, rest) == ("data: [DONE]", "")
    assert "cannot be told of samples" in json.loads(error.removeprefix("data: "))["error"]["message"]


def test_other_streams_answer_500_where_prefill_cannot_be_told(monkeypatch):
    """Those of OpenAI's endpoints: they begin when the first token is there."""
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda message: message)
    manager = Worker(True)
    chat = object.__new__(OpenAIServingChat)
    chat.tokenizer_manager, chat.reasoning_parser, chat.tool_call_parser = manager, None, None
    manager.server_args.stream_response_default_include_usage = manager.server_args.enable_cache_report = False
    (port,) = free_ports(1)
    chat._validate_request = lambda request: None
    asked = body(prompts=[[1, 2]], stream=True, port=port)
    chat._convert_to_internal_request = lambda request, raw=None: (asked, request)
    request = ChatCompletionRequest(model="m", messages=MESSAGES, stream=True, n=3)
    scope = {"endpoint": http_server.openai_v1_chat_completions}
    reply = asyncio.run(chat.handle_request(request, SimpleNamespace(scope=scope)))
    assert reply.status_code == 500 and b"cannot be told of samples" in reply.body


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_sample_that_fails_does_to_the_others(monkeypatch, stream):
    """One answer to all is that failure. A stream of /generate tells of each sample, and the others go on."""

    async def told(*args):
        pass

    monkeypatch.setattr(samples, "announce", told)
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda message: message)

    async def test():
        decode, got = Manager(DisaggregationMode.DECODE, True), []

        async def read():
            async for out in decode.generate_request(body(prompts=[[1, 2]], stream=stream)):
                got.append(out["meta_info"]["finish_reason"]["type"])

        task = asyncio.ensure_future(read())
        await until(lambda: len(decode.send_to_scheduler.requests) == 3, task)
        first, *others = decode.send_to_scheduler.requests
        decode.answer(first, finish_reason={"type": "abort", "status_code": 500, "message": "lost"})
        if not stream:
            with pytest.raises(Exception, match="lost"):
                await task
            assert decode.send_to_scheduler.aborts == [other.rid for other in others]
            return
        await until(lambda: got, task)
        for other in others:
            decode.answer(other)
        await task
        assert got == ["abort", "length", "length"] and not decode.send_to_scheduler.aborts

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("turn", [8, 9])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_says_that_its_request_was_aborted_before_its_prompt_was_computed_here(kind, turn):
    """While a slice of it is in flight, and between two."""

    def abort(loop) -> None:
        (one,) = loop.transfer.local.waiting
        assert 20 < one.done < 31, "it has been computed in part"
        loop.scheduler.abort_request(AbortReq(rid="r2"))

    prompt = [1] * 8 + [2] * 12
    loop = played({1: arrive(prompt, max_new=30), 6: arrive(prompt + [3] * 11, max_new=2), turn: abort})
    (ended,) = [req for req in loop.told if req.rid == "r2"]
    meta = {"id": "r", "finish_reason": ended.finished_reason.to_json(), "prompt_tokens": 20, "completion_tokens": 0}

    async def answers(obj, raw=None):
        yield {"text": "", "output_ids": [], "meta_info": meta}

    serving = object.__new__({"chat": OpenAIServingChat, "completions": OpenAIServingCompletion}[kind])
    args = SimpleNamespace(stream_response_default_include_usage=False, enable_cache_report=False)
    serving.tokenizer_manager = SimpleNamespace(generate_request=answers, server_args=args)
    serving.reasoning_parser = serving.tool_call_parser = None

    async def read() -> list[str]:
        if kind == "chat":
            request = ChatCompletionRequest(model="m", messages=MESSAGES, stream=True)
            return [chunk async for chunk in serving._generate_chat_stream(None, request, None)]
        request = CompletionRequest(model="m", prompt="x", stream=True)
        return [chunk async for chunk in serving._generate_completion_stream(None, request, None)]

    error, done = asyncio.run(read())
    said = json.loads(error.removeprefix("data: "))["error"]
    assert said["code"] == 500 and said["message"] == "Aborted" and done == "data: [DONE]\n\n"


def test_openais_endpoints_hand_on_what_prefill_held_alone():
    """As docs/reference.md says of ``sglext.cached_tokens_details``."""
    details = {"device": 0, "host": 0, "decode_prefix": 960, "transferred": 40}
    asked = SimpleNamespace(return_cached_tokens_details=True)
    said = process_cached_tokens_details_from_ret({"meta_info": {"cached_tokens_details": details}}, asked)
    assert said.model_dump() == {"device": 0, "host": 0}
