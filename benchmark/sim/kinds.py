"""The workloads by their names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from sim.scale import Agents, Many
from sim.workload import Behind, Churn, Crowd, Published, Shared

Sizes = Published | Churn | Many | Behind | Agents
KINDS: dict[str, Callable[[], Sizes]] = {
    "published": Published,
    "a": Shared,
    "g": Churn,
    "h": Crowd,
    "i": Behind,
    "k": Agents,
    "many": Many,
    # Short questions, of which decode has all but the last.
    "chat": functools.partial(
        Many,
        requests=3000,
        documents=200,
        document=2048,
        question=64,
        answer=256,
        decodes=1,
        prefills=2,
        concurrency=64,
    ),
}


def fields_of(sizes: Sizes) -> dict[str, type]:
    """The options of a kind of workload and their types."""
    return {f.name: type(getattr(sizes, f.name)) for f in dataclasses.fields(sizes)}
