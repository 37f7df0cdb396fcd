"""Where requests are while few of them decode, and who has the processor then: workload (a), a real pair.

    python benchmark/waves.py [--sides off,on,target=MS,...] [--set a.requests=N] [--json FILE]

One prefill and a decode worker of each side, as `pd-radix bench` starts them, one run of (a) each. Several times a
second both workers are asked how many requests they have in which state, and what their processes have used of the
processor. Of the middle half of a run, a row for the quarter of the time in which the fewest requests decode, and for
that in which the most do: the mean of requests in each state, and of cores that prefill's scheduler, decode's, and all
else use.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.bench import command, deploy, measure
from sglang_pd_radix.tools.bench.goodput import TARGET_OPTION
from sglang_pd_radix.tools.bench.workload import SharedPrefixes, Tokens
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.workers import server_info

EVERY_S = 0.25
CORES = ("prefill", "decode", "others")


def side_of(text: str) -> deploy.Side:
    """Of ``off``, ``on`` or ``target=MS``. Raises PdRadixError."""
    name, _, target = text.partition("=")
    if name in ("off", "on"):
        return deploy.Side(name, name == "on", (), (("SGLANG_CPU_SHARED_PREFIX_ATTENTION", "0"),))
    if name == "target" and target:
        return deploy.Side(text, True, (TARGET_OPTION, target), (("SGLANG_CPU_SHARED_PREFIX_ATTENTION", "0"),))
    raise PdRadixError(f"--sides {text}: not off, on or target=MS")


def cpu_s(deployment: deploy.Deployment, decode: str) -> dict[str, float]:
    """Seconds of a processor that have been used so far, by whom."""
    used = dict.fromkeys(CORES, 0.0)
    for process in deployment.cluster.processes:
        for pid, line in process_group.members(process.pid).items():
            whose = process.name.partition("-")[0] if b"sglang::scheduler" in line else "others"
            if whose == "decode" and process.name != decode:
                continue
            try:
                used[whose] += sum(psutil.Process(pid).cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
    used["others"] += sum(psutil.Process().cpu_times()[:4])
    return used


class Watch(threading.Thread):
    """Looks at a prefill and a decode worker until it is told to stop."""

    def __init__(self, deployment: deploy.Deployment, variant: deploy.Variant):
        super().__init__(daemon=True)
        self.deployment, self.decode = deployment, deployment.decode_urls(variant)[0]
        self.name_of_decode = f"decode-{variant.workers[0]}"
        self.looks: list[dict[str, Any]] = []
        self.done = threading.Event()

    def run(self) -> None:
        before, at = cpu_s(self.deployment, self.name_of_decode), time.monotonic()
        while not self.done.wait(EVERY_S):
            try:
                pools = [server_info(url)["internal_states"][0]["kv_pool"] for url in (self.prefill, self.decode)]
            except PdRadixError:
                continue
            used, now = cpu_s(self.deployment, self.name_of_decode), time.monotonic()
            prefill, decode = (pool["requests"] for pool in pools)
            look = {f"prefill {state}": n for state, n in prefill.items()}
            look |= {f"decode {state}": n for state, n in decode.items()}
            look |= {name: (used[name] - before[name]) / (now - at) for name in CORES}
            self.looks.append({"at": now, **look})
            before, at = used, now

    @property
    def prefill(self) -> str:
        return self.deployment.prefill_urls[0]


def means(looks: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(look[name] for look in looks) / len(looks) for name in looks[0] if name != "at"}


def quarters(looks: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, float]]]:
    """The middle half of a run: where fewest decode, all of it, and where most do."""
    begin, end = looks[0]["at"], looks[-1]["at"]
    middle = [k for k in looks if begin + (end - begin) / 4 <= k["at"] <= begin + 3 * (end - begin) / 4]
    ordered = sorted(middle, key=lambda look: look["decode running"])
    quarter = max(1, len(ordered) // 4)
    return [("fewest", means(ordered[:quarter])), ("all", means(ordered)), ("most", means(ordered[-quarter:]))]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown of all sides."""
    states = ("prefill bootstrap", "prefill waiting", "prefill running", "prefill sending")
    states += ("decode handshake", "decode waiting", "decode held_back", "decode transfer", "decode received")
    heading = ["side", "decode", "requests decoding", *states, *(f"cores, {name}" for name in CORES)]
    rows = ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
    for side, run in found.items():
        for name, mean in quarters(run["looks"]):
            cells = [side, name, f"{mean['decode running']:.0f}", *(f"{mean[state]:.1f}" for state in states)]
            rows.append("| " + " | ".join([*cells, *(f"{mean[core]:.2f}" for core in CORES)]) + " |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="off,on", metavar="NAME,...")
    parser.add_argument("--set", action="append", default=[], metavar="a.NAME=VALUE", dest="settings")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    sizes = SharedPrefixes()
    for setting in args.settings:
        name, _, value = setting.removeprefix("a.").partition("=")
        if not hasattr(sizes, name):
            parser.error(f"--set {setting}: there is no such size")
        setattr(sizes, name, type(getattr(sizes, name))(value))
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work)
        model = str(make_model(out / "model", command.SHAPE))
        load = measure.LoadGenerator(model, out / "load.log")
        options = deploy.engine_options([], command.PAGE_SIZE, True)
        sides = [side_of(text) for text in args.sides.split(",")]
        shape = deploy.Shape(sizes.pool, sizes.reserve)
        with deploy.Deployment(model, shape, options, "nixl", out / "logs", sides=sides) as deployment:
            load.wait_ready()
            workload = sizes.make("a", Tokens(load.words, 1))
            for variant in deployment.variants:
                deployment.use(variant)
                watch = Watch(deployment, variant)
                watch.start()
                run = measure.run_once(deployment, load, workload, variant, 1, command.PAGE_SIZE, 60.0)
                watch.done.set()
                watch.join()
                figures = {name: run.figures[name] for name in ("requests_per_s", "ttft_p50_s", "itl_mean_s")}
                found[variant.name] = {"figures": figures, "looks": watch.looks}
                print(variant.name, figures, file=sys.stderr, flush=True)
        load.close()
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
