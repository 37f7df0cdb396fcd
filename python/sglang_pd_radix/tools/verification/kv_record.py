"""Records the KV of each answer, read through the request's req_to_token slot when it ends.

A worker with `DIRECTORY` in its environment writes one file per ended request: its tokens, and for each token and layer
a sketch of K and V. A sketch is `WIDTH` random projections, whose distances match those of the vectors within about a
fifth. KV of the same tokens at the same positions has the same sketch except for rounding; another token's is as far
away as it is long.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The directory for a worker's records; unset: no records.
DIRECTORY = "SGLANG_PD_RADIX_KV_RECORDS"
# Projections of each vector.
WIDTH = 16
# What the buffers of a pool hold, by how many kinds there are.
NAMES = {1: ("the latent",), 2: ("K", "V"), 3: ("the latent", "the index key", "the index key's scale")}
_UNREADABLE = "unreadable.txt"


@dataclass(frozen=True)
class Record:
    """One request on one rank. tokens: of prompt and answer. prompt: number of the prompt's. kv: sketches [tokens with
    KV, buffers, WIDTH]. kinds: of buffers, each of all layers (`NAMES`). rank: of ``ranks`` of
    attention."""

    tokens: tuple[int, ...]
    prompt: int
    kv: npt.NDArray[np.float32]
    kinds: int
    rank: int
    ranks: int


# ------------------------------------------------------------------------------------------------------- in the worker


def install() -> None:
    """Record ended requests in this process's scheduler, once it is imported and has its pools."""
    import wrapt

    wrapt.register_post_import_hook(lambda module: when_made(module.Scheduler, _watch), SCHEDULER)


SCHEDULER = "sglang.srt.managers.scheduler"


def when_made(scheduler_class: Any, do: Callable[[Any], None]) -> None:
    """Call ``do`` with each scheduler once it is complete.

    May be called before the patch set is applied: its scheduler, with another cache, then derives from this one.
    """
    make = scheduler_class.__init__

    def make_and_do(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        make(scheduler, *args, **kwargs)
        do(scheduler)

    scheduler_class.__init__ = make_and_do


def _watch(scheduler: Any) -> None:
    directory = Path(os.environ[DIRECTORY])
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    kinds = buffers_of(pool)
    if not kinds:
        (directory / _UNREADABLE).write_text(type(pool).__name__)
        return
    recorder = Recorder(directory, kinds, scheduler.attn_tp_rank, scheduler.attn_tp_size)
    tree = scheduler.tree_cache
    finish = tree.cache_finished_req

    def record_and_finish(req: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_insert", True) and req.output_ids:
            recorder.write(req, scheduler.req_to_token_pool.req_to_token[req.req_pool_idx])
        return finish(req, *args, **kwargs)

    tree.cache_finished_req = record_and_finish


def buffers_of(pool: Any) -> list[list[Any]]:
    """Full-attention buffers, each [pages, tokens of a page, ...], by layers, of each kind (`NAMES`).

    Empty for other kinds of pools.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

    # Of a hybrid model.
    pool = getattr(pool, "full_kv_pool", pool)
    if type(pool) is MHATokenToKVPool:
        found = [pool.k_buffer, pool.v_buffer]
    elif type(pool) in (MLATokenToKVPool, NSATokenToKVPool):
        found = [pool.kv_buffer]
    else:
        return []
    kinds = [[buffer.view(pool.dtype).unsqueeze(1) for buffer in buffers] for buffers in found]
    if type(pool) is NSATokenToKVPool:
        # In a row for each page: the keys of all its tokens, then their scales.
        keys, of_page = pool.page_size * pool.index_head_dim, (pool.page_size, -1)
        index = pool.index_k_with_scale_buffer
        kinds.append([rows[:, :keys].unflatten(1, of_page).view(torch.float8_e4m3fn) for rows in index])
        kinds.append([rows[:, keys:].unflatten(1, of_page).view(torch.float32) for rows in index])
    return kinds


def rows_of(buffer: Any, slots: Any) -> Any:
    """A copy of the rows ``slots`` of a buffer, of its type."""
    import torch

    # As bytes: torch cannot index eight-bit floats on a CPU.
    rows = buffer.view(torch.uint8)[slots // buffer.shape[1], slots % buffer.shape[1]]
    return rows.view(buffer.dtype)


class Recorder:
    """Writes the records of one rank. kinds: see `buffers_of`."""

    def __init__(self, directory: Path, kinds: Sequence[Sequence[Any]], rank: int, ranks: int) -> None:
        self._directory, self._at = directory, [len(kinds), rank, ranks]
        self._buffers = [buffer for buffers in kinds for buffer in buffers]
        self._signs = {width: signs(width) for width in {buffer[0, 0].numel() for buffer in self._buffers}}
        self._count = 0

    def sketch(self, slots: Any) -> npt.NDArray[np.float32]:
        """[slots, buffers, WIDTH]. Synchronizes with the device."""
        import torch

        rows = []
        for buffer in self._buffers:
            vectors = rows_of(buffer, slots.to(buffer.device)).reshape(len(slots), -1).float()
            rows.append(vectors @ torch.from_numpy(self._signs[vectors.shape[1]]).to(vectors.device))
        return torch.stack(rows, 1).cpu().numpy()

    def write(self, req: Any, row: Any) -> None:
        """row: the request's req_to_token row."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        # With overlapped steps the request has one more slot, which the step in flight has yet to write.
        known = min(req.kv_committed_len, len(tokens) - 1)
        final = self._directory / f"{os.getpid()}-{self._count:06}.npz"
        self._count += 1
        partial = final.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                tokens=np.array(tokens, dtype=np.int64),
                kv=self.sketch(row[:known].long()),
                at=np.array([len(req.origin_input_ids), *self._at]),
            )
        partial.replace(final)


def signs(width: int) -> npt.NDArray[np.float32]:
    """Projections of vectors of ``width`` numbers, [width, WIDTH]; equal in all processes."""
    rnd = np.random.Generator(np.random.PCG64(width))
    return (rnd.integers(0, 2, (width, WIDTH)) * 2 - 1).astype(np.float32) / np.float32(np.sqrt(WIDTH))


# --------------------------------------------------------------------------------------------------------- in `verify`


class Records:
    """Records written by the workers with this directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def unreadable(self) -> str | None:
        """The kind of pool that cannot be recorded, if any."""
        path = self.directory / _UNREADABLE
        return path.read_text() if path.exists() else None

    def take(self) -> list[Record]:
        """Remove and return all records, in each worker's order."""
        found = []
        for path in sorted(self.directory.glob("*.npz")):
            with np.load(path) as file:
                prompt, kinds, rank, ranks = (int(value) for value in file["at"])
                found.append(Record(tuple(file["tokens"].tolist()), prompt, file["kv"], kinds, rank, ranks))
            path.unlink()
        return found

    def take_all_of(self, wanted: Iterable[tuple[int, ...]], whole: bool = True, wait_s: float = 10.0) -> ByTokens:
        """Take the records of the requests with these tokens, one per rank; drop others.

        whole: tokens are of prompt and answer, not of the prompt alone. Waits for ranks behind the one that answers;
        later records count as missing.
        """
        missing, found, end = set(wanted), ByTokens(), time.monotonic() + wait_s
        while missing and not self.unreadable:
            for record in self.take():
                key = record.tokens if whole else record.tokens[: record.prompt]
                if key in missing:
                    ranks = found.setdefault(key, {})
                    ranks[record.rank] = record
                    if len(ranks) == record.ranks:
                        missing.discard(key)
            if time.monotonic() > end:
                break
            if missing:
                time.sleep(0.02)
        return found


class ByTokens(dict[tuple[int, ...], dict[int, Record]]):
    """Records by a request's tokens, and by rank."""


def environment(directory: Path, inherited: dict[str, str]) -> dict[str, str]:
    """Environment of a worker that writes records to ``directory``."""
    path = [str(Path(__file__).parent / "worker"), *filter(None, [inherited.get("PYTHONPATH")])]
    return {DIRECTORY: str(directory), "PYTHONPATH": os.pathsep.join(path)}


# ---------------------------------------------------------------------------------------------------------- difference


@dataclass(frozen=True)
class KvDifference:
    """Largest deviation of KV relative to its size, and its place.

    token: index in the request. layer, kind: of which layer what (`NAMES`). tokens: number compared.
    """

    most: float
    token: int
    layer: int
    kind: str
    rank: int
    tokens: int

    def __str__(self) -> str:
        if self.token == self.tokens:
            return f"KV from token {self.token + 1} on, which is missing on rank {self.rank},"
        return f"{self.kind} of token {self.token + 1} in layer {self.layer + 1}, rank {self.rank}"


def kv_difference(seen: Record, truth: Record, may_lack: int = 0) -> KvDifference:
    """Compare two records of the same tokens on the same rank.

    NaN counts as infinite, and so does KV missing in either. The last token has none; with speculation ``may_lack``
    tokens before it, accepted in the last step, may have none either.
    """
    tokens, expected = min(len(seen.kv), len(truth.kv)), max(1, len(seen.tokens) - 1 - may_lack)
    if tokens < expected:
        return KvDifference(math.inf, tokens, 0, "KV", seen.rank, tokens)
    a, b = seen.kv[:tokens].astype(np.float64), truth.kv[:tokens].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart, size = np.linalg.norm(a - b, axis=-1), np.linalg.norm(b, axis=-1)
        # A small vector is rounded like its larger neighbours.
        parts = apart / np.maximum(np.maximum(size, np.median(size, axis=0)), np.finfo(np.float64).tiny)
    parts = np.where(np.isfinite(parts), parts, np.inf)
    token, buffer = np.unravel_index(int(parts.argmax()), parts.shape)
    layers = parts.shape[1] // truth.kinds
    kind = NAMES[truth.kinds][int(buffer) // layers]
    return KvDifference(float(parts[token, buffer]), int(token), int(buffer) % layers, kind, seen.rank, tokens)
