"""The storage backends themselves: what is not there at the start, and how each of them fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mooncake_master
import pytest
import storage_kinds
import torch
from ranks import CONTEXT
from sglang.srt import server_args
from sglang.srt.mem_cache.host_tier import tier
from sglang.srt.mem_cache.host_tier.storage_backends import PagesInFiles, open_storage
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.observability import thread_time
from storage_kinds import client, opened
from storage_world import PATIENT, StorageWorld
from test_traps import tokens


def page_of(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_pages_come_back_under_their_names_alone(kind, tmp_path):
    """Of any length."""
    ranks = [opened(kind, tmp_path / name, 5001) for name in ("rank", "rank2")]
    pages = {f"{i:x}": page_of(5001, i) for i in range(3)}
    for name, page in pages.items():
        assert not ranks[0].exists(name) and ranks[0].set(name, page) and ranks[0].exists(name)
    buffer = torch.zeros(5001, dtype=torch.uint8)
    for name, page in pages.items():
        assert ranks[0].get(name, buffer) is buffer and torch.equal(buffer, page)
        assert not ranks[1].exists(name) and ranks[1].get(name, buffer) is None
    assert not ranks[0].corrupt and not ranks[1].corrupt


def killed_in_a_page(folder: Path) -> None:
    files = PagesInFiles(folder, "rank", 1 << 20)
    files.set("whole", torch.ones(1 << 20, dtype=torch.uint8))
    os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    files.set("half", torch.ones(1 << 20, dtype=torch.uint8))


def test_a_worker_that_is_killed_while_it_writes_leaves_nothing_under_a_name(tmp_path):
    worker = CONTEXT.Process(target=killed_in_a_page, args=(tmp_path,), daemon=True)
    worker.start()
    worker.join(100)
    assert worker.exitcode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "rank").glob("*.bin")] == ["whole.bin"]
    files = PagesInFiles(tmp_path, "rank", 1 << 20)
    assert files.exists("whole") and not files.exists("half")


def test_a_storage_that_does_not_start_is_one_error(monkeypatch):
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CLIENT", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="--hicache-storage-backend mooncake does not start: "):
        open_storage("mooncake", "rank", 100, {}, 1)


# ---- mooncake ----


@pytest.fixture
def own_master(tmp_path):
    """A master that a test may end."""
    with mooncake_master.running(tmp_path) as started:
        yield started
        started.go_on()
        storage_kinds.close_clients()


def test_a_master_that_goes_away_costs_hits_until_it_is_back(own_master, caplog):
    one = StorageWorld("kv", kind=own_master.kind)
    prompt = tokens(1, 24)
    one.serve(prompt)
    one.forget()
    assert one.serve(prompt) == 24
    own_master.stop()
    one.forget()
    for start in (1, 1, 100):
        assert one.serve(tokens(start, 24)) == 0
        one.forget()
    assert "Mooncake cannot look up a page" in caplog.text
    own_master.start()
    # The client finds it by itself; what the store had is gone with it.
    end = time.monotonic() + 60
    while one.serve(prompt) != 24:
        assert time.monotonic() < end
        one.threads.reading._until = one.threads.writing._until = 0.0
        one.forget()
        time.sleep(0.2)
    one.close()


def test_a_master_that_hangs_holds_up_no_step(own_master):
    one, two = StorageWorld("kv", kind=own_master.kind), None
    prompt = tokens(1, 24)
    one.serve(prompt)
    two = StorageWorld("kv", kind=own_master.kind, limits=PATIENT._replace(base_s=0.3, per_ki_s=0.0))
    own_master.hang()
    begun, worst = time.monotonic(), 0.0
    decode_req = two.arrive(prompt)
    two.handshake(decode_req)
    while decode_req in two.queue.queue:
        before = thread_time.now()
        two.step()
        worst = max(worst, thread_time.now() - before)
        time.sleep(0.005)
    # Its time was up; a step that waited for the master would take as long as it hangs.
    assert 0.3 <= time.monotonic() - begun < 10 and worst < 2
    assert (decode_req.kv_receiver.prefix_len, two.tier.report()["storage"]["late"]) == (0, 1)
    own_master.go_on()
    for world in one, two:
        world.close()


def test_a_store_that_is_full_refuses_without_an_error(own_master):
    """And has room again for what is written later. What it has was asked for a moment ago, and stays for a while."""
    store, page = client(own_master.address, 1 << 20, 1 << 24), page_of(1 << 20)
    assert store.set("0", page) and store.exists("0")
    made = []
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 8, 1):
        while store._store.put(key := f"other/{len(made)}", bytes(size)) == 0:
            made.append(key)
            store._store.is_exist(key)
    begun = time.monotonic()
    assert [store.set(f"{i:x}", page) for i in range(1, 4)] == [False] * 3
    assert time.monotonic() - begun < 5 and store.get("0", page) is page
    for key in made:
        store._store.remove(key, True)
    assert store.set("1", page)
    store._store.close()


def test_a_store_without_memory_says_so(own_master):
    with pytest.raises(OSError, match=r"No worker contributes memory \(global_segment_size\)"):
        client(own_master.address, 1 << 12, 0)


# ---- server arguments ----


def worker() -> Any:
    return SimpleNamespace(hicache_size=0, hicache_ratio=2.0)


def small_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(1 << 12, 1, torch.float32, 1, 64, 1, "cpu", False)


def tree_over(pool: Any) -> Any:
    """What is asked of a tree before host memory is taken."""
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=1)


@pytest.mark.parametrize("place", ["model", "draft"])
def test_a_pool_that_is_not_known_is_told_before_what_it_takes(place):
    """Nobody knows how to ask it for that."""
    pool, draft = (SimpleNamespace(), None) if place == "model" else (small_pool(), SimpleNamespace())
    with pytest.raises(ValueError, match="is not verified on decode for SimpleNamespace"):
        tier.add_host_tier(tree_over(pool), worker(), lambda: None, draft)


@pytest.mark.parametrize(("flag", "layout"), [(True, "layer_first"), (False, "page_first_direct")])
def test_the_layout_of_host_memory_stays_below_decodes_tree(flag, layout):
    """The engine's Mooncake storage needs another one, to which it copies in ways that a CPU host lacks."""
    args = server_args.ServerArgs.__new__(server_args.ServerArgs)
    args.disaggregation_decode_enable_radix_cache = flag
    args.hicache_storage_backend, args.hicache_mem_layout, args.hicache_io_backend = "mooncake", "layer_first", "direct"
    args._resolve_storage_layout_compatibility()
    assert args.hicache_mem_layout == layout
