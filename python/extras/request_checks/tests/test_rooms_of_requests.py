"""What a client gets of each route of a decode worker where its request has no room."""

from __future__ import annotations

import http_front
import pytest
from http_front import MESSAGES, PLAIN, ask

client = http_front.client


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
