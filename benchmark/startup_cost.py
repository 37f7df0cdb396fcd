"""What the start-up hook costs a Python program that does not use the engine.

Starts the interpreter of this environment with and without the hook, alternating, each pair in random order, and prints
one Markdown row with the medians and the spread. "Without" is the same interpreter with the same .pth files but ours,
in throw-away directories, so nothing else differs.

    python benchmark/startup_cost.py [--runs 200] [--limit-ms 5]

Exits with 1 if the hook costs more than the limit, or if the "with" side does not have the hook.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[1] / "python"
HOOK = "sglang_pd_radix.pth"


def start_ms(site: Path, code: str = "pass") -> float:
    """Wall time in ms of a Python start that reads the .pth files of ``site`` and nothing else of this environment."""
    program = f"import site; site.addsitedir({str(site)!r}); {code}"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, env={"PATH": os.environ.get("PATH", "")})
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    """Measure, print the row, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="starts per side (default 200)")
    parser.add_argument("--limit-ms", type=float, default=5.0, help="fail above this many ms (default 5)")
    args = parser.parse_args()
    if args.runs < 2:
        parser.error("--runs must be at least 2")

    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Path(folder, name) for name in ("without", "with")}
        for name, site in sides.items():
            site.mkdir()
            # Both have the package in reach, as an installation has; only one is told to start it.
            (site / "_path.pth").write_text(f"{PYTHON}\n")
            if name == "with":
                (site / HOOK).write_text((PYTHON / HOOK).read_text())
        check = "import sys; sys.exit('sglang_pd_radix.patching.boot' not in sys.modules)"
        try:
            start_ms(sides["with"], check)
        except subprocess.CalledProcessError:
            print("the hook did not start: is python/sglang_pd_radix complete?", file=sys.stderr)
            return 1
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(-5, args.runs):  # the first five warm the disk cache and the byte code
            for name in random.sample(sorted(sides), 2):
                taken = start_ms(sides[name])
                if turn >= 0:
                    times[name].append(taken)

    cost = statistics.median(on - off for on, off in zip(times["with"], times["without"], strict=True))
    cells = [f"{len(times['with'])}"]
    for name in ("without", "with"):
        low, middle, high = statistics.quantiles(times[name], n=4)
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    print("| Starts per side | Without, ms (quartiles) | With, ms (quartiles) | Cost, ms (median of pairs) |")
    print("|---|---|---|---|")
    print("| " + " | ".join([*cells, f"{cost:.2f}"]) + " |")
    return 0 if cost <= args.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
