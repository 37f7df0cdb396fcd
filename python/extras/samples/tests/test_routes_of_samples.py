"""What a client gets of a request with samples that is refused, or of which one fails."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import http_front
import pytest
import test_refusals
from http_front import MESSAGES, PLAIN, ROOM, Worker, ask
from samples_front import Manager, looped
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers import samples, tokenizer_manager
from tokenizer_front import body, until

from sglang_pd_radix.tools.cluster import free_ports

client, several_tokenizers = http_front.client, test_refusals.several_tokenizers


def test_a_stream_of_samples_says_why_prefill_cannot_be_told(client):
    (port,) = free_ports(1)
    asked = {**PLAIN, "sampling_params": {"n": 3}, **ROOM, "bootstrap_port": port}
    assert ask(client(True), "/generate", asked)[0] == 500
    status, said = ask(client(True), "/generate", {**asked, "stream": True})
    error, done, rest = said.split("\n\n")
    assert status == 200 and (done, rest) == ("data: [DONE]", "")
    assert "cannot be notified of samples" in json.loads(error.removeprefix("data: "))["error"]["message"]


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
    assert reply.status_code == 500 and b"cannot be notified of samples" in reply.body


@pytest.mark.parametrize("stream", [False, True])
@looped
async def test_what_a_sample_that_fails_does_to_the_others(monkeypatch, stream):
    """One answer to all is that failure. A stream of /generate tells of each sample, and the others go on."""

    async def told(*args):
        pass

    monkeypatch.setattr(samples, "announce", told)
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda message: message)

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


def test_several_tokenizers_give_samples_no_rooms(several_tokenizers):
    status, said = peer_calls.ask(several_tokenizers[0], samples.SAMPLE_ROUTE, [5], derivation=1).result(20)
    assert status == 400 and "--tokenizer-worker-num" in said
