"""The chats of `pd-radix demo`, and what a request that fails says."""

from __future__ import annotations

from typing import Any

import pytest
from chat_deployment import SMALL, Deployment

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.chat_load import ChatError, Chats, Workload, common_words, stream_chat


def test_texts_depend_on_seed_client_and_turn_only() -> None:
    small, large = Workload(clients=1, document=10, question=3), Workload(clients=9, turns=8, document=10, question=3)
    assert small.user_text(0, 1) == large.user_text(0, 1)
    assert len(small.user_text(0, 0).split()) == 10 and len(small.user_text(0, 1).split()) == 3
    texts = {large.user_text(client, turn) for client in range(-1, 9) for turn in range(8)}
    assert len(texts) == 80
    assert Workload(seed=1, document=10).user_text(0, 0) != small.user_text(0, 0)
    # Pinned: figures in the documentation are those of this text.
    assert small.user_text(0, 1) == Workload().user_text(0, 1)[: len(small.user_text(0, 1))]


def test_words_are_plain() -> None:
    assert len(set(common_words())) == 256
    assert all(word.isalpha() and word.islower() for word in common_words())


@pytest.mark.parametrize("size", ["clients", "turns", "document", "question", "answer"])
def test_impossible_sizes_are_refused_by_name(size: str) -> None:
    with pytest.raises(PdRadixError, match=f"--{size} 0: must be at least"):
        Workload(**{size: 0}).check()


def test_the_history_is_that_of_the_answers_so_far() -> None:
    workload = Workload(clients=2, document=3, question=2)
    asked, answered, more = workload.messages(1, ["well"])
    assert (asked["role"], answered, more["role"]) == ("user", {"role": "assistant", "content": "well"}, "user")
    assert (asked["content"], more["content"]) == (workload.user_text(1, 0), workload.user_text(1, 1))


def test_each_turn_carries_the_whole_history() -> None:
    with Deployment(cached=False) as deployment:
        chats = Chats(deployment.router_url, "model", SMALL)
        sizes = [[reply.prompt_tokens for reply in chats.turn()] for _ in range(3)]
    # Document, then answer and question with two tokens each around them; one token opens the answer.
    assert sizes == [[23] * 3, [23 + 5 + 8] * 3, [23 + 5 + 8 + 13] * 3]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"status": 503}, "HTTP 503: no worker is there"),
        ({"breaks": True}, "broke off with an error: .*KV transfer failed"),
        ({"short": 1}, "made 3 tokens of 4"),
        ({"silent": True}, "made 4 tokens without any text"),
    ],
)
def test_a_request_that_fails_says_why(faults: dict[str, Any], message: str) -> None:
    with Deployment(cached=False, **faults) as deployment:
        with pytest.raises(ChatError, match=message):
            stream_chat(deployment.router_url, "model", [{"role": "user", "content": "hello"}], 4)
        with pytest.raises(ChatError, match="client 1, turn 1"):
            Chats(deployment.router_url, "model", SMALL).turn()


def test_nobody_there() -> None:
    with Deployment(cached=False) as deployment:
        url = deployment.router_url
    with pytest.raises(ChatError, match="did not answer"):
        stream_chat(url, "model", [], 4)
