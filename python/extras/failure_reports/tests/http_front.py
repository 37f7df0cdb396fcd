"""The engine's HTTP server on a decode worker's tokenizer manager, without a scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from tokenizer_front import Manager

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
