"""Injects KV faults into a decode worker, one at a time, for ``pd-radix verify --self-test``.

Active only with `worker/sitecustomize.py` on the worker's path and `ALLOWED` in its environment, which only the
self-test sets. The fault is described by a file beside the worker's records, `ORDER`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .kv_record import DIRECTORY, SCHEDULER, at, buffers_of, bytes_of, rows_of, when_made

ALLOWED = "SGLANG_PD_RADIX_SELF_TEST_FAULTS"
ORDER, DONE = "fault.json", "fault-done"

# Faults of one request's KV once all of it has arrived, on every rank unless stated otherwise.
KINDS = {
    "one page": "another prompt's, in all layers",
    "one token": "another prompt's, in all layers",
    "one layer": "another prompt's page, in one layer",
    "one token in one layer": "another prompt's",
    "one rank": "another prompt's page, on the last TP rank only",
    "a stale page": "what was in the page before, as if its transfer had been lost",
    "two pages exchanged": "both of the same prompt",
    "a page in the cache": "another prompt's, after the answer, as a late writer leaves it",
    "a page for a while": "another prompt's while the answer is made, and right at its end",
}


@dataclass(frozen=True)
class Order:
    """Corrupt page ``page`` (from 0) of the delta of the first request with this prompt."""

    kind: str
    prompt: list[int]
    page: int

    def give(self, directory: Path) -> None:
        """Write it for the worker with this directory."""
        for path in directory.glob(f"{DONE}*"):
            path.unlink()
        partial = directory / f"{ORDER}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(directory / ORDER)


def withdraw(directory: Path) -> None:
    """Remove the order."""
    (directory / ORDER).unlink(missing_ok=True)


def done(directory: Path) -> bool:
    """Whether the last order was carried out, on at least one rank."""
    return any(directory.glob(f"{DONE}*"))


# ------------------------------------------------------------------------------------------------------- in the worker


def install() -> None:
    """Carry out orders in this process's scheduler, once it is imported and has its pools."""
    import wrapt

    wrapt.register_post_import_hook(_patch, SCHEDULER)


def _patch(module: Any) -> None:
    from sglang.srt.disaggregation import decode
    from sglang.srt.disaggregation.decode_radix import delta_request

    when_made(module.Scheduler, _watch)
    request, commit = delta_request.PrefillDeltas.request, decode.DecodeTransferQueue._commit_transfer_to_req

    def request_delta(deltas: Any, decode_req: Any) -> None:
        _of_this_process[-1].asked(decode_req.req)
        request(deltas, decode_req)

    def commit_transfer(queue: Any, decode_req: Any) -> bool:
        req = decode_req.req
        arrived = commit(queue, decode_req)
        if arrived:
            _of_this_process[-1].arrived(req)
        return arrived

    delta_request.PrefillDeltas.request = request_delta
    decode.DecodeTransferQueue._commit_transfer_to_req = commit_transfer


# One scheduler per process.
_of_this_process: list[Faults] = []


def _watch(scheduler: Any) -> None:
    faults = Faults(Path(os.environ[DIRECTORY]), scheduler)
    _of_this_process.append(faults)
    finish = scheduler.tree_cache.cache_finished_req

    def finish_and_spoil(req: Any, *args: Any, **kwargs: Any) -> Any:
        faults.ends(req)
        found = finish(req, *args, **kwargs)
        faults.ended()
        return found

    # Outside of the recorder's wrapper: what is repaired at the end is recorded as repaired.
    scheduler.tree_cache.cache_finished_req = finish_and_spoil


class Faults:
    """Carries out orders on one rank."""

    def __init__(self, directory: Path, scheduler: Any) -> None:
        self._directory = directory
        self._scheduler = scheduler
        kinds = buffers_of(scheduler.token_to_kv_pool_allocator.get_kvcache())
        self._layers = len(kinds[0]) if kinds else 0
        self._buffers = [buffer for buffers in kinds for buffer in buffers]
        self._page = scheduler.token_to_kv_pool_allocator.page_size
        # KV of another prompt's page; earlier content of an ordered request's pages; and pending work.
        self._other: list[Any] | None = None
        self._before: list[Any] | None = None
        self._at_end: tuple[str, Any, list[Any]] | None = None
        self._late: tuple[Any, list[Any]] | None = None
        self._carried_out: str | None = None

    def asked(self, req: Any) -> None:
        """Called before any KV of the request is sent."""
        order = self._order_for(req)
        if order is not None and order.kind == "a stale page":
            self._before = self._read(self._slots(req, order.page))

    def arrived(self, req: Any) -> None:
        """Called when all KV has arrived, before it is read or enters the tree."""
        order = self._order_for(req)
        if order is None:
            if len(req.origin_input_ids) - self._prefix(req) >= self._page:
                self._other = self._read(self._slots(req, 0))
            return
        slots = self._slots(req, order.page)
        if order.kind == "two pages exchanged":
            others = self._slots(req, order.page + 1)
            first, second = self._read(slots), self._read(others)
            self._write(slots, second)
            self._write(others, first)
        elif order.kind == "a stale page":
            self._write(slots, self._before)
        elif order.kind == "a page in the cache":
            self._at_end = ("spoil", slots, self._other or [])
            return
        elif order.kind == "a page for a while":
            self._at_end = ("restore", slots, self._read(slots))
            self._write(slots, self._other)
        elif order.kind == "one rank" and self._scheduler.attn_tp_rank != self._scheduler.attn_tp_size - 1:
            self._carried_out = self._key()
            return
        else:
            tokens = slice(0, 1) if order.kind.startswith("one token") else slice(None)
            one_layer = self._layers // 2 if order.kind.endswith("one layer") else None
            self._write(slots[tokens], [rows[tokens] for rows in self._other or []], one_layer)
        self._tell()

    def ends(self, req: Any) -> None:
        """Called before the request's KV enters the tree."""
        if self._at_end is None or not self._is_ordered(req):
            return
        what, slots, rows = self._at_end
        self._at_end = None
        if what == "restore":
            self._write(slots, rows)
        else:
            self._late = (slots, rows)

    def ended(self) -> None:
        """Called after that."""
        if self._late is not None:
            self._write(*self._late)
            self._late = None
            self._tell()

    # ---- the order ----

    def _key(self) -> str:
        try:
            return (self._directory / ORDER).read_text()
        except OSError:
            return ""

    def _order_for(self, req: Any) -> Order | None:
        text = self._key()
        if not text or text == self._carried_out:
            return None
        order = Order(**json.loads(text))
        matches = list(req.origin_input_ids) == order.prompt and self._at_end is None
        return order if matches and self._buffers and self._other else None

    def _is_ordered(self, req: Any) -> bool:
        return list(req.origin_input_ids) == json.loads(self._key() or '{"prompt": []}')["prompt"]

    def _tell(self) -> None:
        self._carried_out = self._key()
        (self._directory / f"{DONE}-{os.getpid()}").touch()

    # ---- the pool ----

    @staticmethod
    def _prefix(req: Any) -> int:
        return getattr(req, "decode_prefix_len", 0) or 0

    def _slots(self, req: Any, page: int) -> Any:
        start = self._prefix(req) + page * self._page
        row = self._scheduler.req_to_token_pool.req_to_token[req.req_pool_idx]
        return row[start : start + self._page].long()

    def _read(self, slots: Any) -> list[Any]:
        return [rows_of(buffer, slots) for buffer in self._buffers]

    def _write(self, slots: Any, rows: list[Any] | None, layer: int | None = None) -> None:
        """Write to all layers, or to one."""
        for i, (buffer, values) in enumerate(zip(self._buffers, rows or [], strict=True)):
            if layer is None or i % self._layers == layer:
                bytes_of(buffer)[at(buffer, slots)] = bytes_of(values)
