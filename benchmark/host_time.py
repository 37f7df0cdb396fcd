"""Where a decode step's time goes on the host: the engine's part and ours, off and on at equal batches.

Real schedulers (`host_worker.py`), one in a process, whose model takes no time, so that all of a step is the host's.
The sides take turns. A step is from one look for new requests to the next, by the time of the scheduler's thread, so
other programs on the machine count little. Whose it is, py-spy says, in further steps: a look at the thread counts
for the innermost function that is the engine's or ours, with what that calls in libraries. (Profilers in the
interpreter make Python's own steps several times as long.)

    python benchmark/host_time.py [--requests N,...] [--loops overlapped,plain] [--cases NAME,...] [--runs N]
    python benchmark/host_time.py --base DIR      # also with the package of another checkout, as "on, DIR"

Cases: `still`: all run and nobody is told anything yet. `streamed`: every token is sent. `turnover`: the same, and one
answer ends and one request comes in each step. `queue`: 64 wait for memory. Prints a Markdown table; exits with 1 where
ours is more than 2% of a step of 10 ms.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.make_model import ModelShape, make_model

HERE = Path(__file__).resolve().parent
POOL, PAGE, RESERVED, SHARED, OWN = 400_000, 16, 512, 512, 64
# A step of a model of 0.6 billion parameters with 256 requests, and the part of it that may be ours.
STEP_MS, PART = 10.0, 0.02
BASE = "on, base"
# Where the engine is installed, without its import.
ENGINE = sysconfig.get_paths()["purelib"] + "/sglang/"
FLAG = "--disaggregation-decode-enable-radix-cache"
SIDES: dict[str, list[str]] = {
    "off": [],
    "on": [FLAG],
    # A target that holds nobody back.
    "target": [FLAG, "--disaggregation-decode-itl-target", "100000"],
    # What enters the tree is saved; the copies themselves are a stand-in's here.
    "tier": [FLAG, "--enable-hierarchical-cache", "--hicache-ratio", "2"],
}
LOOPS = {"overlapped": [], "plain": ["--disable-overlap-schedule"]}
# Whether every token is told, whether requests come and go, and how many wait.
CASES = {
    "still": (False, False, 0),
    "streamed": (True, False, 0),
    "turnover": (True, True, 0),
    "queue": (False, False, 64),
}


def job(case: str, requests: int, radix: bool, seconds: float) -> dict[str, Any]:
    """What a worker is asked to do."""
    stream, turnover, queued = CASES[case]
    own = OWN
    if queued:
        # As long as is needed for these to fill the pool, with what is reserved for each.
        own = (POOL - (4 * SHARED if radix else 0)) // requests - RESERVED - (0 if radix else SHARED) - PAGE
    return {
        "requests": requests,
        "seconds": seconds,
        "stream": stream,
        "answer": requests if turnover else 0,
        "queued": queued,
        "shared": SHARED,
        "own": own,
    }


class Worker:
    """One side's process."""

    def __init__(self, name: str, model: str, options: list[str], python: str | None = None):
        self.name, self.radix = name, FLAG in options
        line = [sys.executable, str(HERE / "host_worker.py"), "--model-path", model, "--device", "cpu"]
        line += ["--dtype", "float32", "--max-total-tokens", str(POOL), "--page-size", str(PAGE)]
        line += ["--max-running-requests", "512", "--disaggregation-mode", "decode"]
        line += ["--disaggregation-transfer-backend", "nixl", *options]
        env = {**os.environ, **({"PYTHONPATH": python} if python else {})}
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def ready(self) -> None:
        self._line("READY")

    def run(self, asked: dict[str, Any], raw: Path | None = None) -> dict[str, Any]:
        """Have it do a job, and py-spy write to ``raw`` what it does meanwhile. Raises PdRadixError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        self._line("STEADY")
        if raw is not None:
            seconds = str(max(1, int(asked["seconds"]) - 1))
            line = [str(Path(sys.executable).parent / "py-spy"), "record", "-p", str(self._process.pid), "-d", seconds]
            line += ["-r", "400", "-f", "raw", "--full-filenames", "-o", str(raw)]
            ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
            if ended.returncode:
                raise PdRadixError(f"py-spy: {ended.stderr.strip()}")
        return json.loads(self._line("RESULT"))

    def _line(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin)
        self._log.seek(0)
        raise PdRadixError(f"the worker {self.name} has ended:\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


def owner(function: str, file: str) -> str:
    """Whose code a function is; "" for a library's, which works for whoever calls it."""
    if file.startswith(str(HERE)):
        # The pickling of messages, which is the engine's but for what it calls of ours.
        return "engine" if function == "send_output" else "worker"
    if file.startswith(ENGINE):
        return "engine"
    if "/sglang_pd_radix/supplied/cpu_host/" in file:
        return "stand-ins"
    return "ours" if "/sglang_pd_radix/" in file or "/python/sglang/" in file else ""


@dataclass
class Measured:
    """What one side's jobs told: milliseconds of a step, and looks at the thread by owner and function."""

    side: str
    steps: list[float] = field(default_factory=list)
    looks: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def read(self, raw: Path) -> None:
        """Count py-spy's stacks, each for the innermost function that is the engine's or ours."""
        for line in raw.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = [(frame.partition(" (")[0], frame.partition(" (")[2]) for frame in stack.split(";")]
            if not any("event_loop" in function for function, _ in frames):
                continue
            for function, place in reversed(frames):
                whose = owner(function, place)
                if whose == "worker":
                    break
                if whose:
                    file = Path(place.rpartition(":")[0]).stem
                    self.looks[whose, f"{file}: {function}"] += int(count)
                    break

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    def own(self, owner: str) -> float:
        """Milliseconds of a step that are ``owner``'s."""
        return self.step * sum(n for (whose, _), n in self.looks.items() if whose == owner) / self.looks.total()

    def largest(self, top: int) -> list[str]:
        """Our functions that take most, microseconds of a step."""
        part = 1000 * self.step / self.looks.total()
        ours = [(part * n, name) for (whose, name), n in self.looks.most_common() if whose == "ours"]
        return [f"  {us:6.1f} us  {name}" for us, name in ours[:top]]


def measure(workers: list[Worker], case: str, requests: int, args: argparse.Namespace, work: Path) -> list[Measured]:
    """All sides, in turns; then what each of them does."""
    found = [Measured(worker.name) for worker in workers]
    for _ in range(args.runs):
        for worker, side in zip(workers, found, strict=True):
            side.steps.append(worker.run(job(case, requests, worker.radix, args.seconds))["ms"])
    for worker, side in zip(workers, found, strict=True):
        worker.run(job(case, requests, worker.radix, args.sampled + 1), work / "raw")
        side.read(work / "raw")
    return found


def rows(loop: str, requests: int, case: str, found: list[Measured]) -> list[str]:
    """The rows of a table, the first side's first."""
    made = []
    for side in found:
        more = [on - off for on, off in zip(side.steps, found[0].steps, strict=True)]
        told = "" if side is found[0] else f"{statistics.median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})"
        made.append(
            f"| {loop} | {requests} | {case} | {side.side} | {side.step:.2f} | {told} | {side.own('ours'):.3f} "
            f"| {100 * side.own('ours') / STEP_MS:.1f}% | {side.own('engine'):.2f} | {side.own('stand-ins'):.2f} |"
        )
    return made


def main() -> int:
    """Measure and print; 1 where ours is too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="128,256", metavar="N,...")
    parser.add_argument("--loops", default=",".join(LOOPS), metavar="NAME,...")
    parser.add_argument("--cases", default=",".join(CASES), metavar="NAME,...")
    parser.add_argument("--sides", default="off,on,target", metavar="NAME,...", help="the first is compared with")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement (default: 1)")
    parser.add_argument("--sampled", type=int, default=4, help="seconds for which py-spy looks (default: 4)")
    parser.add_argument("--runs", type=int, default=3, help="of each side, in turns (default: 3)")
    parser.add_argument("--top", type=int, default=8, help="of our functions to print (default: 8)")
    parser.add_argument("--base", metavar="DIR", help="another checkout, whose package is measured too")
    args = parser.parse_args()
    heading = ["loop", "running", "case", "side", "step, ms", "more than off", "ours", f"of {STEP_MS:g} ms"]
    table = ["| " + " | ".join([*heading, "engine", "stand-ins"]) + " |", "|---" * 10 + "|"]
    details: list[str] = []
    asked = {name: SIDES[name] for name in args.sides.split(",")}
    most = 0.0
    with tempfile.TemporaryDirectory() as work:
        shape = ModelShape(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=128)
        model = str(make_model(Path(work) / "model", shape))
        for loop in args.loops.split(","):
            workers = [Worker(name, model, [*options, *LOOPS[loop]]) for name, options in asked.items()]
            if args.base:
                base = str(Path(args.base).resolve() / "python")
                workers.append(Worker(BASE, model, [*SIDES["on"], *LOOPS[loop]], base))
            for worker in workers:
                worker.ready()
            for requests in map(int, args.requests.split(",")):
                for case in args.cases.split(","):
                    found = measure(workers, case, requests, args, Path(work))
                    table += rows(loop, requests, case, found)
                    print("\n".join(rows(loop, requests, case, found)), file=sys.stderr, flush=True)
                    most = max([most, *[side.own("ours") for side in found if side.side != BASE]])
                    for side in found:
                        details += [f"\n{loop}, {requests}, {case}, {side.side}:", *side.largest(args.top)]
            for worker in workers:
                worker.close()
    print("\n".join([*table, *details]))
    return 1 if most > PART * STEP_MS else 0


if __name__ == "__main__":
    sys.exit(main())
