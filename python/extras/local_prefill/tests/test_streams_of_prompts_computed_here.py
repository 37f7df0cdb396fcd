"""What a client gets of a stream whose prompt decode computes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from http_front import MESSAGES
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import AbortReq
from test_prompts_computed_here import arrive, played


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
