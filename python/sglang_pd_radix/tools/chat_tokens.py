"""The token ids of a chat that was held as text.

The OpenAI endpoint tells how many tokens a prompt had, and of an answer their texts at most. The model's own tokenizer
and chat template give the ids of a prompt, and the count shows whether they are those that the engine had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .chat_least import Ids
from .chat_load import Message, Reply, Workload


def load(path: str) -> Any:
    """The tokenizer of the model at ``path``. Raises PdRadixError if there is none that can be had without its code."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # noqa: BLE001 - whatever a model's files lead to
        raise PdRadixError(f"its tokenizer cannot be loaded ({_first_line(error)})") from None
    if not getattr(tokenizer, "chat_template", None):
        raise PdRadixError("its tokenizer has no chat template")
    return tokenizer


def ids_of(workload: Workload, turns: Sequence[Sequence[Reply]], tokenizer: Any) -> list[list[Ids]]:
    """The ids of every prompt and answer, by turn and client. Raises PdRadixError for a prompt that had others."""
    found: list[list[Ids]] = []
    for number, replies in enumerate(turns):
        ids = []
        for client, reply in enumerate(replies):
            earlier = [turn[client].text for turn in turns[:number]]
            prompt = prompt_ids(tokenizer, workload.messages(client, earlier))
            if len(prompt) != reply.prompt_tokens:
                raise PdRadixError(
                    f"its tokenizer and chat template make {len(prompt)} tokens of a prompt that had "
                    f"{reply.prompt_tokens} in the engine"
                )
            answer = answer_ids(tokenizer, reply)
            ids.append(Ids(prompt, answer, guessed=answer is not None and reply.answer is None))
        found.append(ids)
    return found


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """As the engine makes them for /v1/chat/completions. Raises PdRadixError if the template refuses."""
    try:
        return tuple(
            tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True, return_dict=False)
        )
    except Exception as error:  # noqa: BLE001 - a template may raise whatever it likes
        raise PdRadixError(f"its chat template refuses the chat ({_first_line(error)})") from None


def answer_ids(tokenizer: Any, reply: Reply) -> tuple[int, ...] | None:
    """The ids of an answer; None where its text, or the text of one of its tokens, may stand for others as well."""
    texts = reply.answer.tokens if reply.answer else None
    ids = tuple(tokenizer.encode(reply.text, add_special_tokens=False))
    if texts is not None and len(texts) != reply.answer_tokens:
        return None
    if len(ids) == reply.answer_tokens and (texts is None or all(map(_is(tokenizer), ids, texts))):
        return ids
    if texts is None:
        return None
    # The text splits otherwise, or special tokens are left out of it. Each token by itself, if only one has its text.
    candidates: dict[str, list[int]] = {text: [] for text in texts}
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if text in candidates:
            candidates[text].append(token)
    if any(len(found) != 1 for found in candidates.values()):
        return None
    return tuple(candidates[text][0] for text in texts)


def _is(tokenizer: Any) -> Any:
    return lambda token, text: tokenizer.decode([token]) == text


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
