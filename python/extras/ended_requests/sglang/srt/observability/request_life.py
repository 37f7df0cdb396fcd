"""When what happened to a request: the time stamps of the last requests that have ended here, if they are asked for.

The engine stamps each request and forgets it. Here a worker remembers a number of them, for `pd-radix trace`. The
stamps of a scheduler come with the last output of a request, through the detokenizer.

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
# More would fit no memory, and not what counts them.
MOST_DIGITS = 9

# The engine's stamps of a scheduler, and what has happened by then, in the words of a record.
SCHEDULER_STAGES = {
    "scheduler_recv_time": "scheduled",
    "prefill_bootstrap_queue_entry_time": "handshake_begun",
    "decode_prealloc_queue_entry_time": "handshake_begun",
    "bootstrap_done_time": "handshake_done",
    "decode_transfer_queue_entry_time": "admitted",
    # On prefill when decode has asked for its KV, on decode when all of that has arrived.
    "wait_queue_entry_time": "waiting",
    "forward_entry_time": "running",
    # Of a prompt that is computed in several steps, the last one.
    "prefill_run_batch_start_time": "launched",
    "prefill_finished_time": "prefilled",
    "prefill_transfer_queue_entry_time": "sending",
    "prefill_kv_transfer_finish_time": "sent",
    "decode_prebuilt_finish_time": "first_token_taken",
    "completion_time": "completed",
}
# Those of the process that answers clients.
API_STAGES = {
    "created_time": "received",
    "tokenize_finish_time": "tokenized",
    "first_token_time": "first_output",
    # Of a stream, where that was not its end.
    "response_sent_to_client_time": "handed_out",
    "finished_time": "answered",
}


def remembered() -> int:
    """How many ended requests a worker remembers. Raises ValueError for what is no number, or is a billion or more."""
    given = os.environ.get(VARIABLE, "").strip() or "0"
    if not given.isdecimal() or len(given) > MOST_DIGITS:
        raise ValueError(
            f"{VARIABLE} is {given!r}: give the number of ended requests to remember, 0 for none, of at most "
            f"{MOST_DIGITS} digits."
        )
    return int(given)


@functools.cache
def remembers() -> bool:
    """Whether it remembers any, as it was when first asked: for each message of each request, which takes a while."""
    return remembered() > 0


def stamps(times: Any, stages: Mapping[str, str], difference: float) -> dict[str, float]:
    """When each stage was reached, Unix time in seconds; without those that were not.

    times: with the engine's stamps. difference: from their clock to Unix time.
    """
    found = {stage: getattr(times, name, 0.0) for name, stage in stages.items() if getattr(times, name, 0.0) > 0}
    return {stage: round(at + difference, 6) for stage, at in found.items()}


class EndedRequests:
    """The last requests that have ended on a worker."""

    def __init__(self, most: int, role: str) -> None:
        """role: the engine's disaggregation mode; "null" is an ordinary server."""
        self._role = "aggregated" if role == "null" else role
        self._records: deque[dict[str, Any]] = deque(maxlen=most)

    def note(self, rid: str, state: Any, meta: Mapping[str, Any], life: Mapping[str, float], difference: float) -> None:
        """Remember a request. state: of the tokenizer manager. meta: what its client was told. life: of its scheduler.

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
        """The records of a rid, which names the samples of its request too, or of a room; the last one last."""
        return [one for one in self._records if _is(one, rid, room)]

    def last(self, number: int) -> list[dict[str, Any]]:
        """The records of the last ``number`` requests that have ended, the last one first."""
        return list(itertools.islice(reversed(self._records), min(max(number, 0), len(self._records))))


def _is(record: Mapping[str, Any], rid: str | None, room: int | None) -> bool:
    if room is not None:
        return record["room"] == room
    own, _, sample = record["rid"].rpartition("_")
    return rid is not None and (record["rid"] == rid or (own == rid and sample.isdecimal()))
