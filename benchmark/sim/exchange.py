"""What requests per second cost in ITL: flag off by `--max-running-requests`, and on by a target for ITL.

The target's gate is the real one, and learns from the simulated steps. It counts tokens, so that slots are tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Run = Callable[[str, list[str]], Mapping[str, Any]]
TARGET = "args.disaggregation_decode_itl_target"
# Parts of what flag off runs at most, and multiples of its mean ITL, that are tried; None: no target.
PARTS = (1.0, 0.75, 0.5, 0.25)
TARGETS = (0.75, 1.0, 1.5, None)


def exchange(key: str, run: Run, told: Callable[[str], None]) -> str:
    """Both curves of a workload as Markdown, and what is left at the ITL of flag off.

    run: of a mode with settings. told: each row as it comes. Raises ValueError for a workload without `max_running`.
    """
    off = run("off", [])
    rows = [
        "| side | | requests/s | / off | ITL mean, ms | / off | p90, ms | TTFT p50, s | p90, s | running, mean |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def row(side: str, bound: str, found: Mapping[str, Any]) -> None:
        per_s, itl = found["requests_per_s"], found["itl_mean"]
        rows.append(
            f"| {side} | {bound} | {per_s:.2f} | {per_s / off['requests_per_s']:.2f} | {1e3 * itl:.1f} "
            f"| {itl / off['itl_mean']:.2f} | {1e3 * found['itl_p90']:.1f} | {found['ttft_p50']:.2f} "
            f"| {found['ttft_p90']:.2f} | {found['mean_running']:.1f} |"
        )
        told(rows[-1])

    for part in PARTS:
        most = max(1, round(part * off["peak_running"]))
        row("off", f"at most {most}", off if part == 1.0 else run("off", [f"{key}.max_running={most}"]))
    words: list[str] = []
    for side, settings in (("on", []), ("on, shared read once", ["times.shares=1"])):
        for multiple in TARGETS:
            if multiple is None:
                row(side, "", run("new", settings))
                continue
            target = 1e3 * multiple * off["itl_mean"]
            found = run("new", [*settings, f"{key}.scale=1", f"{TARGET}={target:.3f}"])
            row(side, f"target {target:.1f} ms", found)
            if multiple == 1.0:
                ratio = found["requests_per_s"] / off["requests_per_s"]
                words.append(f"{side}, with flag off's own mean ITL as the target: {ratio:.2f} times its requests/s")
    return "\n".join([*rows, "", *words])


def checked(keys: Sequence[str]) -> str:
    """The one workload of which the curves are asked. Raises ValueError."""
    if len(keys) != 1 or keys[0] not in ("published", "a"):
        raise ValueError("--exchange is of one workload, published or a")
    return keys[0]
