r"""A PD deployment under fire: what is known to be right when it is calm has to be so while everything goes wrong.

    make chaos                                  # both backends, 10,000 requests each, on a made model
    python benchmark/chaos.py --backend nixl --requests 1000 --seconds 300 --seed 7 --json chaos.json
    python benchmark/chaos.py --trace mooncake_conversation_trace.jsonl ...
    python benchmark/chaos.py --turns 8 --decode-options "--disaggregation-decode-local-prefill auto" \
        --prefill-options "--disaggregation-prefill-read-decode 16"   # reads from decode, all the time
    python benchmark/chaos.py --schedule 300 --seed 7             # only say what would be done
    python benchmark/chaos.py --seconds 3600 --requests 1000000 \
        --without kill,stop,flush,pause,weights,cut,slow          # an hour in which nothing is done

First one ordinary engine without disaggregation is asked for the right answers, and ends. Then two prefill workers, two
decode workers with the flag (overlapped steps) and the router; prefill and decode in network namespaces of their own,
joined by a veth pair, where that is allowed. Replays of the trace in calm, for hits and pace. Then the same trace again
and again, from clients of whom some go away and some read slowly, while workers are killed and started again, stopped,
flushed, paused and given their weights anew, and the link is cut and slowed. Then everything is left alone, the books
are read, and the calm replays are done again.

Exit status 0: every whole answer, in calm and storm, was the right one; no request failed without a cause, and no more
than what was done explains; decode's trees were used; nobody was told too late; no worker ended by itself; nothing is
held by anybody, and processes have no more descriptors, threads and memory than before; and the pace is not lost. What
a run was too short to judge is said, line by line, and is not "well".
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import blame, books, deploy, judge, truth, turns
from faults.deploy import Fire
from faults.schedule import Event, Shape, events, manner
from faults.traffic import Ask, Clients, Told, trace_asks, wait_answered
from faults.truth import Truth

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import (
    Cluster,
    Process,
    add_router_option,
    http,
    named_gateway,
)
from sglang_pd_radix.tools.make_model import ModelShape, make_model
from sglang_pd_radix.tools.progress import print_ready

# Replays that are timed before the storm, and after it; of how many requests each; and the part of the pace before, by
# medians, that must not be lost. Replays differ by a fifth on a busy machine.
REPLAYS, TIMED, SLOW = 3, 30, 0.5
# Seconds in which what was done to the workers is undone at the end; a start may take minutes on a busy machine.
UNDONE_S = 240.0
# Seconds in which an idle worker has to have let go of everything; the time-outs of `deploy.ENV` run out in it.
SETTLE_S = 75.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    add_router_option(parser)
    parser.add_argument("--model", help="model directory (default: a made one)")
    parser.add_argument("--arch", default="qwen3", help="of the made one, as of `pd-radix make-model` (default: qwen3)")
    parser.add_argument("--options", default="", help="of all workers, as one argument: what the model needs")
    for role in ("decode", "prefill"):
        parser.add_argument(f"--{role}-options", default="", help=f"of {role} workers, as one argument")
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace (default: a made one of its shape)")
    parser.add_argument("--requests", type=int, default=10_000, help="of the storm (default: 10000)")
    parser.add_argument("--seconds", type=float, help="end the storm after so many, however many were asked")
    parser.add_argument("--distinct", type=int, default=200, help="of the trace, asked again and again (default: 200)")
    parser.add_argument(
        "--turns",
        type=int,
        default=0,
        metavar="N",
        help="in place of a trace, conversations of N turns, short and long by turns, each with a decode worker of its "
        "own, and other pages each time they come round",
    )
    parser.add_argument("--shrink", type=int, default=32, help="lengths of the trace are divided by it (default: 32)")
    parser.add_argument("--clients", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", default="", help="kinds of events to leave out, comma-separated")
    parser.add_argument("--told-within", type=float, default=60.0, metavar="S", help="latest answer (default: 60)")
    parser.add_argument(
        "--longest-step",
        type=float,
        metavar="S",
        help="of decode's queues; for storms that stop no worker (default: any)",
    )
    parser.add_argument("--one-host", action="store_true", help="no network namespaces, and no link to cut")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--schedule", type=float, metavar="S", help="print the events of S seconds, and do nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(argv)
    shape = Shape(link=not args.one_host, without=frozenset(filter(None, args.without.split(","))))
    if args.schedule:
        for event in itertools.takewhile(lambda event: event.at_s < args.schedule, events(args.seed, shape)):
            print(event)
        return 0
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="pd-radix-chaos-"))
    report: dict[str, Any] = {"seed": args.seed, "backend": args.backend, "log_dir": str(log_dir)}
    report |= {"problems": [], "not_judged": [], "judged": []}
    before = {signum: signal.signal(signum, _end) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        model = args.model or str(make_model(log_dir / "model", ModelShape(args.arch)))
        options = shlex.split(args.options)
        asks, right = _asked(args, model, log_dir, options)
        with deploy.two_hosts() if not args.one_host else contextlib.nullcontext() as hosts:
            report["two_hosts"] = hosts is not None
            if hosts is None:
                shape = Shape(link=False, without=shape.without)
            gateway = named_gateway(args.router)
            cluster = deploy.cluster(
                model,
                args.backend,
                hosts,
                log_dir,
                options=options,
                decode_options=shlex.split(args.decode_options),
                prefill_options=shlex.split(args.prefill_options),
                on_progress=print_ready,
                gateway=gateway,
                router_args=(*deploy.ROUTER, *(("--decode-policy", "manual") if args.turns else ())),
            )
            with cluster:
                Run(args, shape, cluster, Fire(cluster, hosts, model), asks, right, report).all()
    except _Ended as error:
        # Nothing that is wrong with anybody, for who reads the report; but not well either.
        report["ended"] = str(error)
        report["problems"].append(str(error))
    except PdRadixError as error:
        report["problems"].append(str(error))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(text(report))
    return 1 if report["problems"] else 0


def _asked(args: argparse.Namespace, model: str, log_dir: Path, options: Sequence[str]) -> tuple[list[Ask], Truth]:
    """The requests, and what an engine alone answers. Raises PdRadixError."""
    if not args.turns:
        asks = trace_asks(args.trace, args.distinct, args.shrink, longest=1024)
        return asks, truth.of_engine_alone(model, asks, args.clients, log_dir, options, print_ready)
    if args.trace or args.turns < 0:
        raise PdRadixError(f"--turns {args.turns}{' --trace' * bool(args.trace)}: give one of them, and turns above 0")
    chats = max(1, args.distinct // args.turns)
    return turns.of_engine_alone(model, chats, args.turns, args.clients, log_dir, options, print_ready)


class _Ended(PdRadixError):
    """A signal asked for the end."""


def _end(signum: int, frame: Any) -> None:
    raise _Ended(f"ended by signal {signum} before it was done")


@dataclass
class Run:
    """Calm, storm, calm; what comes of it goes into ``report`` as it comes, problems and what was not judged too."""

    args: argparse.Namespace
    shape: Shape
    cluster: Cluster
    fire: Fire
    asks: list[Ask]
    right: Truth
    report: dict[str, Any]
    #: By decode worker, the part of its prompts that its tree held in calm.
    held: dict[str, float] = field(default_factory=dict)

    @property
    def workers(self) -> list[Process]:
        return [process for process in self.cluster.processes if process.is_worker]

    def all(self) -> None:
        """Raises PdRadixError."""
        # The first pays for memory and kernels that are made once.
        self._whole(_replay(self.cluster, self.asks, self.args.clients), "in calm")
        self._hits("in calm")
        before = self._timed("in calm")
        if self.report["problems"]:
            # What is wrong in calm is not the storm's doing.
            return
        books_before = {worker.name: books.of_idle_worker(worker, 30) for worker in self.workers}
        print(f"calm: all answers are right, {before:.2f} a second", flush=True)
        self._storm()
        print(_storm_text(self.report), flush=True)
        if self.fire.watch():
            self._afterwards(before, books_before)
        # Who ended since the storm was judged ended by itself as well.
        self._wrong([one for one in self.fire.problems if one not in self.report["problems"]])

    def _storm(self) -> None:
        args, fire = self.args, self.fire
        clients = Clients(
            self.cluster.router_url + "/generate",
            self.asks,
            args.requests,
            args.clients,
            lambda number: manner(args.seed, number),
            give_up_s=2 * args.told_within,
            key=lambda number: turns.key(number, len(self.asks)) if args.turns else "",
        )
        counted = turns.Counted()
        for worker in self.workers if args.turns else ():
            counted.look(worker)
        before = counted.sums()
        fire.began_s = time.monotonic()
        clients.start()
        look = counted.look if args.turns else lambda worker: None
        _throw(fire, clients, events(args.seed, self.shape), args.seconds, look)
        clients.stop()
        if not fire.join(UNDONE_S):
            self._wrong([f"what was done to the workers is not undone after {UNDONE_S:.0f} s"])
        if not clients.join(2 * args.told_within + 30):
            self._wrong(["clients still wait"])
        fire.watch()
        self._wrong(fire.problems)
        self._right(clients)
        self._wrong(judge.late_problems(clients.told, args.told_within))
        self._judge_storm(clients)
        if args.turns:
            for worker in self.workers:
                counted.look(worker)
            counts = counted.since(before)
            reads = "--disaggregation-prefill-read-decode" in args.prefill_options
            self._judged("turns", [], turns.not_judged(counts, reads), [turns.told(counts)])
        self._steps()
        self.report |= _told_of(clients, fire)

    def _judge_storm(self, clients: Clients) -> None:
        """Failures, by what was done."""
        fire = self.fire
        found = blame.judge(clients.told, blame.windows(fire.done, self.shape, fire.began_s))
        self._judged("storm", blame.problems(found, fire.began_s), blame.not_judged(found), [found])
        never = blame.never_done(fire.done, self.shape)
        self.report["not_judged"] += [f"what nobody has seen done: {never}"] if never else []

    def _steps(self) -> None:
        """How long the queues of decode have taken at the longest, if all workers are there to say."""
        found = {}
        for worker in self.workers if self.fire.watch() else ():
            if worker.role == "decode":
                pools = books.pools(worker.url)
                self._wrong(judge.step_problems(worker.name, pools, self.args.longest_step))
                found[worker.name] = max((pool.get("longest_queue_step_s", 0.0) for pool in pools), default=0.0)
        self.report["longest_queue_step_s"] = found

    def _afterwards(self, before: float, books_before: dict[str, books.Books]) -> None:
        report = self.report
        began = time.monotonic()
        for worker in self.workers:
            self._comes_to_rest(worker, began + SETTLE_S)
        report["idle_after_s"] = round(time.monotonic() - began, 1)
        # Until all have noticed that it is over: what fails from then on has no cause.
        windows = blame.windows(self.fire.done, self.shape, self.fire.began_s)
        time.sleep(max([0.0, *(window.to_s - time.monotonic() for window in windows)]))
        if not wait_answered(self.cluster.router_url, self.asks[0], 60):
            self._wrong(["after the storm the gateway does not answer eight times in a row"])
        # Those that were started again pay what the others have paid.
        self._whole(_replay(self.cluster, self.asks, self.args.clients), "after the storm")
        self._hits("after the storm")
        after = self._timed("after the storm")
        told = f"{after:.2f} answers a second after the storm, {before:.2f} before"
        self._judged("pace", [f"the pace is lost: {told}"] if after < SLOW * before else [], [], [told])
        books_after = {worker.name: books.of_idle_worker(worker, 30) for worker in self.workers}
        for name, own in books_after.items():
            self._wrong(judge.held_at_rest(name, own.pools))
            self._wrong(judge.process_problems(books_before[name], own, self.fire.restarts))
        report["books"] = {
            name: {"before": books_before[name].document(), "after": own.document()}
            for name, own in books_after.items()
        }

    def _comes_to_rest(self, worker: Process, until: float) -> None:
        """It lets go of everything, by ``until`` (monotonic). The replays flush, and what a flush makes good is seen
        here or nowhere."""
        # The router's health checks are requests, which hold memory.
        until = max(until, time.monotonic() + 1.0)
        while (held := judge.held_at_rest(worker.name, books.pools(worker.url))) and time.monotonic() < until:
            time.sleep(0.2)
        self._wrong([f"after the storm: {problem}" for problem in held])

    def _hits(self, when: str) -> None:
        """All requests twice from empty caches: right, and of the trees as much as before the storm."""
        clients = _replay(self.cluster, self.asks, self.args.clients, times=2)
        self._whole(clients, when)
        decodes = [worker.name for worker in self.workers if worker.role == "decode"]
        held = judge.held_parts(clients.told, self.asks, decodes)
        told = [", ".join(f"{part:.0%} of the prompts of {name}" for name, part in held.items())]
        idle = [
            f"{when}: whether the tree of {name} is used: it answered nothing" for name in decodes if name not in held
        ]
        self._judged(f"held by the trees {when}", judge.held_problems(when, held, self.held), idle, told)
        self.held = self.held or held

    def _timed(self, when: str) -> float:
        """Answers a second in replays of the first requests."""
        rates = []
        for _ in range(REPLAYS):
            clients = _replay(self.cluster, self.asks[:TIMED], self.args.clients)
            self._whole(clients, when)
            rates.append(clients.rate)
        return statistics.median(rates)

    def _whole(self, clients: Clients, when: str) -> None:
        """Nothing fails when nothing is wrong, and all is right."""
        self._right(clients)
        lost = [told for told in clients.told if told.ids is None]
        if lost:
            self._wrong([f"{len(lost)} requests failed {when}: {lost[0].status} {lost[0].error}"])

    def _right(self, clients: Clients) -> None:
        """Every whole answer is the right one."""
        self._wrong(truth.problems(clients.told, self.right))
        self.report["not_judged"] += truth.not_judged(clients.told, self.right)
        self.report["ties"] = self.report.get("ties", 0) + truth.tied(clients.told, self.right)

    def _wrong(self, problems: Sequence[str]) -> None:
        self.report["problems"] += problems

    def _judged(self, what: str, problems: Sequence[str], not_judged: Sequence[str], lines: Sequence[Any]) -> None:
        self._wrong(problems)
        self.report["not_judged"] += not_judged
        self.report["judged"] += [f"{what}: {line}" for line in lines]


def _told_of(clients: Clients, fire: Fire) -> dict[str, Any]:
    """Of the storm, for the report."""

    def line(one: Told) -> dict[str, Any]:
        return {"client": one.number, "manner": one.manner, "took_s": round(one.took_s, 1), "how": one.ended_how,
                "began_s": round(one.began_s - fire.began_s, 1), "error": one.error}  # fmt: skip

    failed = [one for one in clients.told if one.ended_how in ("failed", "aborted")]
    return {
        "storm": judge.summary(clients.told) | {"seconds": round(clients.ended_s - clients.began_s, 1)},
        "events": [
            {"event": str(done.event), "began_s": done.began_s, "ended_s": done.ended_s, "outcome": done.outcome}
            for done in fire.done
        ],
        "slowest": [line(one) for one in sorted(clients.told, key=lambda told: -told.took_s)[:12]],
        "failed": [line(one) for one in failed[:1000]],
    }


def _throw(fire: Fire, clients: Clients, coming: Any, seconds: float | None, look: Callable[[Process], None]) -> None:
    """Carry out events when they are due, until the clients are done, the time is up or a worker is lost.

    look: called with a worker before it is killed.

    A kill waits until nobody is dead: where a start takes longer than the schedule allows for, it would be left out.
    """
    event: Event | None = next(coming, None)
    kills: list[Event] = []
    while clients.busy and fire.watch():
        now = time.monotonic() - fire.began_s
        if seconds is not None and now > seconds:
            return
        if event is not None and now >= event.at_s:
            print(event, flush=True)
            if event.kind == "kill":
                kills.append(event)
            else:
                fire.do(event)
            event = next(coming, None)
        if kills and not fire.away:
            kill = kills.pop(0)
            look(fire.process(kill.target))
            fire.do(kill)
            # Until it is seen to be away.
            time.sleep(0.2)
        time.sleep(0.05)


def _replay(cluster: Cluster, asks: list[Ask], concurrency: int, times: int = 1) -> Clients:
    """All requests once (``times``), from empty caches. Raises PdRadixError if a worker has ended."""
    cluster.check()
    for process in cluster.processes:
        if process.is_worker:
            deadline = time.monotonic() + 30
            while http(process.url + "/flush_cache", {}, 30)[0] != 200 and time.monotonic() < deadline:
                time.sleep(0.2)
    clients = Clients(cluster.router_url + "/generate", asks, times * len(asks), concurrency).start()
    clients.join()
    return clients


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    where = "prefill and decode in namespaces of their own" if report.get("two_hosts") else "all on one host"
    lines = ["", f"{report['backend']}, seed {report['seed']}, {where}"]
    lines += [_storm_text(report)] if "storm" in report else []
    lines += report["judged"]
    if report.get("ties"):
        lines.append(f"{report['ties']} answers go on with the other of two tokens that are as likely")
    for name, seconds in report.get("longest_queue_step_s", {}).items():
        lines.append(f"longest step of the queues of {name}: {seconds:.3f} s")
    lines += [f"logs: {report['log_dir']}"]
    lines += [f"NOT JUDGED: {what}" for what in report["not_judged"]]
    lines += [f"WRONG: {problem}" for problem in report["problems"][:40]]
    return "\n".join([*lines, judge.verdict(report["problems"], report["not_judged"])])


def _storm_text(report: dict[str, Any]) -> str:
    storm = report["storm"]
    lines = [
        f"storm: {storm['requests']} requests in {storm['seconds']:.0f} s, {len(report['events'])} events; ended: "
        + ", ".join(f"{count} {how}" for how, count in storm["ended"].items()),
        f"told of a failure after (s): {storm['failed_after_s']}, later than 60 s: {storm['failed_later_than_60_s']}",
    ]
    return "\n".join([*lines, *(f"  {count} x {error}" for error, count in storm["errors"].items())])


if __name__ == "__main__":
    sys.exit(main())
