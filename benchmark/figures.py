"""The published figures, made of the records in ``benchmark/runs``: README's tables, docs/benchmarks.md's, all pairs,
and the pictures.

    python benchmark/figures.py                       # make them anew
    python benchmark/figures.py --take a=DIR demo=FILE

``--take NAME=DIR`` first takes the record of a report of ``pd-radix bench`` (its ``--work-dir``), or what
``pd-radix demo --json`` wrote, as record NAME. ``test/srt/tools/unit/test_published.py`` checks that nothing else is
published.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import published

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import record as records_of

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmark" / "runs"
PICTURES = ROOT / "docs" / "report"
#: The files with figures, the names between whose marks they are, and what makes them.
FILES = {
    ROOT / "README.md": {"figures": published.readme, "chat": published.readme_chat},
    ROOT / "docs" / "benchmarks.md": {"figures": published.benchmarks, "chat": published.benchmarks_chat},
    RUNS / "README.md": {"runs": published.docs},
}


def take(given: str) -> None:
    """Take the record ``NAME=PATH``. Raises PdRadixError."""
    name, equals, place = given.partition("=")
    path = Path(place)
    if not name or not equals:
        raise PdRadixError(f"--take {given}: write NAME=DIR of a report, or demo=FILE")
    source = path / "record.json" if path.is_dir() else path
    try:
        record = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PdRadixError(f"--take {given}: cannot read {source}: {error}") from None
    if "runs" in record:
        record = published.demo_record(record, "make demo")
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / f"{name}.json").write_text(records_of.as_text(record), encoding="utf-8")


def main() -> int:
    """Take records and write the files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=PATH", help="records to take first")
    args = parser.parse_args()
    try:
        for given in args.take:
            take(given)
        records = published.load(RUNS)
        for path, parts in FILES.items():
            text = path.read_text(encoding="utf-8")
            for name, make in parts.items():
                text = published.replaced(text, name, make(records))
            path.write_text(text, encoding="utf-8")
        for name, chart in published.charts(records).items():
            (PICTURES / f"{name}.svg").write_text(chart.picture(), encoding="utf-8")
    except PdRadixError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
