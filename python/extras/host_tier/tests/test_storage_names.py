"""What a storage below host memory is told: options, names of pages and folders; and the engine's routes for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import namespaces
import pytest
from namespaces import options
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.host_tier.storage import add_storage, model_namespace, read_options
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from storage_world import StorageWorld
from test_traps import tokens

STORAGE = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1, "prefetch_timeout_base": 20}',
    "hicache_storage_prefetch_policy": "best_effort",
}


# ---- names ----


def test_what_separates_storages():
    namespaces.separates_weights_and_formats(model_namespace)
    namespaces.lets_the_operator_name_weights(model_namespace)


def test_a_draft_has_a_part_in_the_name_of_a_storage():
    """Its KV is in the same pages."""
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d"}
    drafts = [
        {},
        eagle,
        {**eagle, "speculative_algorithm": "EAGLE3"},
        {**eagle, "speculative_draft_model_quantization": "fp8"},
    ]
    others = [{**eagle, "speculative_draft_model_path": "e"}, {**eagle, "speculative_draft_model_revision": "r"}]
    assert len({model_namespace(options(**one)) for one in (*drafts, *others)}) == 6
    # The operator's name is of both.
    named = [model_namespace(options(**one, kv_namespace="n")) for one in (*drafts, *others)]
    assert len(set(named)) == 4 and named[1] == named[4] == named[5]


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
    with pytest.raises(ValueError, match="wait_complete makes requests wait"):
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
    assert one.storage.stopped and caplog.text.count("no longer uses the KV storage") == 1
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
