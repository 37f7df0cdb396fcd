"""What a storage below host memory is told: options, names of pages and folders; and the engine's routes for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.host_tier.storage import add_storage, read_options
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from sglang.srt.mem_cache.page_names import first_hash, page_names
from storage_world import StorageWorld
from test_kv_namespace import options
from test_traps import tokens

STORAGE = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1, "prefetch_timeout_base": 20}',
    "hicache_storage_prefetch_policy": "best_effort",
}


# ---- names ----


def test_pages_are_named_by_all_that_comes_before():
    first = page_names(tokens(1, 16), 4, first_hash(None))
    assert len(set(first)) == 4 and page_names(tokens(1, 18), 4, first_hash(None)) == first
    assert page_names(tokens(1, 16)[8:], 4, first[1]) == first[2:]
    other = page_names(tokens(1, 8) + tokens(50, 8), 4, first_hash(None))
    assert other[:2] == first[:2] and not set(other[2:]) & set(first)
    for key in ("", "a", "b", "\ud800"):
        assert not set(page_names(tokens(1, 16), 4, first_hash(key))) & set(first)
    pairs = list(zip(tokens(1, 16), tokens(2, 16), strict=True))
    assert len(page_names(pairs, 4, first_hash(None))) == 4
    assert page_names(pairs, 4, first_hash(None)) != page_names(tokens(1, 16), 4, first_hash(None))


# ---- options ----


def limits_of(extra: str | None, policy: str = "timeout") -> Any:
    options = {"hicache_storage_backend_extra_config": extra, "hicache_storage_prefetch_policy": policy}
    return read_options(SimpleNamespace(**options))


def test_the_engines_limits(tmp_path):
    assert limits_of(None, "best_effort") == (Limits(256, 1.0, 0.25), {})
    given = '{"prefetch_threshold": 64, "prefetch_timeout_base": 0.5, "prefetch_timeout_per_ki_token": 2, "a": 1}'
    assert limits_of(given) == (Limits(64, 0.5, 2), {"a": 1})
    (tmp_path / "a.toml").write_text("prefetch_threshold = 9")
    assert limits_of(f"@{tmp_path / 'a.toml'}")[0].threshold == 9


@pytest.mark.parametrize("given", ["{", "[]", '{"prefetch_threshold": 1.5}', "@nowhere.json"])
def test_what_the_engine_does_not_read_is_refused(given):
    with pytest.raises(ValueError, match=r"--hicache-storage-backend-extra-config .* cannot be read: .*\."):
        limits_of(given)


def test_nobody_waits_for_a_storage_that_hangs():
    with pytest.raises(ValueError, match="wait_complete would have requests wait"):
        limits_of(None, "wait_complete")


# ---- workers ----


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A decode worker whose storage was added as its options say."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    made = []

    def make(tp_rank: int = 0, tp_size: int = 1, **given: Any) -> StorageWorld:
        one = StorageWorld(tmp_path / "unused")
        one.close()
        args = options(**{**STORAGE, **given})
        add_storage(one.tree, args, tp_rank, tp_size)
        one.storage, one.threads = one.tier.storage, one.tier.storage.threads
        one.files = one.threads.files
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("given", "hit"),
    [({}, 24), ({"dtype": "float16"}, 0), ({"tp_rank": 1, "tp_size": 2}, 0), ({"kv_namespace": "mine"}, 0)],
)
def test_who_reads_what_another_worker_has_written(worker, monkeypatch, tmp_path, kind, given, hit):
    name, *master = kind.split()
    monkeypatch.setenv("MOONCAKE_MASTER", master[0] if master else "")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(1 << 25))
    one, two = worker(hicache_storage_backend=name), worker(hicache_storage_backend=name, **given)
    one.serve(tokens(1, 24))
    assert two.serve(tokens(1, 24)) == hit
    assert one.files.place == two.files.place if hit else one.files.place != two.files.place
    if master:
        # Each of them is a client.
        for files in one.files, two.files:
            files._store.close()


def test_a_directory_that_cannot_be_made(worker, tmp_path, monkeypatch):
    one = worker()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file" / "kv"))
    args = options(**STORAGE)
    with pytest.raises(ValueError, match="--hicache-storage-backend file does not start: .*Not a directory"):
        add_storage(one.tree, args, 0, 1)


def scheduler_of(one: StorageWorld) -> Scheduler:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.tree_cache = one.tree
    return scheduler


def test_a_weight_update_ends_its_use(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    for _ in range(2):
        scheduler.before_weight_update()
    assert one.storage.stopped and caplog.text.count("uses the storage of KV no more") == 1
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
