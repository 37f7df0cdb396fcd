"""A PD deployment simulated around the real decode worker, at a scale that two cores cannot carry.

Decode's queues, tree, pool and allocator are the real ones; prefill, links, decode steps and clients are models on a
simulated clock (``sim/times.py`` has their constants and where these come from). Slots of the pool are numbers only.

    python benchmark/simulate.py                                       # published, g and h in all modes
    python benchmark/simulate.py --workload h --modes new --set h.pool=16384 --set args.disaggregation_x=4
    python benchmark/simulate.py --modes new,aggregated --vary published.concurrency=8,32,128   # where a pair loses

Modes: ``off`` is a worker without the flag, the engine's own admission of whole prompts. ``today`` is admission in
order of arrival, ``new`` the defaults. ``local``, if it is named, is ``new`` with short remainders computed on decode
(``sim/local.py``). ``aggregated`` is as many ordinary servers with as much memory, which compute prompts before they
decode, ``mixed`` the same with both in one step (``sim/aggregated.py``). ``--set`` changes a size of a workload
(``h.pool=``), a constant of time (``times.step=``), an argument of the decode server (``args.NAME=``) or an option of
the ordinary ones (``args.chunk=``, ``args.router=affine``).

    python benchmark/simulate.py --check            # what was published against what is simulated; exits with 1 where a
                                                    # gate closes

Outcomes, their gates and which constant is fitted to which are in ``sim/published.py``, where constants come from in
``sim/times.py``. Any run of ``published`` in modes off and today is checked like this.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import torch  # noqa: E402
from sim.aggregated import Aggregated  # noqa: E402
from sim.balance import vary  # noqa: E402
from sim.deployment import Deployment  # noqa: E402
from sim.gates import closed, report  # noqa: E402
from sim.kinds import KINDS, fields_of  # noqa: E402
from sim.published import OFF, ON  # noqa: E402

ADMISSION, OVERTAKEN = "disaggregation_decode_admission", "disaggregation_decode_max_overtaken"
# What each mode asks of the decode server.
MODES: dict[str, dict[str, Any]] = {
    "off": {ADMISSION: "prefix", OVERTAKEN: 32},
    "today": {ADMISSION: "fcfs", OVERTAKEN: 0},
    "new": {ADMISSION: "prefix", OVERTAKEN: 32},
    "local": {ADMISSION: "prefix", OVERTAKEN: 32, "disaggregation_decode_local_prefill": "auto"},
    "aggregated": {"router": "cache_aware", "mixed": 0},
    "mixed": {"router": "cache_aware", "mixed": 1},
}
DEFAULT_MODES = ("off", "today", "new")


def simulate(key: str, mode: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Run one workload in one mode; returns the figures.

    Raises ValueError naming a setting that there is not.
    """
    sizes, options, constants = KINDS[key](), dict(MODES[mode]), {}
    for setting in settings:
        name, _, value = setting.partition("=")
        group, _, field = name.partition(".")
        if group == "args":
            options[field] = value if isinstance(options.get(field), str) else _parsed(value)
        elif group == "times":
            constants[field] = value
        elif group not in KINDS or field not in fields_of(KINDS[group]()):
            raise ValueError(f"--set {setting}: there is no such size")
        elif group == key:
            setattr(sizes, field, fields_of(sizes)[field](value))
    workload = sizes.make()
    for field, value in constants.items():
        if not hasattr(workload.times, field):
            raise ValueError(f"--set times.{field}: there is no such constant")
        setattr(workload.times, field, type(getattr(workload.times, field))(value))
    began = time.process_time()
    deployment = (Aggregated if "mixed" in options else Deployment)(workload, mode == "off", options)
    return {"workload": key, "mode": mode, **deployment.run(), "cpu_seconds": time.process_time() - began}


def _parsed(value: str) -> int | float | str:
    """An argument of the server as its parser would have it."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def line(figures: dict[str, Any]) -> str:
    """One run in one line, for trying things out."""
    f = figures
    return (
        f"{f['workload']:9} {f['mode']:6} {f['requests_per_s']:7.2f} req/s  "
        f"TTFT p50 {f['ttft_p50']:.3f} p99 {f['ttft_p99']:.3f} max {f['ttft_max']:.3f} s  "
        f"ITL {1e3 * f['itl_mean']:.1f} ms  sent/least {f['sent_over_least']:.2f}  hit {f['hit']:.2f}  "
        f"running {f['mean_running']:.1f} "
        f"(peak {f['peak_running']})  in transfer {f['mean_moving']:.1f}  "
        f"held {f['mean_held']:.0f} (peak {f['peak_held']})  retracted {f['retracted']}  "
        f"prefill busy {f['prefill_busy']:.2f}  [{f['cpu_seconds']:.1f} s CPU]"
    )


def published_runs(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs of ``published`` by mode, if it was run in both that were published; else none."""
    runs = {f["mode"]: f for f in results if f["workload"] == "published" and f["mode"] in (OFF, ON)}
    return runs if len(runs) == 2 else {}


def table(results: Sequence[dict[str, Any]]) -> str:
    """All runs as Markdown."""
    rows = [
        "| workload | mode | requests/s | / off | TTFT p50, s | p99 | ITL mean, ms | sent / least "
        "| running, mean (peak) | tokens held, mean (peak) | retracted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for f in results:
        off = [o["requests_per_s"] for o in results if o["workload"] == f["workload"] and o["mode"] == "off"]
        ratio = f"{f['requests_per_s'] / off[0]:.2f}" if off else ""
        rows.append(
            f"| {f['workload']} | {f['mode']} | {f['requests_per_s']:.2f} | {ratio} "
            f"| {f['ttft_p50']:.3f} | {f['ttft_p99']:.3f} | {1e3 * f['itl_mean']:.1f} | {f['sent_over_least']:.2f} "
            f"| {f['mean_running']:.1f} ({f['peak_running']}) | {f['mean_held']:,.0f} ({f['peak_held']:,}) "
            f"| {f['retracted']} |"
        )
    return "\n".join(rows)


def turns_table(results: Sequence[dict[str, Any]]) -> str:
    """Of runs of conversations whose turns are told apart, as Markdown; "" of others."""
    rows = [
        "| workload | mode | TTFT p50 (p99), s: first turns | turns 2 to 10 | turns from 11 on "
        "| later turns computed on decode | sent / least | ITL p50 (p99), ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in results:
        if "without_prefill" in f:
            ttft = (f"{f[f'{part}_ttft_p50']:.2f} ({f[f'{part}_ttft_p99']:.1f})" for part in ("first", "early", "late"))
            rows.append(
                f"| {f['workload']} | {f['mode']} | {' | '.join(ttft)} | {f['without_prefill']:.0%} "
                f"| {f['sent_over_least']:.3f} | {1e3 * f['itl_p50']:.1f} ({1e3 * f['itl_p99']:.1f}) |"
            )
    return "\n".join(rows) if len(rows) > 2 else ""


def main() -> int:
    """Simulate, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", default="published,g,h", metavar="KEY,...", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--modes", default=",".join(DEFAULT_MODES), metavar="MODE,...", help=f"of {', '.join(MODES)}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=VALUE,...", help="compare the two --modes")
    parser.add_argument("--check", action="store_true", help="the published run and its gates, nothing else")
    args = parser.parse_args()
    if args.check:
        args.workload, args.modes = "published", f"{OFF},{ON}"
    keys, modes = args.workload.split(","), args.modes.split(",")
    for asked, known in ((keys, KINDS), (modes, MODES)):
        if unknown := set(asked) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    if args.vary and len(modes) != 2:
        parser.error("--vary compares two modes: --modes new,aggregated")
    for given in args.vary:
        key = given.partition(".")[0] if given.partition(".")[0] in KINDS else keys[0]

        def one(mode: str, setting: str, key: str = key) -> dict[str, Any]:
            return simulate(key, mode, [*args.settings, setting])

        print(vary(given, modes, one, lambda figures: print(line(figures), file=sys.stderr, flush=True)) + "\n")
    if args.vary:
        return 0
    results: list[dict[str, Any]] = []
    # The published run comes first.
    for key in sorted(keys, key=lambda key: key != "published"):
        for mode in modes:
            try:
                results.append(simulate(key, mode, args.settings))
            except ValueError as error:
                parser.error(str(error))
            print(line(results[-1]), file=sys.stderr, flush=True)
    runs = published_runs(results)
    if runs:
        print(report(runs) + "\n")
    if not args.check:
        print("\n\n".join(filter(None, (table(results), turns_table(results)))))
    return 1 if runs and closed(runs) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.exit(main())
