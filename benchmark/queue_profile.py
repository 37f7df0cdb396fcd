"""Where the time of the scheduler loops goes with hundreds of requests queued, and the part of this package in it.

One prefill and two decode workers, without and with the cache, as `pd-radix bench` starts them. All requests are sent
at once; when enough of them are queued on decode, py-spy samples the schedulers of prefill and of decode. A sample
counts for the innermost frame that is the engine's, NIXL's or ours. Waits of an idle CPU host are left out of the
total.

    python benchmark/queue_profile.py [--seconds S] [--backend NAME] [--top N]

Prints a Markdown table, then the functions that took most. py-spy needs the right to trace other processes.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.bench import command, deploy, measure, workload
from sglang_pd_radix.tools.cluster import http
from sglang_pd_radix.tools.make_model import make_model

PACKAGE = Path(process_group.__file__).parents[1]
PATCHES = {PACKAGE.parent / "sglang", PACKAGE / "_patches" / "sglang"}
QUEUED, REQUESTS = 256, 330


@dataclass
class Profile:
    """Samples of one scheduler's loop, by whose code was running."""

    loop: str
    radix: bool
    samples: collections.Counter[str] = field(default_factory=collections.Counter)
    functions: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def read(self, raw: Path) -> Profile:
        for line in raw.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            if any("event_loop" in frame for frame in frames):
                self._add(frames, int(count))
        return self

    def _add(self, frames: list[str], count: int) -> None:
        for frame in reversed(frames):
            function, _, place = frame.partition(" (")
            if str(PACKAGE / "supplied" / "cpu_host") in place:
                owner = "waiting" if function.endswith("rest") else "stand-ins"
            elif any(str(tree) in place for tree in PATCHES) or str(PACKAGE) in place:
                owner = "patch set"
            elif "/sglang/srt/" in place or "/nixl" in place:
                owner = "engine"
            else:
                continue
            self.samples[owner] += count
            self.functions[owner, function] += count
            return

    @property
    def busy(self) -> int:
        return max(1, sum(self.samples.values()) - self.samples["waiting"])

    def row(self) -> str:
        shares = [f"{100 * self.samples[owner] / self.busy:.1f}%" for owner in ("patch set", "stand-ins", "engine")]
        return f"| {self.loop} | {'on' if self.radix else 'off'} | {' | '.join(shares)} | {self.busy} |"

    def largest(self, top: int) -> list[str]:
        """The ``top`` functions of the patch set, then those of all others."""
        shown = [(owner, name, n) for (owner, name), n in self.functions.most_common() if owner != "waiting"]
        ours = [entry for entry in shown if entry[0] == "patch set"]
        others = [entry for entry in shown if entry[0] != "patch set"]
        return [f"  {100 * n / self.busy:5.1f}%  {owner:9}  {name}" for owner, name, n in ours[:top] + others[:top]]


def scheduler_of(deployment, name: str) -> int:
    group = next(process.pid for process in deployment.cluster.processes if process.name == name)
    return next(pid for pid, line in process_group.members(group).items() if b"sglang::scheduler" in line)


def record(deployment, variant, seconds: int, out: Path) -> list[Profile]:
    """Sample prefill's scheduler and that of this variant's decode worker at the same time."""
    py_spy = Path(sys.executable).parent / "py-spy"
    running = []
    for loop, name in (("prefill", "prefill-0"), ("decode", f"decode-{variant.workers[0]}")):
        raw = out / f"{name}-{variant.name}.raw"
        arguments = ["-p", str(scheduler_of(deployment, name)), "-d", str(seconds), "-r", "100", "-f", "raw"]
        line = [str(py_spy), "record", *arguments, "--full-filenames", "-o", str(raw)]
        running.append((loop, raw, subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)))
    found = []
    for loop, raw, process in running:
        _, error = process.communicate(timeout=seconds + 60)
        if process.returncode:
            raise PdRadixError(f"py-spy: {error.decode(errors='replace').strip()}")
        found.append(Profile(loop, variant.radix).read(raw))
    return found


def queued(url: str) -> int:
    status, content = http(url + "/get_load", timeout=30)
    return json.loads(content)[0]["num_waiting_reqs"] if status == 200 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=15, help="how long to sample (default: 15)")
    parser.add_argument("--backend", default="nixl", choices=("nixl", "mooncake"))
    parser.add_argument("--top", type=int, default=12, help="functions of ours and of others to print (default: 12)")
    args = parser.parse_args()
    profiles: list[Profile] = []
    with tempfile.TemporaryDirectory() as work:
        out = Path(work)
        model = str(make_model(out / "model", command.SHAPE))
        load = measure.LoadGenerator(model, out / "load.log")
        options = deploy.engine_options([], command.PAGE_SIZE, True)
        with deploy.Deployment(model, deploy.Shape(9600, 96), options, args.backend, out / "logs") as deployment:
            load.wait_ready()
            tokens = workload.Tokens(range(load.vocabulary // 4, load.vocabulary * 3 // 4), 1)
            sizes = workload.SharedPrefix(requests=REQUESTS, concurrency=REQUESTS, answer=96, at_once=20)
            requests = [
                {"ids": list(request.ids), "answer": request.answer, "arrival_s": None}
                for request in sizes.make("a", tokens).rounds[0]
            ]
            for variant in deployment.variants:
                deployment.use(variant)
                decode = deployment.decode_urls(variant)[0]
                job = {"url": deployment.url(variant), "concurrency": REQUESTS, "requests": requests}
                sender = threading.Thread(target=load.run, args=(job, lambda done: None, deployment.cluster.check))
                sender.start()
                deadline = time.monotonic() + 60
                while queued(decode) < QUEUED and time.monotonic() < deadline:
                    time.sleep(0.2)
                before = queued(decode)
                profiles += record(deployment, variant, args.seconds, out)
                print(f"flag {variant.name}: {before} queued before, {queued(decode)} after", flush=True)
                sender.join()
        load.close()
    print(
        "\n| loop | flag | patch set | stand-ins for GPU kernels | engine, NIXL | samples |\n|---|---|---|---|---|---|"
    )
    for profile in profiles:
        print(profile.row())
    for profile in profiles:
        print(f"\n{profile.loop}, flag {'on' if profile.radix else 'off'}", *profile.largest(args.top), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
