"""``pd-radix trace``: a request's stages and times, from its workers' records."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

from sglang_pd_radix.errors import PdRadixError

from .arguments import add_workers
from .cluster.local_http import http, status_text
from .operate.reading import TIMEOUT_S, addresses
from .operate.texts import printable

VARIABLE = "SGLANG_DISAGGREGATION_ENDED_REQUESTS"
# Instead of a status: 200 with an answer that is not a worker's.
OTHER = -1

#: Descriptions of stages by the worker's role; "" for both.
STAGES = {
    "received": {"": "its HTTP server has it"},
    "tokenized": {"": "its prompt is tokenized"},
    "scheduled": {"": "its scheduler has it"},
    "handshake_begun": {"": "it waits for the handshake"},
    "handshake_done": {"": "the handshake is done"},
    "admitted": {"decode": "it is matched and admitted, and what is missing is asked for"},
    "waiting": {
        "": "it waits for its turn",
        "decode": "all of its KV has arrived",
        "prefill": "decode has asked for its KV: it waits for its turn",
    },
    "running": {"": "its prompt is being computed", "decode": "it is in a batch"},
    "launched": {"": "the step that computes (the last of) its prompt is launched"},
    "prefilled": {"": "its prompt is computed"},
    "sending": {"": "the last of its KV is being sent"},
    "sent": {"": "all of its KV has been sent"},
    "first_token_taken": {"": "prefill's token is taken"},
    "first_output": {"": "the first token goes to the client"},
    "handed_out": {"": "its HTTP server sends that"},
    "completed": {"": "its scheduler has ended it"},
    "answered": {"": "the answer goes to the client"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix trace``."""
    parser.description = (
        f"Print the times of the stages of an ended request. Its workers must remember it: set {VARIABLE} to the "
        "number of requests that each is to remember. Times of different hosts are by their own clocks."
    )
    parser.add_argument("rid", metavar="RID", help="the request's id, as in meta_info.id of its answer")
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print the workers' records as they are")


def run(args: argparse.Namespace) -> int:
    """Print it. Returns the exit code."""
    urls = addresses(args.worker, args.gateway, args.deployment)
    records = find(urls, args.rid)
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        print("\n".join(as_text(records)))
    return 0


def find(urls: Sequence[str], rid: str) -> list[dict[str, Any]]:
    """The workers' records of a request, each with its ``worker``. Raises PdRadixError if there are none.

    The two workers of a pair share a room. Without a rid from the client each has its own.
    """
    known, silent = ask(urls, {"rid": rid})
    rooms = {record["room"] for record in known if record["room"]}
    for room in sorted(rooms):
        more, unheard = ask(urls, {"room": room})
        known += [record for record in more if record not in known]
        silent |= unheard
    said = _listed(silent)
    if not known:
        raise PdRadixError(
            f"no worker remembers {rid}: it still runs, or others have ended since, or it went to another worker"
            + (f" ({said})" if said else "")
        )
    if said:
        print(f"pd-radix: not all could be asked ({said})", file=sys.stderr)
    return sorted(known, key=lambda record: min(record["times"].values(), default=0.0))


def ask(urls: Sequence[str], question: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The records, and by URL why workers have none. Raises PdRadixError if all fail."""

    def ask_one(url: str) -> tuple[int, list[dict[str, Any]]]:
        status, content = http(f"{url}/ended_requests?{urlencode(question)}", timeout=TIMEOUT_S)
        try:
            found = json.loads(content)["requests"] if status == 200 else []
            worker = {"worker": url.partition("//")[2]}
            records = [record | worker for record in found if _is_record(record)]
            return status if len(records) == len(found) else OTHER, records
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return OTHER, []

    with ThreadPoolExecutor(len(urls)) as pool:
        answers = list(pool.map(ask_one, urls))
    silent = {url: _why(status) for url, (status, _) in zip(urls, answers, strict=True) if status != 200}
    records = [record for _, found in answers for record in found]
    if len(silent) == len(urls) and not records:
        raise PdRadixError(f"no worker remembers requests ({_listed(silent)})")
    return records, silent


def _listed(silent: dict[str, str]) -> str:
    return ", ".join(f"{url}: {why}" for url, why in silent.items())


def _is_record(record: Any) -> bool:
    """Whether it has the needed fields; another version's may not."""
    return (
        isinstance(record, dict)
        and record.keys() >= {"prompt_tokens", "completion_tokens", "retractions"}
        and all(isinstance(record.get(key), str) for key in ("rid", "role"))
        and isinstance(record.get("room", ""), (int, type(None)))
        and isinstance(record.get("times"), dict)
        and all(isinstance(at, (int, float)) and 0 <= at < 1e11 for at in record["times"].values())
        and all(
            isinstance(record.get(key, ""), (dict, type(None))) for key in ("cached_tokens_details", "finish_reason")
        )
    )


def _why(status: int) -> str:
    words = {0: "does not answer", 404: f"{VARIABLE} is not set there", OTHER: "something else answers there"}
    return words.get(status, status_text(status))


def as_text(records: Iterable[dict[str, Any]]) -> list[str]:
    """The lines: a summary of each record, then all stages by time."""
    lines, events = [], []
    for record in records:
        lines.append(_summary(record))
        for stage, at in record["times"].items():
            words = STAGES.get(stage, {"": stage})
            events.append((at, record, words.get(record["role"], words.get("", stage))))
    if not events:
        return lines
    events.sort(key=lambda event: event[0])
    began = last = events[0][0]
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began))
    lines += ["", f"from {day}.{int(began % 1 * 1000):03d} UTC", f"{'ms':>10} {'after':>9}  worker"]
    for at, record, words in events:
        who = f"{printable(record['role']):7} {record['worker']}"
        lines.append(f"{(at - began) * 1e3:10.1f} {(at - last) * 1e3:+9.1f}  {who}: {printable(words)}")
        last = at
    return lines


def _summary(record: dict[str, Any]) -> str:
    finish = record["finish_reason"] or {}
    parts = [f"{record['prompt_tokens']} prompt tokens", f"{record['completion_tokens']} of output"]
    details = record["cached_tokens_details"] or {}
    if details.get("decode_prefix") is not None:
        parts.append(f"decode held {details['decode_prefix']}")
        parts.append(f"{details.get('transferred', 0)} transferred")
    if record["retractions"]:
        parts.append(f"retracted {record['retractions']} times")
    ended = finish.get("type", "?") + (f" ({finish['message']})" if finish.get("message") else "")
    where = f"{record['rid']} on {record['role']} {record['worker']}, room {record['room']}"
    return printable(f"{where}: {', '.join(parts)}; {ended}")
