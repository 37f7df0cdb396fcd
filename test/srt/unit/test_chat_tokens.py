"""The ids of a chat that was held as text, with the tokenizer of `pd-radix make-model` and with small ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from chat_deployment import SMALL, Deployment, Words

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import chat_tokens
from sglang_pd_radix.tools.chat_least import Ids
from sglang_pd_radix.tools.chat_load import Chats, Reply
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.rounding import Answer


def _reply(text: str, count: int, tokens: tuple[str, ...] | None = None) -> Reply:
    answer = Answer(tokens, (0.0,) * len(tokens)) if tokens is not None else None
    return Reply(text, 1, count, 0.1, 0.2, answer)


def test_ids_are_those_that_the_deployment_had() -> None:
    with Deployment(cached=False) as deployment:
        chats = Chats(deployment.router_url, "model", SMALL)
        turns = [chats.turn() for _ in range(2)]
        first, second = chat_tokens.ids_of(SMALL, turns, deployment.words)
        assert deployment.words.decode(first[1].answer) == turns[0][1].text
        assert second[1].prompt[: len(first[1].prompt) + 4] == first[1].prompt + first[1].answer
        turns[1][2] = dataclasses.replace(turns[1][2], prompt_tokens=99)
        with pytest.raises(PdRadixError, match="make 36 tokens of a prompt that had 99 in the engine"):
            chat_tokens.ids_of(SMALL, turns, deployment.words)


def test_the_made_models_tokenizer(tmp_path: Path) -> None:
    tokenizer = chat_tokens.load(str(make_model(tmp_path / "model")))
    text = SMALL.user_text(0, 0)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    assert len(ids) == SMALL.document and tokenizer.decode(ids) == text
    prompt = chat_tokens.prompt_ids(tokenizer, SMALL.messages(0, []))
    assert tokenizer.decode(prompt).count(text) == 1 and len(prompt) - len(ids) < 10
    # As the demo's answers come back in the next prompt.
    answer = chat_tokens.answer_ids(tokenizer, _reply(" " + text, SMALL.document))
    later = chat_tokens.prompt_ids(tokenizer, SMALL.messages(0, [" " + text]))
    assert answer and later[: len(prompt) + len(ids)] == prompt + answer


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (_reply(" a b", 2), (0, 1)),
        (_reply(" a b", 2, (" a", " b")), (0, 1)),
        # The engine's tokens are others than the text's: each has one text of its own.
        (_reply(" c", 2, (" a", " b")), (0, 1)),
        (_reply(" a b", 3), None),
        (_reply(" a b", 2, (" a",)), None),
        (_reply(" a b", 3, (" a", " b", " nobody's")), None),
    ],
)
def test_ids_of_answers(reply: Reply, expected: tuple[int, ...] | None) -> None:
    words = Words()
    words.encode("a b c")
    assert chat_tokens.answer_ids(words, reply) == expected


def test_a_text_that_two_tokens_have_tells_neither() -> None:
    words = Words()
    words.encode("a b")
    words._words.append("a")
    assert chat_tokens.answer_ids(words, _reply(" c", 2, (" a", " b"))) is None


def test_what_has_no_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(PdRadixError, match="its tokenizer cannot be loaded"):
        chat_tokens.load(str(tmp_path))


def test_a_template_that_refuses_is_named() -> None:
    class Refuses(Words):
        def apply_chat_template(self, messages, **_):
            raise ValueError("roles must alternate\nand more")

    with pytest.raises(PdRadixError, match=r"its chat template refuses the chat \(roles must alternate\)"):
        chat_tokens.prompt_ids(Refuses(), SMALL.messages(0, []))


def test_unknown_answers_have_no_ids() -> None:
    with Deployment(cached=False) as deployment:
        turns = [Chats(deployment.router_url, "model", SMALL).turn()]
        turns[0][0] = dataclasses.replace(turns[0][0], text="one word")
        ((first, second, _),) = chat_tokens.ids_of(SMALL, turns, deployment.words)
        assert first == Ids(first.prompt, None) and second.answer is not None and second.guessed
