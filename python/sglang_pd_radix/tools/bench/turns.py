"""All runs of one workload: the sides alternate, and so does the first one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_pd_radix.tools.progress import Display

from . import breakdown, parted, report
from .deploy import Deployment, Variant
from .measure import LoadGenerator, Run, run_once
from .workload import Workload

WARM_UP_REQUESTS = 16


def measure_all(
    deployment: Deployment,
    load: LoadGenerator,
    workload: Workload,
    runs: int,
    page_size: int,
    show: Display,
    exact: bool,
) -> dict[str, Any]:
    """Measure one workload; returns its entry of the report. All sides are warmed up alike; runs start with empty
    caches.

    exact: in this data type answers may part only where two tokens tie within `parted.LEAST_LIMIT` nats. Raises
    PdRadixError if a request fails.
    """
    found: list[tuple[int, Run]] = []
    variants = deployment.variants
    show.done(f"({workload.key}) {workload.title}")
    for variant in variants:
        # The first prompts of a new size set up memory and kernels; they are not measured.
        run_once(deployment, load, workload.beginning(WARM_UP_REQUESTS), variant, 0, page_size)
    for number in range(1, runs + 1):
        # Of any two sides each goes first in every other run, and neighbouring runs stay pairs.
        for turn, variant in enumerate(variants if number % 2 else reversed(variants), 1):
            label = f"({workload.key}) run {number} of {runs}, {variant.name}"
            result = run_once(deployment, load, workload, variant, number, page_size)
            found.append((turn, result))
            show.now(f"{label}: {_told(result)}")
    partings = parted.find([run for _, run in found])
    most = parted.MOST_JUDGED if exact else parted.MOST_LOOKED_AT
    looks = parted.look(deployment, load, workload, partings, show.now, most) if partings else []
    entry = _entry(workload, variants, page_size, found) | {"differences": looks}
    if exact:
        entry["problems"][:0] = parted.problems(looks)
    report.finish(entry)
    return entry


def _told(run: Run) -> str:
    f = run.figures
    pair = not math.isnan(f["sent_bytes"])
    parts = [
        f"{f['requests_per_s']:.2f} req/s",
        f"TTFT p50 {1e3 * f['ttft_p50_s']:.0f} ms",
        f"ITL mean {1e3 * f['itl_mean_s']:.1f} ms",
        *([f"{f['sent_bytes'] / 2**20:.1f} MiB sent"] if pair else []),
        f"{f['reused_tokens'] / f['prompt_tokens']:.0%} of prompts reused{' on decode' if pair else ''}",
    ]
    return ", ".join(parts)


def _entry(
    workload: Workload, variants: Sequence[Variant], page_size: int, found: Sequence[tuple[int, Run]]
) -> dict[str, Any]:
    """``found``: runs in order, each with its turn (from 1) within its number."""
    sides = {variant.name: variant.radix for variant in variants}
    different = report.compare_answers([run.texts for _, run in found])
    return {
        "key": workload.key,
        "title": workload.title,
        "sizes": workload.sizes,
        "requests": workload.requests,
        "chat": workload.chat,
        "notes": list(workload.notes),
        **breakdown.of([run for _, run in found]),
        "page_size": page_size,
        "variants": [variant.name for variant in variants],
        "problems": sorted({f"{r.variant}, run {r.number}: {p}" for _, r in found for p in r.problems}),
        "runs": [
            {
                "variant": run.variant,
                "radix": sides[run.variant],
                "number": run.number,
                "turn": turn,
                "figures": run.figures,
                "rounds": run.rounds,
                "answers_sha256": run.digest,
                "different_answers": count,
            }
            for (turn, run), count in zip(found, different, strict=True)
        ],
    }
