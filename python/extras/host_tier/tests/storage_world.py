"""A decode worker with a storage below its host memory, of any kind, in a folder of a test's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decode_world import World
from host_world import HostSizes
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.mem_cache.host_tier.storage import HostStorage
from sglang.srt.mem_cache.host_tier.storage_fetches import Fetch, Limits, read_pages
from sglang.srt.mem_cache.host_tier.storage_pages import HostPages
from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
from sglang.srt.mem_cache.page_names import first_hash, page_names
from storage_kinds import Inside, opened

PAGE = 4
# As long as a test may take on a busy host.
PATIENT = Limits(threshold=1, base_s=20.0)


def names_of(prompt: list[int]) -> list[str]:
    """What the pages of a prompt are called."""
    return [name.hex() for name in page_names(prompt, PAGE, first_hash(None))]


def making(folder: Path, kind: str) -> Iterator[Any]:
    """A function that makes decode workers with one storage, for a fixture, which ends them."""
    made = []

    def make(**options: Any) -> StorageWorld:
        made.append(StorageWorld(options.pop("folder", folder), kind=kind, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class ByHand(StorageThreads):
    """Looks up, reads and writes when a test says so, in its thread."""

    def _start(self, name: str, run: Any) -> None:
        """None."""

    def run(self, count: int, writes: bool = True) -> None:
        """So many look-ups, reads and, if asked for, writes of those that wait."""
        buffer = self.pages.buffer()
        crews: list[tuple[Any, tuple[Any, ...]]] = [(self._looks, ()), (self._reads, (buffer,))]
        if writes:
            crews.append((self._writes, (buffer,)))
        for crew, needs in crews:
            for _ in range(min(count, crew.queue.qsize())):
                crew.queue.get()(*needs)
                crew.queue.task_done()


def page_by_page(fetch: Fetch, threads: ByHand, names: Any, pages: Any, buffer: Any) -> None:
    """As `read_pages` by hand, one page for each call, so that much may come about between two."""
    come = fetch.come
    read_pages(fetch, threads, names[:1], pages[:1], buffer)
    if fetch.come > come and names[1:]:
        fetch.ended = False
        threads.read(lambda buffer: page_by_page(fetch, threads, names[1:], pages[1:], buffer))


class StorageWorld(World):
    """One decode rank. kind: of its storage, as `storage_kinds` has it."""

    host_class = StoredHostTree

    def __init__(
        self,
        folder: Path | str,
        host: int = 256,
        size: int = 64,
        late: bool = False,
        limits: Limits = PATIENT,
        writes: bool = True,
        page_size: int = PAGE,
        threads: type[StorageThreads] = StorageThreads,
        kind: str = "file",
        **options: Any,
    ):
        super().__init__(size=size, page_size=page_size, host=HostSizes(host, 1, late), **options)
        pages = HostPages([pool for _, pool in self.tier.memory.pools], self.page_size)
        self.files: Any = opened(kind, folder, pages.page_bytes)
        self.inside = Inside(kind, self.files)
        self.threads = threads(self.files, pages, str(folder))
        self.storage = HostStorage(self.tier.host, self.threads, limits, writes)
        self.tier.storage = self.storage

    def flush(self) -> bool:
        """With the same weights."""
        weights = self.weights
        done = super().flush()
        self.weights = weights
        return done

    @property
    def quiet(self) -> bool:
        """Whether no thread is in a call of the storage."""
        return not any(crew.queue.unfinished_tasks for crew in (self.threads._looks, self.threads._reads))

    # ---- until something has come about ----

    def until(self, come: Any, step: bool = True) -> None:
        end = time.monotonic() + 20
        while not come():
            assert time.monotonic() < end, "it has not come about"
            if step:
                self.step()
                self.check()
            time.sleep(0.001)

    def until_on_all(self, come: Any) -> None:
        """Of a rank: in steps that all ranks take, as many on each, however much slower one of them is."""
        end = time.monotonic() + 60
        while True:
            self.step()
            lacks = torch.tensor([not come(), time.monotonic() > end], dtype=torch.int32)
            dist.all_reduce(lacks, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
            if not lacks[0]:
                return
            assert not lacks[1], "it has not come about on all ranks"
            time.sleep(0.001)

    def admit(self, prompt: list[int], **options: Any) -> DecodeRequest:
        decode_req = self.arrive(prompt, **options)
        self.handshake(decode_req)
        self.until(lambda: decode_req not in self.queue.queue)
        return decode_req

    def settle(self) -> None:
        """Saved, and written."""
        self._until_saved()
        self.settle_alone()

    def settle_alone(self) -> None:
        """Written; no step is taken for it."""
        if isinstance(self.threads, ByHand):
            self.threads.run(99)
        self.until(lambda: not self.storage.writes.waiting, step=False)

    def _until_saved(self) -> None:
        self.until(lambda: self.tier.memory.wait() or not self.tier.saves.busy)

    def serve(self, prompt: list[int], max_new: int = 4, **options: Any) -> int:
        """A whole request; how many tokens of it were not sent."""
        not_sent = self._save(prompt, max_new, **options)
        self.settle_alone()
        self.check()
        return not_sent

    def serve_in_one(self, prompt: list[int]) -> None:
        """As `serve`, but of the parts in which it is saved none is written before all are there.

        With a part that comes later, what was not written above it is tried again.
        """
        let_go = threading.Event()

        def hold(buffer: Any) -> None:
            let_go.wait(30)

        self.threads.write(hold)
        self._save(prompt)
        let_go.set()
        self.settle()

    def _save(self, prompt: list[int], max_new: int = 4, **options: Any) -> int:
        """A whole request, of which what has been saved may still wait to be written."""
        decode_req = self.admit(prompt, max_new=max_new, **options)
        receiver = decode_req.kv_receiver
        self.tier.memory.wait()
        self.complete(decode_req)
        self.step()
        self.check()
        while decode_req.req in self.running:
            self.decode()
        self._until_saved()
        return receiver.prefix_len

    def forget(self) -> None:
        """All but what is stored is gone."""
        assert self.flush()
        self.kv.k_buffer[0].fill_(-1)
        self.tier.memory.pools[0][1].kv_buffer.fill_(-1)

    def stored(self) -> list[Path]:
        """Of a storage in files."""
        return sorted(self.files.path.glob("*.bin"))

    def close(self) -> None:
        self.threads.close()
