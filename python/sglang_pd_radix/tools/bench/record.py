"""The short record of a report: each run's figures, its side and its turn.

Records cited in README are in ``benchmark/runs``.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from . import parted, report

Record = dict[str, Any]
#: Figures of a run beyond those of the report's tables.
MORE_FIGURES = ("prompt_tokens", "reused_tokens", "least_bytes", "duration_s")
DIGITS = 6


def compact(document: report.Document) -> Record:
    """The record of a report."""
    keys = (*(figure.key for figure in (*report.FIGURES, *report.MORE_FIGURES)), *MORE_FIGURES)
    workloads = []
    for entry in document["workloads"]:
        kept = {k: entry[k] for k in ("key", "title", "sizes", "requests", "page_size", "variants", "sides")}
        runs = [
            {k: run[k] for k in ("variant", "number", "turn", "different_answers", "answers_sha256")}
            | {"figures": {k: _short(run["figures"][k]) for k in keys if k in run["figures"]}}
            for run in entry["runs"]
        ]
        # One more than was checked: there are others.
        looks = entry["differences"]
        looks = looks[: len(looks) - len(parted.left_out(looks)[1:])]
        workloads.append({**kept, "differences": looks, "runs": runs})
    setting = dict(document["setting"])
    return {"setting": setting | {"command": _without_out(setting["command"])}, "workloads": workloads}


def _without_out(command: str) -> str:
    """The command without its report directory."""
    words = iter(shlex.split(command))
    # Without "=" the next word is its value.
    kept = [w for w in words if w.partition("=")[0] != "--work-dir" or ("=" not in w and not next(words, ""))]
    return shlex.join(kept)


def write(document: report.Document, out: Path) -> Path:
    """Write the record of a report beside it. Returns its path."""
    path = out / "record.json"
    try:
        path.write_text(as_text(compact(document)), encoding="utf-8")
    except OSError as error:
        raise PdRadixError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _short(value: float) -> float | None:
    """To `DIGITS` significant digits; null for NaN."""
    return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")


def as_text(record: Record) -> str:
    """JSON with one line per run."""
    lines: list[str] = []

    def kept(run: Record) -> str:
        lines.append(json.dumps(run, ensure_ascii=False))
        return f"run {len(lines) - 1}"

    folded = dict(record)
    if "workloads" in record:
        folded["workloads"] = [{**e, "runs": [kept(run) for run in e["runs"]]} for e in record["workloads"]]
    text = json.dumps(folded, indent=1, ensure_ascii=False)
    for i, line in enumerate(lines):
        text = text.replace(f'"run {i}"', line, 1)
    return text + "\n"
