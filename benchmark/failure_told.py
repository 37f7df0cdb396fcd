"""How soon a failure is told: from the event to the client's answer, and to the last thing that is freed.

    python benchmark/failure_told.py --backend nixl
    python benchmark/failure_told.py --backend mooncake --only prefill-killed,link-cut --json told.json

One prefill, one decode worker with the flag and the router, in two network namespaces where that is allowed. Before
each event there are requests at every stage: some whose answers are being computed, some whose KV is being computed and
sent, some that wait on decode for memory; half of them sent to both workers as a router does, so that each worker's own
answer is seen, half through the router. Three figures for each: seconds until decode, prefill, and the router have told
the last of their clients. ``freed`` is when the workers that are left are idle and no book of theirs mentions a room;
where nobody was lost, after the event has been undone.

What a worker knows, its scheduler sees between two steps, so a step of prefill is measured apart (``step``: the median
of those before the event, by prefill's own log): with ``--chunk 64`` it is shorter than with 256.

The engine's waits are set to seconds that can be waited for here (`--timeout`, and a heartbeat every 2 s, twice); which
of them a row is bound by is in its last column.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
from faults import books, deploy
from faults.traffic import WORDS

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.cluster import Cluster, local_session
from sglang_pd_radix.tools.make_model import make_model

POOL = 8192
# Prompt and answer of each kind of request, tokens; and how many of each go to the workers, and to the router.
KINDS = {"running": (64, 700), "in transfer": (2600, 4), "waiting": (2600, 4)}
EACH = 2
# Seconds from one kind to the next, and to the event.
HEAD_START_S = 1.0
# What two busy cores may take beyond a wait of the engine, seconds.
SPARE_S = 1.0
# What prefill logs of each step, and how many of the last ones are looked at.
STEP, STEPS = re.compile(r"Prefill batch.*?#new-token: (\d+).*?input throughput \(token/s\): ([\d.]+)"), 5
# The heartbeat of decode, seconds and failures (`deploy.ENV`), and the engine's time-out of one.
BEAT_S, BEATS, BEAT_TIMEOUT_S = 2, 2, 3


@dataclass
class Leg:
    """One HTTP request of one client: whom it was sent to, and what came when (seconds after the event)."""

    kind: str
    to: str
    answered_s: float | None = None
    status: int = 0
    said: str = ""


@dataclass
class Row:
    """One event. ``bound``: which wait of the engine may pass before it is told; empty: the system knows at once.

    kinds, to: of the requests it ends, and whose answers tell of it. Others go on, or have nobody who could answer.
    first: whether only the first that is told counts: decode has asked prefill for few of them, and of the others
    nothing is overdue. dead: who is killed, if somebody is. A busy system takes its time to end processes; that it has
    closed their sockets is what its clients see first, and from when on it can be known.
    """

    event: str
    bound: str
    limit_s: float
    kinds: tuple[str, ...]
    to: tuple[str, ...]
    dead: str = ""
    first: bool = False
    legs: list[Leg] = field(default_factory=list)
    freed_s: float | None = None
    # Of prefill, before the event.
    step_s: float | None = None
    stages: str = ""

    def ends(self, to: str) -> list[Leg]:
        """What ``to`` has been asked that ends by it. What was answered in full nevertheless does not count."""
        return [leg for leg in self.legs if leg.to == to and leg.kind in self.kinds and leg.status != 200]

    def last(self, to: str) -> float | None:
        """When the last client of ``to`` was told; None if there was none, or one was not."""
        times = [leg.answered_s for leg in self.ends(to)]
        told = [t for t in times if t is not None]
        if self.first:
            return min(told, default=None)
        return None if None in times else max(told, default=None)

    @property
    def closed_s(self) -> float | None:
        """When the sockets of who was killed were closed, by the first of its clients that saw it."""
        return min((leg.answered_s for leg in self.ends(self.dead) if leg.answered_s is not None), default=None)

    @property
    def late(self) -> bool:
        """Whether somebody was told nothing, or later than the row allows."""
        limit = self.limit_s + (SPARE_S if self.bound else (self.closed_s or 0.0) + (self.step_s or 0.0))
        return any(self.untold(to) or (self.last(to) or 0.0) > limit for to in self.to)

    def untold(self, to: str) -> int:
        ends = self.ends(to)
        untold = sum(leg.answered_s is None for leg in ends)
        return 0 if self.first and untold < len(ends) else untold


class Scene:
    """A deployment with requests at every stage, and the clock of an event."""

    def __init__(self, cluster: Cluster, hosts: netns.TwoHosts | None, seed: int):
        self.cluster, self.hosts = cluster, hosts
        self.pick = random.Random(f"told/{seed}")
        self.row = Row("", "", 0.0, (), ())
        self.event_at = 0.0
        self.threads: list[threading.Thread] = []

    def words(self, count: int) -> list[int]:
        return [self.pick.choice(WORDS) for _ in range(count)]

    def begin(self, row: Row) -> None:
        """Bring requests to every stage."""
        self.row, self.threads, self.event_at = row, [], 0.0
        for kind, (prompt, answer) in KINDS.items():
            for _ in range(EACH):
                # Who asks a worker itself is not concerned by the end of the router, and nothing of it is freed.
                self._send(kind, prompt, answer, ("router",) if row.dead == "router" else ("decode", "prefill"))
                self._send(kind, prompt, answer, ("router",))
            time.sleep(HEAD_START_S)

    def _send(self, kind: str, prompt: int, answer: int, legs: Sequence[str]) -> None:
        cluster = self.cluster
        prefill = next(process for process in cluster.processes if process.role == "prefill")
        body = {
            "input_ids": self.words(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
        }
        if legs != ("router",):
            host = prefill.url.removeprefix("http://").partition(":")[0]
            room = {"bootstrap_room": self.pick.randrange(1, 2**62)}
            body |= {"bootstrap_host": host, "bootstrap_port": prefill.bootstrap_port, **room}
        urls = {"decode": cluster.decode_urls[0], "prefill": prefill.url, "router": cluster.router_url}
        for to in legs:
            leg = Leg(kind, to)
            self.row.legs.append(leg)
            thread = threading.Thread(target=self._ask, args=(leg, urls[to], body), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _ask(self, leg: Leg, url: str, body: dict[str, Any]) -> None:
        status, said = 0, ""
        try:
            with local_session() as session:
                reply = session.post(url + "/generate", json=body, timeout=300)
                status, said = reply.status_code, reply.text
        except requests.RequestException as error:
            said = f"{type(error).__name__}"
        at = time.monotonic()
        leg.status, leg.said = status, said[:200] if status != 200 else ""
        # What came before the event was not to be told of it.
        leg.answered_s = at - self.event_at if self.event_at else -1.0

    def happens(self, event: Callable[[], None], look: Sequence[str], patience_s: float) -> None:
        """Let it happen, and wait until all are told and the workers ``look`` have let go of everything."""
        before = [leg for leg in self.row.legs if leg.answered_s is not None]
        self.row.legs = [leg for leg in self.row.legs if leg not in before]
        self.row.stages = ", ".join(
            f"{sum(leg.kind == kind for leg in self.row.legs if leg.to != 'prefill')} {kind}" for kind in self.row.kinds
        )
        self.row.step_s = self._step_s()
        self.event_at = time.monotonic()
        event()
        deadline = self.event_at + patience_s
        while time.monotonic() < deadline:
            told = not any(self.row.untold(to) for to in self.row.to)
            if told and look and self._empty(look):
                self.row.freed_s = time.monotonic() - self.event_at
                return
            if told and not look:
                return
            time.sleep(0.1)

    def _step_s(self) -> float | None:
        """How long a step of prefill has taken of late, seconds; None if it has computed nothing."""
        prefill = next(process for process in self.cluster.processes if process.role == "prefill")
        found = STEP.findall(prefill.log_path.read_text(errors="replace"))[-STEPS:]
        steps = [int(tokens) / float(pace) for tokens, pace in found if float(pace)]
        return statistics.median(steps) if steps else None

    def _empty(self, names: Sequence[str]) -> bool:
        for process in self.cluster.processes:
            if process.name in names:
                try:
                    found = books.pools(process.url)
                except PdRadixError:
                    return False
                for pool in found:
                    # What runs has neither. A failed request has both until nobody can write for it any more.
                    if any(pool["rooms"].values()) or pool["free_metadata_buffers"] != pool["metadata_buffers"]:
                        return False
                    if self.row.dead == "router" and pool["free_req_slots"] != pool["req_slots"]:
                        # What runs is to end too.
                        return False
        return True

    def end(self) -> None:
        """Until nobody waits any more and the workers are as they were."""
        for process in self.cluster.processes:
            if process.is_worker:
                deploy.abort_all(process.url)
        for thread in self.threads:
            thread.join(60)
        for process in self.cluster.processes:
            if process.is_worker:
                books.wait_idle(process.url, 60)
                deploy.post(process.url + "/flush_cache", {})
        self.cluster.check()


def scheduler_of(cluster: Cluster, name: str) -> int:
    """The process id of a worker's scheduler."""
    process = next(process for process in cluster.processes if process.name == name)
    for pid in process_group.members(process.pid):
        if "scheduler" in " ".join(psutil.Process(pid).cmdline()):
            return pid
    raise PdRadixError(f"{name} has no process that is called a scheduler")


# What happens, what undoes it, and whose books are to be empty before that.
Event = tuple[Row, Callable[[], None], Callable[[], None], list[str]]


def rows(scene: Scene, timeout_s: float) -> dict[str, Event]:
    """Each event by its name."""
    cluster, hosts = scene.cluster, scene.hosts
    beats = BEATS * (BEAT_S + BEAT_TIMEOUT_S)

    def signal_scheduler(name: str, number: signal.Signals) -> Callable[[], None]:
        return lambda: os.kill(scheduler_of(cluster, name), number)

    def again(name: str) -> Callable[[], None]:
        return lambda: cluster.restart(name)

    moving, everybody = ("in transfer", "waiting"), ("decode", "prefill", "router")
    beat = f"heartbeat: {BEATS} x ({BEAT_S} + {BEAT_TIMEOUT_S}) s"
    waiting, bootstrap = f"waiting time-out: {timeout_s:g} s", f"bootstrap time-out: {timeout_s:g} s"
    found: dict[str, Event] = {
        "prefill-killed": (
            Row("prefill is killed", "", 1.0, moving, everybody, dead="prefill"),
            lambda: cluster.kill("prefill-0"),
            again("prefill-0"),
            ["decode-0"],
        ),
        "decode-killed": (
            Row("decode is killed", "", 1.0, tuple(KINDS), everybody, dead="decode"),
            lambda: cluster.kill("decode-0"),
            again("decode-0"),
            ["prefill-0"],
        ),
        "router-killed": (
            Row("the router is killed", "", 1.0, tuple(KINDS), ("router",), dead="router"),
            lambda: cluster.kill("router"),
            again("router"),
            ["prefill-0", "decode-0"],
        ),
        "prefill-stopped": (
            Row("prefill is stopped", beat, beats, moving, ("decode",)),
            lambda: cluster.pause(["prefill-0"]),
            lambda: cluster.resume(["prefill-0"]),
            [],
        ),
        "prefill-hangs": (
            Row("prefill's scheduler hangs", waiting, timeout_s, moving, ("decode",), first=True),
            signal_scheduler("prefill-0", signal.SIGSTOP),
            signal_scheduler("prefill-0", signal.SIGCONT),
            [],
        ),
        "decode-stopped": (
            Row("decode is stopped", f"{waiting}; {bootstrap}", timeout_s, moving, ("prefill",)),
            lambda: cluster.pause(["decode-0"]),
            lambda: cluster.resume(["decode-0"]),
            [],
        ),
    }
    return found if hosts is None else found | rows_of_link(hosts, timeout_s)


def rows_of_link(hosts: Any, timeout_s: float) -> dict[str, Event]:
    """What happens to a link between two machines. hosts: the made ones."""
    beats = BEATS * (BEAT_S + BEAT_TIMEOUT_S)
    moving, everybody = ("in transfer", "waiting"), ("decode", "prefill", "router")
    beat = f"heartbeat: {BEATS} x ({BEAT_S} + {BEAT_TIMEOUT_S}) s"
    waiting, bootstrap = f"waiting time-out: {timeout_s:g} s", f"bootstrap time-out: {timeout_s:g} s"
    cut = f"{beat}; on prefill {waiting}, {bootstrap}"
    return {
        "link-cut": (
            Row("the link is cut", cut, max(beats, timeout_s), moving, everybody),
            hosts.cut,
            hosts.restore,
            [],
        ),
        "transfer-hangs": (
            Row("the link carries next to nothing", waiting, timeout_s, moving, everybody),
            lambda: hosts.set_rate(64e3),
            lambda: hosts.set_rate(None),
            [],
        ),
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 if somebody was told later than the row allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    parser.add_argument("--model", help="model directory (default: a made one)")
    parser.add_argument("--only", default="", help="events, comma-separated (default: all)")
    parser.add_argument("--timeout", type=float, default=15.0, help="the engine's waiting and bootstrap time-outs")
    parser.add_argument("--chunk", type=int, default=256, help="most tokens of a step of prefill")
    parser.add_argument("--tp", type=int, default=1, help="TP ranks of each worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="pd-radix-told-"))
    model = args.model or str(make_model(log_dir / "model"))
    env = {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": f"{args.timeout:g}",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": f"{args.timeout:g}",
    }
    done: list[Row] = []
    with deploy.two_hosts() as hosts:
        made = deploy.cluster(
            model, args.backend, hosts, log_dir, prefill=1, decode=1, decode_pool=POOL, env=env,
            options=["--context-length", "4096", "--chunked-prefill-size", str(args.chunk), "--tp-size", str(args.tp)],
            router_args=["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"],
        )  # fmt: skip
        with made as cluster:
            scene = Scene(cluster, hosts, args.seed)
            table = rows(scene, args.timeout)
            for name in filter(None, args.only.split(",")) if args.only else table:
                row, event, undo, look = table[name]
                scene.begin(row)
                scene.happens(event, look, row.limit_s + 12)
                undo()
                if not look:
                    _freed_after(scene, ["prefill-0", "decode-0"])
                scene.end()
                done.append(row)
                print(_line(row), flush=True)
    print(text(args.backend, done))
    if args.json:
        args.json.write_text(json.dumps({"backend": args.backend, "rows": [asdict(row) for row in done]}, indent=1))
    late = [row.event for row in done if row.late]
    for event in late:
        print(f"LATE: {event}")
    return 1 if late else 0


def _freed_after(scene: Scene, names: Sequence[str]) -> None:
    """When all is freed after the event has been undone, which is told as seconds after the event too."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if scene._empty(names):
            scene.row.freed_s = time.monotonic() - scene.event_at
            return
        time.sleep(0.2)


def _cell(row: Row, to: str) -> str:
    last, untold = row.last(to), row.untold(to)
    if untold:
        return f"{untold} not told"
    return "-" if last is None else f"{last:.2f}"


def _line(row: Row) -> str:
    cells = [
        row.event,
        "" if row.closed_s is None else f"{row.closed_s:.2f}",
        *(_cell(row, to) for to in ("decode", "prefill", "router")),
        "-" if row.step_s is None else f"{row.step_s:.2f}",
    ]
    cells += ["-" if row.freed_s is None else f"{row.freed_s:.1f}", row.bound or "none", row.stages]
    return "| " + " | ".join(cells) + " |"


def text(backend: str, done: Sequence[Row]) -> str:
    """The table as Markdown."""
    head = [
        f"{backend}: seconds from the event until the last client was told by",
        "| event | sockets closed | decode | prefill | router | step | all freed | bound by | requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(["", *head, *map(_line, done)])


if __name__ == "__main__":
    sys.exit(main())
