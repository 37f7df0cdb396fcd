"""A storage below host memory (L3): what has been there comes back into host memory before a request is admitted.

storage_keys.py     what pages are called; storage_backend.py: what a storage does with one
storage_backends.py the backends: storage_files.py, storage_nixl.py, storage_mooncake.py
storage_pages.py    bytes of pages in host memory; storage_threads.py: threads
storage_writes.py   what is written; storage_tree.py: the tree over host memory, which knows what its pages are called
storage_fetches.py  what requests wait for; storage_reads.py: what threads do for one of them

Only what host memory holds is promised to a prefill: a fetch that fails, or takes too long, costs its hit.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier.storage_backends import BACKENDS
from sglang.srt.mem_cache.host_tier.storage_fetches import Fetches, Limits
from sglang.srt.mem_cache.host_tier.storage_keys import model_namespace
from sglang.srt.mem_cache.host_tier.storage_options import StorageOptions
from sglang.srt.mem_cache.host_tier.storage_pages import HostPages
from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
from sglang.srt.mem_cache.host_tier.storage_writes import Writes
from sglang.srt.mem_cache.kv_namespace import rank_namespace

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.server_args import ServerArgs

__all__ = ["HostStorage", "add_storage"]

logger = logging.getLogger(__name__)

# Part of host memory that may wait to be written.
WAITING_PART = 1 / 4


class HostStorage:
    """The storage of one rank."""

    def __init__(self, host: StoredHostTree, threads: StorageThreads, limits: Limits, writes: bool = True):
        """host: the tree over host memory, empty. writes: False where another rank writes the same."""
        self._host, self.threads = host, threads
        self.fetches = Fetches(host, threads, limits)
        self.writes = Writes(threads, int(host.pool_size * WAITING_PART), writes)
        host.writes, host.pages = self.writes, threads.pages
        self.stopped = False
        # Whether a look is under way if somebody else has cleared it.
        self._looking = False
        threads.write(lambda buffer: threads.files.remove_left())

    # ---- requests ----

    def fetch(self, rid: str, watch: Watch | None, host_watch: Watch | None, num_tokens: int) -> None:
        """See `Fetches.ask`. Before what it generates is written, it is known what others have removed by a clear."""
        if self.stopped:
            return
        self.fetches.ask(rid, watch, host_watch, num_tokens)
        if self.writes.enabled and not self._looking:
            self._looking = True
            self.threads.write(lambda buffer: self._look_if_cleared())

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing."""
        return self.fetches.is_done(rid)

    def leave(self, rid: str) -> None:
        """``rid`` has been admitted or is gone; on all ranks in the same step."""
        self.fetches.leave(rid)

    def brought(self, rid: str, start: int, end: int) -> int:
        """How many of these tokens of its prompt were fetched for ``rid``, which is being admitted."""
        first, last = self.fetches.brought.get(rid, (0, 0))
        return max(0, min(last, end) - max(first, start))

    def advance(self, group: Any, alone: bool) -> None:
        """Once in a step, on all ranks of ``group``; alone: there is one."""
        self.fetches.advance(group, alone)

    # ---- figures ----

    @property
    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self.fetches.open)

    def state(self) -> dict[str, Any]:
        """Tokens: being read and waiting to be written; the rest since the start. And requests that wait."""
        return {
            **asdict(self.threads.counters),
            "dropped": self.writes.dropped,
            "corrupt": self.threads.files.corrupt * self._host.page_size,
            "loading": self.fetches.loading_tokens,
            "waiting": self.writes.waiting,
            "requests": len(self.fetches.open),
            "in_use": not self.stopped,
        }

    # ---- ends ----

    def give_up(self) -> None:
        """Ranks differ, and all come here: requests go on without it."""
        self.fetches.give_up()

    def forget(self) -> None:
        """Host memory is about to be emptied. What is stored stays."""
        self.fetches.forget()
        self.writes.forget()
        self.threads.pages.given_away += 1

    def clear(self) -> Future[bool]:
        """Remove what this rank's workers have stored, in a thread. Returns whether that was done, when it is known.

        In the thread that writes: what was to be written before is not there then, and what is written from now on is.
        So a rank for which another one writes leaves it to that: later, it would remove what has been written since.
        """
        self.writes.forget()
        done: Future[bool] = Future()
        if not self.writes.enabled:
            done.set_result(True)
            return done
        self.threads.write(lambda buffer: self._clear(done))
        return done

    def _clear(self, done: Future[bool]) -> None:
        try:
            self.threads.files.clear()
        except Exception as e:
            logger.error("The storage of KV could not be cleared", exc_info=e)
            done.set_result(False)
        else:
            # Not before: what others find until then is not there any more.
            self._host.cleared += 1
            done.set_result(True)

    def _look_if_cleared(self) -> None:
        """What was written before another worker, or DP rank, cleared the same folder is gone, and is written again.

        Of several that clear it one after another, each removes what those before have written since.
        """
        self._looking = False
        if self.threads.files.was_cleared():
            self._host.cleared += 1

    def stop(self) -> None:
        """Use it no more, ever: the weights are about to change."""
        if not self.stopped:
            self.stopped = True
            self.writes.forget()
            self.fetches.give_up()
            self._host.writes = None


def add_storage(
    tree: HostTierRadixCache,
    args: ServerArgs,
    options: StorageOptions,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Put the storage that the options of a worker ask for below its host memory, which is empty. Raises ValueError.

    tree: its tree over host memory is a `StoredHostTree`. options: what ``args`` say of it. tp_rank, tp_size: of the
    ranks that have parts of one KV.
    """
    tier = tree.tier
    assert tier is not None and isinstance(tier.host, StoredHostTree)
    host = tier.host
    name = args.hicache_storage_backend
    pages = HostPages([pool for _, pool in tier.memory.pools], host.page_size)
    rank = None if pages.shared else tp_rank
    # What all ranks have alike is the same for any number of them.
    folder = rank_namespace(model_namespace(args), pages.made_of(), rank, 1 if pages.shared else tp_size)
    files = BACKENDS[name].open(folder, pages.page_bytes, options.own, tp_size)
    taken = BACKENDS[name].memory(options.own, tp_size).size
    logger.info(
        "Decode stores what is in host memory in %s (%s), %d bytes a page%s.",
        files.place,
        name,
        pages.page_bytes,
        f"; the storage has {taken / 1e9:.2f} GB of this rank's memory" if taken else "",
    )
    threads = StorageThreads(files, pages, files.place)
    tier.storage = HostStorage(host, threads, options.limits, writes=not pages.shared or tp_rank == 0)
