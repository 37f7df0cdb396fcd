"""Mutation testing of the patch files: which small changes of their code does no unit test notice?

    python test/srt/mutate.py map                      # which test executes which statement; once, minutes
    python test/srt/mutate.py run srt/mem_cache/decode_windows.py ... [--sample 60] [--seed 1]
    python test/srt/mutate.py table RESULTS.jsonl...

The patch files are overlays that a loader executes over the engine's modules, and importing the engine takes seconds;
so one pytest session imports everything and collects, and each mutant runs in a forked child of it: the child gives the
functions of the mutated file the code objects of the mutant, runs the tests that execute the mutated statement,
quickest first, and ends at the first failure. What is not in a function (constants, defaults, decorators) is not
mutated, nor are log lines and the texts of errors; a test that starts processes does not count for what those execute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest
from mutation.changes import Mutant, mutants
from mutation.forks import Forks, make_map, run_mutants

ROOT = Path(__file__).resolve().parents[2]


def table(paths: list[Path]) -> None:
    """One line a module, then what survived; of a mutant that was run more than once, the last."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    last = {(line["module"], line["index"]): line for line in lines}
    kinds = ["killed", "timed out", "survived", "not reached", "not applied"]
    print("| module | mutants | " + " | ".join(kinds) + " | killed or timed out |\n|---|" + "---|" * (len(kinds) + 2))
    for module in [*sorted({key[0] for key in last}), ""]:
        counts = [sum(x["outcome"] == kind and x["module"].startswith(module) for x in last.values()) for kind in kinds]
        share = 100 * (counts[0] + counts[1]) / max(1, sum(counts))
        print(f"| {module or 'all'} | {sum(counts)} | " + " | ".join(map(str, counts)) + f" | {share:.0f} % |")
    print()
    for _, x in sorted(last.items()):
        if x["outcome"] in kinds[2:]:
            print(
                f"{x['module']}:{x['line']} {x['function']}: {x['change']} ({x['outcome']}, {x.get('tests', 0)} tests)"
            )


def drawn(files: list[str], sample: int, seed: int, again: Path | None = None) -> list[Mutant]:
    """``sample`` mutants of each file at the most, by the seed. again: of those that these results have as not killed;
    of a mutant that was run more than once, the last."""
    chosen = []
    before = {(x["module"], x["index"]): x["outcome"] for x in map(json.loads, again.open())} if again else {}
    for module in files:
        found = mutants(module)
        if again:
            found = [m for m in found if before.get((m.module, m.index)) in ("survived", "not reached")]
        chosen += sorted(random.Random(seed).sample(found, min(sample, len(found))), key=lambda mutant: mutant.index)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["map", "run", "table"])
    parser.add_argument(
        "files", nargs="*", help="map: test files; run: patch files below python/sglang; table: results"
    )
    parser.add_argument("--sample", type=int, default=60, help="mutants of a file, at most, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=2, help="cases of a test function that one mutant has, at most")
    parser.add_argument("--most", type=float, default=8, help="seconds of tests that one mutant may have")
    parser.add_argument("--again", type=Path, help="run: only what this file of results has as not killed")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants" / "map.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants" / "results.jsonl")
    parser.add_argument("--tests", nargs="*", default=[str(ROOT / "test" / "srt" / "unit")], help="run: test files")
    args = parser.parse_args()
    if args.command == "table":
        return table([Path(name) for name in args.files])
    args.map.parent.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.command == "map":
        forks, tests = Forks(lambda forks: make_map(forks, args.map)), args.files or args.tests
    else:
        chosen = drawn(args.files, args.sample, args.seed, args.again)
        forks, tests = (
            Forks(lambda forks: run_mutants(forks, chosen, args.map, args.out, args.cases, args.most)),
            args.tests,
        )
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[forks]))


if __name__ == "__main__":
    main()
