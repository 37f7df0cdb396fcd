"""Devices of engines: GPUs, or options by which several share one CPU host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host

from .options import ATTENTION_OPTIONS, DP_OPTIONS, PP_OPTIONS, TP_OPTIONS, has_option, option_value

# Per worker on a CPU host. By default the engine takes most of the memory for each worker's KV, and sizes tables for
# thousands of requests, which takes seconds to fill with zeros.
CPU_POOL_TOKENS = 32768
CPU_RUNNING_REQUESTS = 64
# Part of a GPU's memory for workers that share it; the rest is for activations and CUDA graphs.
_SHARED_GPU_MEMORY = 0.85
# Memory that others allocate during a worker's start counts against its part; a part this large leaves room for that.
_NEARLY_ALL = 0.8


def gpu_count() -> int:
    """GPUs visible to a worker started here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def cpu_options(args: Sequence[str]) -> list[str]:
    """Options that an engine on a CPU host needs beyond ``args``."""
    options: list[str] = []
    if not has_option(args, "--device"):
        options += ["--device", "cpu"]
    # The CPU backend does not work with whole-model compilation, and drafts have their own.
    if not has_option(args, *ATTENTION_OPTIONS, "--enable-torch-compile", "--speculative-algorithm"):
        options += ["--attention-backend", cpu_host.attention.NAME]
    if not has_option(args, "--dtype"):
        options += ["--dtype", "float32"]
    if not has_option(args, "--max-total-tokens", "--mem-fraction-static"):
        options += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    if not has_option(args, "--max-running-requests"):
        options += ["--max-running-requests", str(CPU_RUNNING_REQUESTS)]
    return options


def cpu_env(arguments: Sequence[Sequence[str]], backend: str) -> dict[str, str]:
    """Environment for engines with these arguments that share this CPU host."""
    cores = len(os.sched_getaffinity(0))
    # More spinning OpenMP threads than cores stall each other: ten times slower on two cores.
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // max(1, sum(map(_ranks, arguments)))))}
    if backend == "mooncake":
        wanted["MC_FORCE_TCP"] = "1"
    return wanted


def gpu_placement(arguments: Sequence[Sequence[str]], gpus: int) -> list[tuple[list[str], int]]:
    """Extra options and start wave of each worker on a host with ``gpus`` GPUs, from its arguments.

    Workers take the next GPUs in turn, except those with ``--base-gpu-id``. Workers that share a GPU get equal parts of
    its memory. The engine measures its part from the memory free at its start. So they start one after the other,
    unless pool sizes are given and each may take nearly all.
    """
    sizes = [_ranks(args) for args in arguments]
    if gpus == 0:
        return [([], 0) for _ in arguments]
    if max(sizes) > gpus:
        raise PdRadixError(f"a worker needs {max(sizes)} GPUs and this machine has {gpus}: lower --tp or --dp-size")
    first, cursor = [], 0
    for args, size in zip(arguments, sizes, strict=True):
        given = option_value(args, "--base-gpu-id")
        if given is not None:
            start = _gpu_named(given)
            if start < 0 or start + size > gpus:
                raise PdRadixError(
                    f"a worker needs {size} GPUs from --base-gpu-id {start} on, and this machine has {gpus}"
                )
            first.append(start)
            continue
        if cursor + size > gpus:
            cursor = 0
        first.append(cursor)
        cursor += size
    used = [set(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    shared = sum(sizes) > len(set().union(*used))
    together = all(_may_take(args) >= _NEARLY_ALL and has_option(args, "--max-total-tokens") for args in arguments)
    waves: list[int] = []
    for i, devices in enumerate(used):
        before = [] if together else [waves[j] for j in range(i) if used[j] & devices]
        waves.append(1 + max(before, default=-1))
    placement = []
    for args, start, wave, devices in zip(arguments, first, waves, used, strict=True):
        extra = [] if has_option(args, "--base-gpu-id") else ["--base-gpu-id", str(start)]
        if shared and not has_option(args, "--mem-fraction-static"):
            sharers = max(sum(gpu in other for other in used) for gpu in devices)
            part = _SHARED_GPU_MEMORY / sharers
            extra += ["--mem-fraction-static", f"{part / (1 - wave * part):.3f}"]
        placement.append((extra, wave))
    return placement


def compared_on(options: Sequence[str], sides: Sequence[Sequence[str]], gpus: int) -> list[list[str]]:
    """Options that put the decode workers of all ``sides`` on the same GPUs, one list for each.

    options: of all workers. sides: each side's own. Prefill has the first GPUs. Decode has the next ones, as many as
    the largest side takes; if there are too few, all share. Other GPUs would make sides incomparable. A side with its
    own ``--base-gpu-id`` runs there.
    """
    sizes = [_ranks([*options, *side]) for side in sides]
    size = max([_ranks(options), *sizes])
    if has_option(options, "--base-gpu-id") or gpus == 0:
        return [[] for _ in sides]
    if gpus // size < 2:
        # By default they take the next GPUs in turn, which differ if sides take different numbers.
        place = [] if {_ranks(options), *sizes} == {size} else ["--base-gpu-id", "0"]
    else:
        place = ["--base-gpu-id", str(size)]
    return [[] if has_option(side, "--base-gpu-id") else [*place] for side in sides]


def aggregated_on(options: Sequence[str], decode: Sequence[str], gpus: int) -> list[list[str]]:
    """Options that put two ordinary engines on a pair's GPUs: one on prefill's, one on decode's.

    options: of all workers. decode: of the pair's decode worker, as in `compared_on`.
    """
    if has_option(options, "--base-gpu-id") or gpus == 0:
        return [[], []]
    first = ["--base-gpu-id", "0"]  # also the place of a decode worker without one
    return [first, list(decode) or first]


def _gpu_named(given: str) -> int:
    try:
        return int(given)
    except ValueError as error:
        raise PdRadixError(f"--base-gpu-id takes a number: {error}") from None


def _may_take(args: Sequence[str]) -> float:
    try:
        return float(option_value(args, "--mem-fraction-static") or 0)
    except ValueError as error:
        raise PdRadixError(f"--mem-fraction-static takes a number: {error}") from None


def _ranks(args: Sequence[str]) -> int:
    """Computing processes of an engine, each on its own GPU if there are any."""
    try:
        ranks = int(option_value(args, *TP_OPTIONS) or 1)
        ranks *= int(option_value(args, *PP_OPTIONS) or 1)
        data_parallel = int(option_value(args, *DP_OPTIONS) or 1)
    except ValueError as error:
        raise PdRadixError(f"--tp, --pp-size and --dp-size take a number: {error}") from None
    return ranks if has_option(args, "--enable-dp-attention") else ranks * data_parallel
