"""A storage (L3) below host memory: stored pages are fetched into host memory before a request is admitted.

storage_backends.py the engine's storages, and the check of pages read from them
storage_pages.py    bytes of pages in host memory; storage_threads.py: threads
storage_writes.py   writes; storage_tree.py: the tree over host memory, with page names
storage_fetches.py  fetches that requests wait for

Only pages in host memory are promised to prefill: a fetch that fails or takes too long costs only its hit.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier.storage_backends import open_storage
from sglang.srt.mem_cache.host_tier.storage_fetches import Fetches, Limits
from sglang.srt.mem_cache.host_tier.storage_pages import HostPages
from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
from sglang.srt.mem_cache.host_tier.storage_writes import Writes
from sglang.srt.mem_cache.kv_namespace import kv_namespace
from sglang.srt.mem_cache.page_names import rank_namespace

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.server_args import ServerArgs

__all__ = ["HostStorage", "add_storage", "model_namespace", "read_options"]

logger = logging.getLogger(__name__)

# Share of host memory that may wait to be written.
WAITING_PART = 1 / 4


class HostStorage:
    """The storage of one rank."""

    def __init__(self, host: StoredHostTree, threads: StorageThreads, limits: Limits, writes: bool = True):
        """host: the tree over host memory, empty. writes: False if another rank writes the same pages."""
        self._host, self.threads = host, threads
        self.writes = Writes(threads, int(host.pool_size * WAITING_PART), writes)
        self.fetches = Fetches(host, threads, limits)
        host.writes, host.pages = self.writes, threads.pages
        self.stopped = False

    # ---- requests ----

    def fetch(self, rid: str, watch: Watch | None, host_watch: Watch | None, num_tokens: int) -> None:
        if not self.stopped:
            self.fetches.ask(rid, watch, host_watch, num_tokens)

    def is_done(self, rid: str) -> bool:
        return self.fetches.is_done(rid)

    def leave(self, rid: str) -> None:
        """``rid`` was admitted or has ended; called on all ranks in the same step."""
        self.fetches.leave(rid)

    def brought(self, rid: str, start: int, end: int) -> int:
        """Tokens of this range of the prompt that were fetched for ``rid``, which is being admitted."""
        first, last = self.fetches.brought.get(rid, (0, 0))
        return max(0, min(last, end) - max(first, start))

    def advance(self, group: Any, alone: bool) -> None:
        """Called once per step on all ranks of ``group``; alone: there is one rank."""
        self.fetches.advance(group, alone)

    # ---- figures ----

    @property
    def busy(self) -> bool:
        """Whether a request has a pending fetch."""
        return bool(self.fetches.open)

    def state(self) -> dict[str, Any]:
        """Tokens being read, waiting to be written, and totals since the start; number of pending requests."""
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

    def forget(self) -> None:
        """Host memory is about to be cleared. Stored pages stay."""
        self.fetches.forget()
        self.writes.forget()
        self.threads.pages.given_away += 1

    def stop(self) -> None:
        """Stop using the storage for good: the weights are about to change."""
        if not self.stopped:
            logger.warning(
                "The weights were updated: this worker no longer uses the KV storage. Restart it to use it again."
            )
            self.stopped = True
            self.writes.forget()
            self.fetches.give_up()
            self._host.writes = None


def read_options(args: ServerArgs) -> tuple[Limits, dict[str, Any]]:
    """Limits of fetches and the storage's own options, parsed by the engine. Raises ValueError."""
    if args.hicache_storage_prefetch_policy == "wait_complete":
        raise ValueError(
            "--hicache-storage-prefetch-policy wait_complete makes requests wait for a hung storage. Use "
            "timeout on decode, or omit the option."
        )
    # Not at the top: the engine's module imports the options, whose check calls this.
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

    given = args.hicache_storage_backend_extra_config
    try:
        options, *limits, _ = HiRadixCache._parse_storage_backend_extra_config(None, given)
    except Exception as e:
        raise ValueError(f"--hicache-storage-backend-extra-config {given!r} cannot be read: {e}.") from e
    return Limits(*limits), options


def model_namespace(args: ServerArgs) -> str:
    """`kv_namespace` of the model and its draft, whose KV follows the model's in each page."""
    draft = None
    if args.speculative_algorithm is not None:
        draft = [args.speculative_algorithm, args.speculative_draft_model_quantization]
        if not args.kv_namespace:
            draft += [args.speculative_draft_model_path, args.speculative_draft_model_revision]
    return kv_namespace(args, draft)


def add_storage(tree: HostTierRadixCache, args: ServerArgs, tp_rank: int, tp_size: int) -> None:
    """Attach the storage that the options name below host memory, which is empty. Raises ValueError.

    tree: its tree over host memory is a `StoredHostTree`. tp_rank, tp_size: of the ranks that hold parts of the KV.
    """
    tier = tree.tier
    assert tier is not None and isinstance(tier.host, StoredHostTree)
    limits, options = read_options(args)
    host, name = tier.host, args.hicache_storage_backend
    pages = HostPages([pool for _, pool in tier.memory.pools], host.page_size)
    rank = None if pages.shared else tp_rank
    # Pages that are equal on all ranks do not depend on their number.
    folder = rank_namespace(model_namespace(args), pages.made_of(), rank, 1 if pages.shared else tp_size)
    files = open_storage(name, folder, pages.page_bytes, options, tp_size)
    logger.info(
        "Decode stores pages of host memory in %s (%s), %d bytes per page.", files.place, name, pages.page_bytes
    )
    threads = StorageThreads(files, pages, files.place)
    tier.storage = HostStorage(host, threads, limits, writes=not pages.shared or tp_rank == 0)
