"""The servers under comparison: one prefill worker, and decode workers without and with the cache.

Sides share the prefill worker, so that only decode differs; its cache is emptied before every run. Each side has its
own router. Decode workers of the other sides are paused (SIGSTOP): an idle engine polls without a break, which would
slow down the measured side on few cores.

The side ``aggregated`` has as many ordinary servers as a pair has workers, with the same total KV memory and a router
of their own. They are paused while a pair is measured, and vice versa.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host, torch_layers
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.cluster import (
    RADIX_FLAG,
    Cluster,
    Gateway,
    Progress,
    aggregated_on,
    compared_on,
    gpu_count,
    has_option,
    http,
    named_gateway,
    with_defaults,
)
from sglang_pd_radix.tools.cluster.local_http import status_text
from sglang_pd_radix.tools.up import RADIX_ALIAS
from sglang_pd_radix.tools.workers import (
    DECODE_COUNTERS,
    KV_FIGURES,
    PREFILL_COUNTERS,
    empty_caches,
    idle_pools,
    parse_counters,
    problems_of,
    server_info,
    summed_counters,
)

OPTIONAL_COUNTERS = {
    "blocked": "sglang:decode_admissions_blocked_total",
    "computed_tokens": "sglang:decode_computed_tokens_total",
    "computed_requests": "sglang:decode_local_prefills_total",
}
# An ordinary server's counters, by those of decode. A server without a hit exports none.
ORDINARY_COUNTERS = {"prompt_tokens": "sglang:prompt_tokens_total", "reused_tokens": "sglang:cached_tokens_total"}
# Prefill's least pool: at least decode's, otherwise prefill would recompute long prefixes again and again. And more
# requests than any workload here has.
PREFILL_POOL = 49152
RUNNING_REQUESTS = 256
# The routers' policy.
POLICY = "cache_aware"


@dataclass(frozen=True)
class Shape:
    """A decode worker's pool, the reserve per request, and prefill's least pool, all in tokens."""

    pool: int
    reserve: int
    prefill: int = PREFILL_POOL

    @property
    def prefill_pool(self) -> int:
        """Of the prefill worker: at least decode's."""
        return max(self.prefill, self.pool)


@dataclass(frozen=True)
class Side:
    """A side: decode workers without (``off``) or with the flag, their engine options and environment; or ordinary
    servers (``aggregated``)."""

    name: str
    radix: bool = True
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    aggregated: bool = False

    @property
    def refuses(self) -> bool:
        """Whether its decode worker answers 503 to requests that would be late."""
        return any(option.endswith(",refuse") for option in self.options)

    @classmethod
    def parse(cls, name: str, text: str) -> Side:
        """A side with the flag from a shell-like ``text``: ``VARIABLE=value ... --option ...``."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise PdRadixError(f"{name}: {text}: {error}") from None
        env = list(itertools.takewhile(_ASSIGNMENT.match, words))
        options = words[len(env) :]
        if options and not options[0].startswith("-"):
            raise PdRadixError(f"{name}: {options[0]} is neither an engine option nor VARIABLE=value")
        if has_option(options, RADIX_FLAG, RADIX_ALIAS):
            raise PdRadixError(f"{name}: {RADIX_FLAG} is there already: remove it")
        pairs = [assignment.partition("=")[::2] for assignment in env]
        return cls(name, True, tuple(options), tuple(pairs))


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OFF, ON, AGGREGATED = Side("off", radix=False), Side("on"), Side("aggregated", aggregated=True)


@dataclass(frozen=True)
class Variant:
    """One side of a deployment. ``workers``: index of its decode worker, or of its ordinary servers if
    ``aggregated``. ``refuses``: see `Side.refuses`."""

    name: str
    radix: bool
    workers: tuple[int, ...]
    aggregated: bool = False
    refuses: bool = False

    @property
    def names(self) -> set[str]:
        """Names of its processes."""
        role = "engine" if self.aggregated else "decode"
        names = {f"{role}-{i}" for i in self.workers} | {f"router-{self.name}"}
        return names if self.aggregated else names | {"prefill-0"}


def variants(sides: Sequence[Side] = (OFF, ON)) -> list[Variant]:
    """All sides. Decode workers are numbered in their order; aggregated comes last."""
    return [
        Variant(side.name, side.radix, (0, 1) if side.aggregated else (i,), side.aggregated, side.refuses)
        for i, side in enumerate(sides)
    ]


@dataclass
class Deployment:
    """Use with ``with``; call `use` before each run."""

    model: str
    shape: Shape
    options: Sequence[str]
    backend: str
    log_dir: Path
    on_progress: Callable[[Progress], None] | None = None
    sides: Sequence[Side] = (OFF, ON)
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    prefill_options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # of all servers
    gateway: Gateway = field(default_factory=lambda: named_gateway(None))
    #: Interpreter of workers in another environment, which have no patch set and none of its counters.
    executable: str = ""
    on_wait: Callable[[], None] | None = None  # called while it starts or is asked, which ends with what it raises
    variants: list[Variant] = field(init=False)
    cluster: Cluster = field(init=False)
    #: By worker: whether its pages were part of the last `problems`, not only slots and buffers.
    counts_pages: dict[str, bool] = field(init=False, default_factory=dict)
    _used: Variant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        shape = self.shape
        self.variants = variants(self.sides)
        decode = ["--max-total-tokens", str(shape.pool), "--num-reserved-decode-tokens", str(shape.reserve)]
        sides = [side for side in self.sides if not side.aggregated]
        gpus = 0 if cpu_host.active() else gpu_count()
        places = compared_on(self.options, [side.options for side in sides], gpus)
        ordinary = [
            ["--max-total-tokens", str(pool_of_ordinary(shape)), *place]
            for place in aggregated_on(self.options, places[0], gpus)
            if len(sides) < len(self.sides)
        ]
        self.cluster = Cluster(
            self.model,
            decode=len(sides),
            common_args=self.options,
            prefill_args=["--max-total-tokens", str(shape.prefill_pool), *self.prefill_options],
            decode_args=[
                [*decode, *place, *([RADIX_FLAG] * side.radix), *side.options]
                for side, place in zip(sides, places, strict=True)
            ],
            env=self.env,
            prefill_env=self.prefill_env,
            decode_env=[dict(side.env) for side in sides],
            # Routers must not query paused workers.
            routers={v.name: (v.workers, self._routes) for v in self.variants if not v.aggregated},
            ordinary=len(ordinary),
            ordinary_args=ordinary,
            ordinary_routers={v.name: self._routes for v in self.variants if v.aggregated},
            gateway=self.gateway,
            backend=self.backend,
            log_dir=self.log_dir,
            on_progress=self.on_progress,
            on_wait=self.on_wait,
            worker_executable=self.executable,
        )

    @property
    def _routes(self) -> list[str]:
        """Further router options."""
        # A retry would go to the same pair, and hide a failure.
        return ["--policy", POLICY, "--disable-retries", *self.gateway.asks_nobody]

    def __enter__(self) -> Deployment:
        self.cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()

    def check(self) -> None:
        """Raise PdRadixError if a server has ended."""
        if self.on_wait:
            self.on_wait()
        self.cluster.check()

    @property
    def prefill_urls(self) -> list[str]:
        return self.cluster.prefill_urls

    def prefill_urls_of(self, variant: Variant) -> list[str]:
        """Its prefill workers; none if aggregated."""
        return [] if variant.aggregated else self.prefill_urls

    def decode_urls(self, variant: Variant) -> list[str]:
        """The workers that answer: decode workers or ordinary servers."""
        urls = self.cluster.engine_urls if variant.aggregated else self.cluster.decode_urls
        return [urls[i] for i in variant.workers]

    def url(self, variant: Variant) -> str:
        """The address for this variant's requests."""
        return self.cluster.router_urls[variant.name]

    def worker_urls(self, variant: Variant) -> list[str]:
        return [*self.prefill_urls_of(variant), *self.decode_urls(variant)]

    def use(self, variant: Variant) -> None:
        """Pause every other variant's workers and routers, and empty this variant's caches."""
        if self._used not in (None, variant):
            # Abandoned requests go on. Paused on decode, they would stay on prefill during the next measurement.
            empty_caches(self.cluster, self.decode_urls(self._used), timeout_s=20)
        self._used = variant
        self.cluster.resume(variant.names)
        self.cluster.pause({process.name for process in self.cluster.processes} - variant.names)
        empty_caches(self.cluster, self.worker_urls(variant), timeout_s=20)

    def info(self, variant: Variant) -> dict[str, Any]:
        """Server info of this variant's first decode worker."""
        return server_info(self.decode_urls(variant)[0])

    def used_peak(self, variant: Variant) -> float:
        """Most tokens held by requests on decode since the caches were emptied, from its own record.

        NaN if no single pool has all KV, and for ordinary servers, which have no such record.
        """
        urls = [] if variant.aggregated else self.decode_urls(variant)
        pools = [pool for url in urls for pool in idle_pools(url)]
        return float(sum(pool.get("used_peak", math.nan) for pool in pools)) if pools else math.nan

    def counters(self, variant: Variant) -> dict[str, float]:
        """Summed counters of prefill and this variant's decode workers, and their CPU time.

        For ordinary servers their own counters; others are NaN.
        """
        prefill, decode = self.prefill_urls_of(variant), self.decode_urls(variant)
        cpu_s = {"cpu_s": self._cpu_s([*prefill, *decode])}
        if self.executable:
            return _NO_PAIR | cpu_s
        if variant.aggregated:
            return _NO_PAIR | _ordinary_counters(decode) | cpu_s
        return {
            **summed_counters(prefill, decode, OPTIONAL_COUNTERS),
            "prefill_cpu_s": self._cpu_s(prefill),
            "decode_cpu_s": self._cpu_s(decode),
            **cpu_s,
        }

    def _cpu_s(self, urls: Sequence[str]) -> float:
        groups = [process.pid for process in self.cluster.processes if process.url in urls]
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for group in groups for pid in process_group.members(group))

    def problems(self, variant: Variant) -> list[str]:
        """Leaks in the pools of this variant's idle workers."""
        wrong = []
        names = {process.url: process.name for process in self.cluster.processes}
        for url in self.worker_urls(variant):
            keeps_tree = variant.radix and names[url].startswith("decode")
            # An ordinary server has no metadata buffers.
            pools = [(_NO_BUFFERS if variant.aggregated else {}) | pool for pool in idle_pools(url)]
            self.counts_pages[names[url]] = bool(pools) and all(key in pool for pool in pools for key in KV_FIGURES)
            wrong += problems_of(names[url], pools, keeps_tree)
        return wrong


def pool_of_ordinary(shape: Shape) -> int:
    """KV tokens of each ordinary server: in total as many as a pair has."""
    return (shape.prefill_pool + shape.pool) // 2


# Counters of a pair only.
_NO_PAIR = dict.fromkeys(
    (*PREFILL_COUNTERS, *DECODE_COUNTERS, *OPTIONAL_COUNTERS, "prefill_cpu_s", "decode_cpu_s"), math.nan
)
_NO_BUFFERS: dict[str, Any] = {"metadata_buffers": 0, "free_metadata_buffers": 0}


def _ordinary_counters(urls: Sequence[str]) -> dict[str, float]:
    """`ORDINARY_COUNTERS` of ordinary servers, summed. Raises PdRadixError if one is missing."""
    sums = dict.fromkeys(ORDINARY_COUNTERS, 0.0)
    for url in urls:
        status, content = http(url + "/metrics", timeout=30)
        if status != 200:
            raise PdRadixError(f"{url}/metrics answers {status_text(status)}")
        for name, value in parse_counters(content.decode(errors="replace"), ORDINARY_COUNTERS).items():
            sums[name] += value
    return sums


def engine_options(given: Sequence[str], page_size: int, made_model: bool) -> list[str]:
    """The options of all workers: the benchmark's defaults, overridden by the user's."""
    defaults: dict[str, str | None] = {
        "--enable-metrics": None,
        "--page-size": str(page_size),
        "--max-running-requests": str(RUNNING_REQUESTS),
    }
    if made_model and not cpu_host.active():
        defaults["--dtype"] = "float32" if torch_layers.wanted() else "bfloat16"
    return with_defaults(given, defaults)
