"""The deployment that is under fire, and the hands that carry out what the schedule says."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster, Process, Progress, http

from . import netns
from .schedule import Event

# What the engine waits for, in seconds, shorter than its own 5, 2, 300 and 300: a storm has to see them run out.
ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
}
# A router that asks its workers often how they are.
LOOKS = ("--health-check-interval-secs", "2", "--health-check-timeout-secs", "5", "--health-failure-threshold", "2")
LOOKS += ("--health-success-threshold", "1")
# And says what they say: it neither asks again nor shuts them out by itself.
ROUTER = (*LOOKS, "--disable-retries", "--disable-circuit-breaker")


PAGE, DECODE_POOL = 16, 8192
COMMON = ("--enable-metrics", "--page-size", str(PAGE), "--chunked-prefill-size", "256", "--max-running-requests", "32")


@contextlib.contextmanager
def two_hosts() -> Iterator[netns.TwoHosts | None]:
    """Two hosts with a link between them, or None where they cannot be made, which is said."""
    hosts: netns.TwoHosts | None = netns.TwoHosts()
    assert hosts
    try:
        hosts.start()
    except PdRadixError as error:
        print(f"No link to cut: {error}. The rest runs, all on one host.", flush=True)
        hosts = None
    try:
        yield hosts
    finally:
        if hosts:
            hosts.stop()


def cluster(
    model: str,
    backend: str,
    hosts: netns.TwoHosts | None,
    log_dir: Path,
    *,
    prefill: int = 2,
    decode: int = 2,
    decode_pool: int = DECODE_POOL,
    options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    router_args: Sequence[str] = ROUTER,
    on_progress: Callable[[Progress], None] | None = None,
    **more: Any,
) -> Cluster:
    """Prefills, decodes with the flag and the router, overlapped steps; decode short enough of memory that some wait.

    ``more`` goes to `Cluster` as it is. One thread for each worker: more spinning threads than cores stall each other.
    """
    return Cluster(
        model,
        prefill=prefill,
        decode=decode,
        common_args=[*COMMON, *options],
        prefill_args=["--max-total-tokens", "16384", *prefill_options],
        # Every answer says its weights' version, and so which worker it is from.
        decode_args=[
            [RADIX_FLAG, "--max-total-tokens", str(decode_pool), "--weight-version", f"decode-{i}", *decode_options]
            for i in range(decode)
        ],
        router_args=["--policy", "round_robin", *router_args],
        env={"OMP_NUM_THREADS": "1", **ENV, **(env or {})},
        backend=backend,
        log_dir=log_dir,
        timeout_s=280,
        on_progress=on_progress,
        hosts={"prefill": hosts.prefill, "decode": hosts.decode} if hosts else None,
        **more,
    )


def engine_alone(
    model: str,
    log_dir: Path,
    *,
    options: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
    **more: Any,
) -> Cluster:
    """One ordinary engine that computes every prompt in full and drafts nothing, to ask for the right answers."""
    return Cluster(
        model,
        aggregated=True,
        common_args=[*COMMON, *_without_drafts(options)],
        aggregated_args=["--max-total-tokens", "16384", "--disable-radix-cache"],
        log_dir=log_dir,
        timeout_s=280,
        on_progress=on_progress,
        **more,
    )


def _without_drafts(options: Sequence[str]) -> list[str]:
    """``options`` less those of speculation, whose answers are to be the same."""
    kept: list[str] = []
    drafts = False
    for option in options:
        drafts = option.startswith("--speculative-") if option.startswith("--") else drafts
        kept += [] if drafts else [option]
    return kept


def post(url: str, body: Any, timeout: float = 30.0) -> str:
    """What a worker says to a command, in a few words."""
    status, content = http(url, body, timeout)
    return f"{status} {content.decode(errors='replace')[:120]}".strip()


# Seconds for which a flush waits until its worker has nothing to do.
FLUSH_S = 5
# Outcomes of events that nobody has felt; "no answer" is that of a pause.
NOT_DONE = ("left out", "was gone", "failed", "no answer")


@dataclass
class Done:
    """What became of an event: when it was really done and undone (seconds of the storm), and what was said to it."""

    event: Event
    began_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""

    @property
    def carried_out(self) -> bool:
        """Whether it was done for certain: a worker that was asked (see `post`) has answered 200."""
        status = self.outcome.partition(" ")[0]
        return not self.outcome.startswith(NOT_DONE) and (not status.isdigit() or status == "200")


@dataclass
class Fire:
    """Carries out events on ``cluster``. `problems` has workers that ended although nobody killed them."""

    cluster: Cluster
    hosts: netns.TwoHosts | None
    model: str
    began_s: float = field(default_factory=time.monotonic)
    done: list[Done] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    restarts: int = 0
    _killed: set[str] = field(default_factory=set)
    _out: dict[str, threading.Lock] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)

    def process(self, name: str) -> Process:
        return next(process for process in self.cluster.processes if process.name == name)

    @property
    def away(self) -> set[str]:
        """Workers that are dead, or not ready again."""
        return set(self._killed)

    def do(self, event: Event) -> None:
        """Begin an event; it goes on in a thread of its own."""
        done = Done(event)
        self.done.append(done)
        thread = threading.Thread(target=self._carry_out, args=(done,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether everything that was begun is over, within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def watch(self) -> bool:
        """Whether every worker that was not killed is alive; those that are not get into `problems`, once each."""
        for process in self.cluster.processes:
            if process.returncode() is None or process.name in self._killed or process.name in self._reported:
                continue
            # Killed since it was looked at?
            time.sleep(0.2)
            if process.returncode() is not None and process.name not in self._killed:
                self._reported.add(process.name)
                self.problems.append(f"{process.name} ended by itself: {process.obituary()}")
        return not self._reported

    def _carry_out(self, done: Done) -> None:
        event = done.event
        lock = self._out.setdefault(event.target, threading.Lock())
        if not lock.acquire(blocking=False):
            # A restart that takes longer than was allowed for.
            done.outcome = "left out: what came before is not over"
            return
        done.began_s = time.monotonic() - self.began_s
        try:
            done.outcome = getattr(self, f"_{event.kind}")(event)
        except PdRadixError as error:
            done.outcome = f"failed: {error}"
            self.problems.append(f"{event}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is belongs in the report
            done.outcome = f"failed: {type(error).__name__}: {error}"
            self.problems.append(f"{event}: {done.outcome}")
        finally:
            done.ended_s = time.monotonic() - self.began_s
            lock.release()

    def _kill(self, event: Event) -> str:
        process = self.process(event.target)
        if self._killed:
            return f"left out: {', '.join(self._killed)} is not back"
        if process.returncode() is not None:
            return "was gone already"
        self._killed.add(event.target)
        self.cluster.kill(event.target)
        self.restarts += 1
        time.sleep(event.lasts_s)
        began = time.monotonic()
        # The log of the life that has ended stays.
        process.log_path.rename(process.log_path.with_suffix(f".{self.restarts}.log"))
        try:
            self.cluster.restart(event.target)
        finally:
            self._killed.discard(event.target)
        return f"ready {time.monotonic() - began:.0f} s after its start"

    def _stop(self, event: Event) -> str:
        self.cluster.pause([event.target])
        try:
            time.sleep(event.lasts_s)
        finally:
            self.cluster.resume([event.target])
        return "went on"

    def _flush(self, event: Event) -> str:
        # A busy worker refuses one that does not wait, and under fire all are.
        return post(self.process(event.target).url + f"/flush_cache?timeout={FLUSH_S}", {})

    def _pause(self, event: Event) -> str:
        url = self.process(event.target).url
        # A pause that aborts answers only when nobody is left.
        said: list[str] = []
        asking = threading.Thread(
            target=lambda: said.append(post(url + "/pause_generation", {"mode": event.detail}, 20)), daemon=True
        )
        asking.start()
        time.sleep(event.lasts_s)
        went_on = post(url + "/continue_generation", {})
        asking.join(25)
        # One that had not come through before it was ended would last for ever.
        went_on = post(url + "/continue_generation", {})
        return f"{(said or ['no answer'])[0]}; then {went_on}"

    def _weights(self, event: Event) -> str:
        url = self.process(event.target).url
        if event.detail:
            post(url + "/pause_generation", {"mode": event.detail})
        try:
            return post(url + "/update_weights_from_disk", {"model_path": self.model}, 90)
        finally:
            if event.detail:
                post(url + "/continue_generation", {})

    def _cut(self, event: Event) -> str:
        assert self.hosts
        self.hosts.cut()
        try:
            time.sleep(event.lasts_s)
        finally:
            self.hosts.restore()
        return "restored"

    def _slow(self, event: Event) -> str:
        assert self.hosts
        self.hosts.set_rate(event.detail)
        try:
            time.sleep(event.lasts_s)
        finally:
            self.hosts.set_rate(None)
        return "at full rate again"
