"""Requests by state, pools and audit results of a worker: figures and Prometheus gauges.

Upstream: none is known.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

logger = logging.getLogger(__name__)

__all__ = ["DECODE_STATES", "PREFILL_STATES", "InHand", "WorkerGauges", "counts", "in_hand", "oldest"]

# Decode: before admission (waiting: for memory or its turn; held_back: for another's transfer), in transfer or computed
# here, received and not yet in a batch, in the batch, retracted; and failed requests to which prefill may still write.
DECODE_STATES = (
    *("handshake", "waiting", "held_back", "transfer", "local", "received", "running", "retracted", "quarantined"),
)
# Prefill: until decode's request for KV, until scheduled, in the batch, and until all is sent.
PREFILL_STATES = ("bootstrap", "waiting", "running", "sending")
# Entry time of a state, where one is noted. Other states count from the arrival.
_ENTERED = {"transfer": "decode_transfer_queue_entry_time", "sending": "prefill_transfer_queue_entry_time"}
# Seconds between two writes of the gauges.
PUBLISH_S = 1.0
# The exporter's modes of combining the processes of a worker.
_Shown = Literal["mostrecent", "livemax", "livemin"]


class InHand(NamedTuple):
    """A request and its state. prefix: prompt tokens that decode held; 0 if none, or not known yet."""

    req: Any
    state: str
    prefix: int = 0

    @property
    def since(self) -> float:
        """Arrival by the performance counter; 0 if unknown."""
        times = self.req.time_stats
        return times.decode_prealloc_queue_entry_time or times.prefill_bootstrap_queue_entry_time

    @property
    def entered(self) -> float:
        """Entry into state transfer or sending; for other states `since`."""
        return (self.state in _ENTERED and getattr(self.req.time_stats, _ENTERED[self.state])) or self.since


def in_hand(scheduler: Any) -> list[InHand]:
    """The requests of a prefill or decode worker, each once."""
    if scheduler.disaggregation_mode.value == "decode":
        return _on_decode(scheduler)
    # Pipeline stages have several batches in flight, and the last batch is not among them: its result is processed.
    steps = [scheduler.last_batch, *(getattr(scheduler, "mbs", None) or ())]
    running = [req for step in steps if step for req in step.reqs]
    running += [scheduler.chunked_req] if scheduler.chunked_req else []
    found = [InHand(req, "sending") for req in scheduler.disagg_prefill_inflight_queue]
    found += [InHand(req, "bootstrap") for req in scheduler.disagg_prefill_bootstrap_queue.queue]
    found += [InHand(req, "waiting") for req in scheduler.waiting_queue]
    known = {id(each.req) for each in found}
    # Requests of a processed batch may be in a queue already.
    found += [InHand(req, "running") for req in {id(req): req for req in running}.values() if id(req) not in known]
    return [each for each in found if each.state == "sending" or not each.req.finished()]


def _on_decode(scheduler: Any) -> list[InHand]:
    waiting, transfers = scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
    found = []
    for each in waiting.queue:
        follows = getattr(each.entry, "coming", 0)
        state = ("held_back" if follows else "waiting") if each.waiting_for_input else "handshake"
        found.append(InHand(each.req, state))
    for each in transfers.queue:
        state = "local" if each.phase.name == "LOCAL" else "transfer"
        found.append(InHand(each.req, state, _prefix(each.req)))
    for beside in transfers.hooks.beside:
        found += [InHand(req, "local", _prefix(req)) for req in beside(transfers.queue)]
    found += [InHand(each.req, "quarantined", _prefix(each.req)) for each in transfers.quarantine]
    found += [InHand(req, "retracted") for req in waiting.retracted_queue]
    found += [InHand(req, "received", _prefix(req)) for req in scheduler.waiting_queue]
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    return found + [InHand(req, "running", _prefix(req)) for req in running]


def _prefix(req: Any) -> int:
    return getattr(req, "transfer_prefix_len", None) or 0


def counts(found: Iterable[InHand], decodes: bool) -> dict[str, int]:
    """Number of ``found`` in each of the worker's states."""
    counted = dict.fromkeys(DECODE_STATES if decodes else PREFILL_STATES, 0)
    for each in found:
        counted[each.state] += 1
    return counted


def oldest(found: Iterable[InHand], most: int = 5) -> list[dict[str, Any]]:
    """The ``most`` oldest requests: rid, state, seconds, tokens."""
    now = time.perf_counter()
    known = sorted((each for each in found if each.since), key=lambda each: each.since)
    return [
        {
            "rid": each.req.rid,
            "state": each.state,
            "seconds": round(now - each.since, 3),
            "prompt_tokens": len(each.req.origin_input_ids),
            "decode_prefix": each.prefix,
            "output_tokens": len(each.req.output_ids),
        }
        for each in known[:most]
    ]


def _began(pid: int) -> float | None:
    """Start of process ``pid``, seconds since the epoch; None if there is none."""
    try:
        after_boot = psutil.Process(pid).create_time() - psutil.boot_time()
    except psutil.NoSuchProcess:
        return None
    # The kernel's boot time is in whole seconds.
    return after_boot + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _forget_earlier_starts(folder: Path) -> None:
    """Remove gauge files of processes of earlier starts from ``folder``.

    A file is old if written before the process with its PID started, or before this one if there is none. So files of
    live workers stay. Containers with separate PID namespaces cannot share a folder, since the exporter names its files
    by PID. Raises OSError.
    """
    began = _began(os.getpid()) or 0.0
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Otherwise another rank could find an old file of this PID and remove the new one.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file in (
            file for mode in ("livemax", "livemin", "mostrecent") for file in folder.glob(f"gauge_{mode}_*.db")
        ):
            pid = file.stem.rpartition("_")[2]
            if pid.isdecimal() and file.stat().st_mtime < (_began(int(pid)) or began):
                file.unlink()
    finally:
        os.close(lock)


class WorkerGauges:
    """Prometheus gauges of one worker, written at most every `PUBLISH_S` seconds, also when idle.

    The engine's own are written with its log line every few steps, and are stale in between. All TP ranks write one
    series. Shown is the last write; for figures that get worse on one rank, the worst of the live ranks.
    """

    def __init__(self, labels: Mapping[str, str]):
        """labels: of all metrics of this process."""
        from prometheus_client import Gauge

        # The engine does not empty a directory given by the operator, which may outlive many starts.
        if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            try:
                _forget_earlier_starts(Path(folder))
            except (OSError, psutil.Error) as e:
                logger.warning("Gauges of an earlier start remain in %s: %s", folder, e)
        names, self._labels, self._written = list(labels), labels, 0.0
        role = labels["engine_type"]
        self._decodes = role == "decode"

        def gauge(name: str, text: str, by: str | None = None, shown: _Shown = "mostrecent"):
            made = Gauge(f"sglang:{name}", text, [*names, *([by] if by else ())], multiprocess_mode=shown)
            return made if by else made.labels(**labels)

        self._requests = gauge("pd_requests", "Requests on the worker, by state.", by="state")
        self._oldest = gauge(
            "pd_oldest_request_seconds",
            "Age of the oldest request in each state; of transfer and sending, the time in that state.",
            by="state",
            shown="livemax",
        )
        self._size = gauge("pd_pool_size", "Size of each pool: KV tokens, slots, rows, buffers.", by="pool")
        self._free = gauge("pd_pool_free", "Free part of each pool.", by="pool", shown="livemin")
        if role == "decode":
            self._quarantined = gauge(
                "decode_quarantined_tokens",
                "Tokens of failed requests to which a prefill may still write.",
                shown="livemax",
            )
            self._copying = gauge(
                "decode_copying_tokens", "Tokens locked by copies to and from host memory and PegaFlow."
            )
            self._faults = gauge(
                "decode_audit_faults", "Inconsistencies of tree and pools at the last idle audit.", shown="livemax"
            )

    def is_due(self) -> bool:
        """Whether to write again now; if True, the caller does."""
        now = time.monotonic()
        if now - self._written < PUBLISH_S:
            return False
        self._written = now
        return True

    def write_requests(self, found: Iterable[InHand]) -> None:
        """Write the requests by state."""
        found, now = [*found], time.perf_counter()
        counted = counts(found, self._decodes)
        since = dict.fromkeys(counted, now)
        for each in found:
            since[each.state] = min(since[each.state], each.entered or now)
        for state, count in counted.items():
            self._requests.labels(**self._labels, state=state).set(count)
            self._oldest.labels(**self._labels, state=state).set(round(now - since[state], 3))

    def write_pools(self, pools: Mapping[str, tuple[int, int]]) -> None:
        """pools: size and free places by name."""
        for name, (size, free) in pools.items():
            self._size.labels(**self._labels, pool=name).set(size)
            self._free.labels(**self._labels, pool=name).set(free)

    def write_quarantine(self, tokens: int) -> None:
        """tokens: kept in quarantine."""
        self._quarantined.set(tokens)

    def write_copying(self, tokens: int) -> None:
        """tokens: locked by copies, whether or not requests hold them too."""
        self._copying.set(tokens)

    def write_faults(self, faults: int) -> None:
        """faults: of the last audit."""
        self._faults.set(faults)
