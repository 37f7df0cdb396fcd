"""A published PD deployment simulated around the real decode worker, at a scale that two cores cannot carry.

Decode's queues, tree, pool and allocator are the real ones; prefill, links, decode steps and clients are models on a
simulated clock (``sim/times.py`` has their constants and where these come from). Slots of the pool are numbers only.

    python benchmark/simulate.py            # exits with 1 where what was published does not come out
    python benchmark/simulate.py --set pool=1000000 --set times.step=0.03

Modes: ``off`` is a worker without the flag, the engine's own admission of whole prompts. ``today`` is admission in
order of arrival, as published; ``new`` the defaults. ``--set`` changes a size of the workload or a constant of time.
Outcomes, their gates and which constant is fitted to which are in ``sim/published.py``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import torch  # noqa: E402
from sim.deployment import Deployment  # noqa: E402
from sim.gates import closed, report  # noqa: E402
from sim.workload import Published  # noqa: E402

ADMISSION, OVERTAKEN = "disaggregation_decode_admission", "disaggregation_decode_max_overtaken"
# What each mode asks of the decode server.
MODES: dict[str, dict[str, Any]] = {
    "off": {ADMISSION: "prefix", OVERTAKEN: 32},
    "today": {ADMISSION: "fcfs", OVERTAKEN: 0},
    "new": {ADMISSION: "prefix", OVERTAKEN: 32},
}


def simulate(mode: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of a run in one mode. settings: ``NAME=VALUE``. Raises ValueError naming one that there is not."""
    sizes = Published()
    constants: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        group, dot, field = name.rpartition(".")
        if group == "times":
            constants[field] = value
        elif dot or not hasattr(sizes, name):
            raise ValueError(f"--set {setting}: there is no such size")
        else:
            setattr(sizes, name, type(getattr(sizes, name))(value))
    workload = sizes.make()
    for field, value in constants.items():
        if not hasattr(workload.times, field):
            raise ValueError(f"--set times.{field}: there is no such constant")
        setattr(workload.times, field, type(getattr(workload.times, field))(value))
    return {"mode": mode, **Deployment(workload, mode == "off", MODES[mode]).run()}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """All runs as Markdown."""
    rows = [
        "| mode | requests/s | / off | TTFT p50, s | p99 | ITL mean, ms | sent / least | hit "
        "| running, mean (peak) | tokens held, mean (peak) | retracted | prefill busy |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for f in runs:
        rows.append(
            f"| {f['mode']} | {f['requests_per_s']:.2f} | {f['requests_per_s'] / runs[0]['requests_per_s']:.2f} "
            f"| {f['ttft_p50']:.3f} | {f['ttft_p99']:.3f} | {1e3 * f['itl_mean']:.1f} | {f['sent_over_least']:.2f} "
            f"| {f['hit']:.2f} | {f['mean_running']:.1f} ({f['peak_running']}) "
            f"| {f['mean_held']:,.0f} ({f['peak_held']:,}) | {f['retracted']} | {f['prefill_busy']:.2f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Simulate, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    args = parser.parse_args()
    try:
        runs = {mode: simulate(mode, args.settings) for mode in MODES}
    except ValueError as error:
        parser.error(str(error))
    print(f"{report(runs)}\n\n{table(list(runs.values()))}")
    return 1 if closed(runs) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.exit(main())
