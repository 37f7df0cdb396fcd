"""Traces in Mooncake's published format, and a synthetic one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

# Tokens per entry of ``hash_ids``.
TRACE_BLOCK = 512


def read_trace(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """The first ``most`` records (None: all) of a Mooncake-format trace, in order of time.

    Raises PdRadixError naming the line.

    A record: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids`` (one per 512 tokens).
    """
    records: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(records) == most:
                    break
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    lengths = [record[name] for name in ("timestamp", "input_length", "output_length")]
                    good = all(isinstance(v, (int, float)) and v >= 0 for v in lengths) and bool(record["hash_ids"])
                except (ValueError, KeyError, TypeError):
                    good = False
                if not good:
                    raise PdRadixError(
                        f"{path}, line {number}: not a record with timestamp, input_length, output_length and hash_ids"
                    )
                records.append(record)
    except (OSError, UnicodeDecodeError) as error:
        raise PdRadixError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    return sorted(records, key=lambda record: record["timestamp"])


def made_trace(count: int) -> list[dict[str, Any]]:
    """``count`` synthetic records for `read_trace`: conversations under a few system prompts, 10 per second.

    Used without a trace. Its shape is that of a chat service (one block shared by all, histories that grow by a few
    blocks per turn, answers of some hundred tokens); its numbers are invented.
    """
    pick = random.Random("made trace")
    fresh = iter(range(1, 10**9))
    open_chats: list[list[int]] = []
    records: list[dict[str, Any]] = []
    for i in range(count):
        if open_chats and pick.random() < 0.6:
            chat = open_chats.pop(pick.randrange(len(open_chats)))
        else:
            chat = [0, *(next(fresh) for _ in range(pick.randint(4, 16)))]
        chat = chat + [next(fresh) for _ in range(pick.randint(1, 3))]
        length = TRACE_BLOCK * (len(chat) - 1) + pick.randint(1, TRACE_BLOCK)
        records.append(
            {
                "timestamp": 100 * i,
                "input_length": length,
                "output_length": pick.randint(128, 640),
                "hash_ids": list(chat),
            }
        )
        # The last block may be partial: a continuation has another block there.
        open_chats.append(chat[:-1])
    return records


def turns_of(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Lengths of each request of a trace that continues an earlier one: added tokens, and answer.

    A request continues another if its prompt has all full blocks of that, and more tokens than prompt and answer of
    that, but at most twice as many: others only share a system prompt.
    """
    ends: dict[tuple[int, ...], int] = {}
    found = []
    for record in records:
        ids, length, answer = tuple(record["hash_ids"]), record["input_length"], record["output_length"]
        before = next((ends[ids[:n]] for n in range(len(ids), 0, -1) if ids[:n] in ends), length)
        if before < length <= 2 * before and answer:
            found.append((length - before, answer))
        ends[ids[: length // TRACE_BLOCK]] = length + answer
    return found
