"""Time stamps of the last requests that have ended, if enabled.

The engine stamps each request and discards the stamps. Here a worker keeps the last ones for `pd-radix trace`. A
scheduler's stamps come with the last output of a request, through the detokenizer.

Upstream: none is known; sgl-project/sglang's tracing sends the same times to an OpenTelemetry collector.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

__all__ = ["API_STAGES", "EndedRequests", "SCHEDULER_STAGES", "VARIABLE", "remembered", "remembers", "stamps"]

VARIABLE = "SGLANG_DISAGGREGATION_ENDED_REQUESTS"
# More records would exceed memory, and deque's limit.
MOST_DIGITS = 9

# The engine's stamps of a scheduler, and their names in a record.
SCHEDULER_STAGES = {
    "scheduler_recv_time": "scheduled",
    "prefill_bootstrap_queue_entry_time": "handshake_begun",
    "decode_prealloc_queue_entry_time": "handshake_begun",
    "bootstrap_done_time": "handshake_done",
    "decode_transfer_queue_entry_time": "admitted",
    # On prefill: decode has asked for its KV. On decode: all KV has arrived.
    "wait_queue_entry_time": "waiting",
    "forward_entry_time": "running",
    # If a prompt takes several steps, the last one.
    "prefill_run_batch_start_time": "launched",
    "prefill_finished_time": "prefilled",
    "prefill_transfer_queue_entry_time": "sending",
    "prefill_kv_transfer_finish_time": "sent",
    "decode_prebuilt_finish_time": "first_token_taken",
    "completion_time": "completed",
}
# Stamps of the tokenizer manager.
API_STAGES = {
    "created_time": "received",
    "tokenize_finish_time": "tokenized",
    "first_token_time": "first_output",
    # The last output of a stream before its end.
    "response_sent_to_client_time": "handed_out",
    "finished_time": "answered",
}


def remembered() -> int:
    """Number of ended requests to keep. Raises ValueError for an invalid number, or a billion and more."""
    given = os.environ.get(VARIABLE, "").strip() or "0"
    if not given.isdecimal() or len(given) > MOST_DIGITS:
        raise ValueError(
            f"{VARIABLE} is {given!r}: give the number of ended requests to keep, 0 for none, with at most "
            f"{MOST_DIGITS} digits."
        )
    return int(given)


@functools.cache
def remembers() -> bool:
    """Whether any are kept. Cached: it is called for each message of each request."""
    return remembered() > 0


def stamps(times: Any, stages: Mapping[str, str], difference: float) -> dict[str, float]:
    """Unix time in seconds of each stage that was reached.

    times: object with the engine's stamps. difference: from their clock to Unix time.
    """
    found = {stage: getattr(times, name, 0.0) for name, stage in stages.items() if getattr(times, name, 0.0) > 0}
    return {stage: round(at + difference, 6) for stage, at in found.items()}


class EndedRequests:
    """Records of the last requests that have ended on a worker."""

    def __init__(self, most: int, role: str) -> None:
        """role: the engine's disaggregation mode; "null" is an aggregated server."""
        self._role = "aggregated" if role == "null" else role
        self._records: deque[dict[str, Any]] = deque(maxlen=most)

    def note(self, rid: str, state: Any, meta: Mapping[str, Any], life: Mapping[str, float], difference: float) -> None:
        """Record a request. state: the tokenizer manager's. meta: the answer's. life: the scheduler's stamps.

        difference: from the clock of ``state`` to Unix time.
        """
        if rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        told = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "cached_tokens_details")
        self._records.append(
            {
                "rid": rid,
                "room": getattr(state.obj, "bootstrap_room", None),
                "role": self._role,
                "retractions": meta.get("total_retractions", 0),
                **{name: meta.get(name) for name in told},
                "times": {**stamps(state.time_stats, API_STAGES, difference), **life},
            }
        )

    def find(self, rid: str | None, room: int | None) -> list[dict[str, Any]]:
        """Records of a rid, including its samples, or of a room; oldest first."""
        return [one for one in self._records if _is(one, rid, room)]

    def last(self, number: int) -> list[dict[str, Any]]:
        """Records of the last ``number`` ended requests, newest first."""
        return list(itertools.islice(reversed(self._records), min(max(number, 0), len(self._records))))


def _is(record: Mapping[str, Any], rid: str | None, room: int | None) -> bool:
    if room is not None:
        return record["room"] == room
    own, _, sample = record["rid"].rpartition("_")
    return rid is not None and (record["rid"] == rid or (own == rid and sample.isdecimal()))
