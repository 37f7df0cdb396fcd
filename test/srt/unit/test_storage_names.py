"""What a storage below host memory is told: options, names of pages and folders; and the engine's routes for it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.host_tier import storage_scheduler
from sglang.srt.mem_cache.host_tier.storage import add_storage
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from sglang.srt.mem_cache.host_tier.storage_keys import first_hash, page_names
from sglang.srt.mem_cache.host_tier.storage_options import options_of, read_options
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


def test_the_engines_limits(tmp_path):
    assert read_options("file", None, "best_effort") == (Limits(256, 1.0, 0.25), None)
    given = '{"prefetch_threshold": 64, "prefetch_timeout_base": 0.5, "prefetch_timeout_per_ki_token": 2}'
    assert read_options("file", given, "timeout") == (Limits(64, 0.5, 2), None)
    least = "prefetch_threshold"
    for name, text in (("a.json", f'{{"{least}": 9}}'), ("a.toml", f"{least} = 9"), ("a.yaml", f"{least}: 9")):
        (tmp_path / name).write_text(text)
        assert read_options("file", f"@{tmp_path / name}", "timeout").limits.threshold == 9


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "give an object"),
        ('{"tp_lcm_size": 2}', "has tp_lcm_size; decode knows prefetch_threshold"),
        ('{"prefetch_threshold": 1.5}', "prefetch_threshold 1.5: give a number"),
        ('{"prefetch_timeout_base": -1}', "prefetch_timeout_base -1: give a number"),
        ('{"prefetch_timeout_base": true}', "prefetch_timeout_base True: give a number"),
        (f'{{"prefetch_timeout_base": {10**400}}}', "prefetch_timeout_base 10.*: give a number of 0 or more, at most"),
        (f'{{"prefetch_timeout_per_ki_token": {10**400}}}', "per_ki_token 10.*: give a number"),
        ("@nowhere.json", "cannot be read"),
        ("@pyproject.ini", "cannot be read|ends in .json"),
    ],
)
def test_what_decode_does_not_know_is_refused(given, says):
    with pytest.raises(ValueError, match=f"--hicache-storage-backend-extra-config.*({says})"):
        read_options("file", given, "timeout")


def test_nobody_waits_for_a_storage_that_hangs():
    with pytest.raises(ValueError, match="wait_complete would have requests wait"):
        read_options("file", None, "wait_complete")


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
        add_storage(one.tree, args, options_of(args), tp_rank, tp_size)
        one.storage, one.threads = one.tier.storage, one.tier.storage.threads
        one.files = one.threads.files
        one.queue.loads = type(one.queue.loads)(one.tree)
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
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("MOONCAKE_MASTER", master[0] if master else "")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(1 << 25))
    one, two = worker(hicache_storage_backend=name), worker(hicache_storage_backend=name, **given)
    one.serve(tokens(1, 24))
    assert two.serve(tokens(1, 24)) == hit
    assert one.files.place == two.files.place if hit else one.files.place != two.files.place
    if master:
        # Each of them is a client, which begins to write at once.
        assert {type(files).__name__ for files in (one.files, two.files)} == {"PagesInMooncake"}
        for files in one.files, two.files:
            files._store.close()


def test_a_directory_that_cannot_be_made(worker, tmp_path, monkeypatch):
    one = worker()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file" / "kv"))
    args = options(**STORAGE)
    with pytest.raises(ValueError, match="cannot use .*kv: .*SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        add_storage(one.tree, args, options_of(args), 0, 1)


def scheduler_of(one: StorageWorld) -> Scheduler:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.tree_cache = one.tree
    scheduler.told = []
    scheduler.send_to_tokenizer = SimpleNamespace(send_output=lambda *answer: scheduler.told.append(answer))
    return scheduler


def answered(one: StorageWorld, scheduler: Scheduler) -> bool:
    """Whether what was asked as "clear" has been done, when that is answered."""

    def come() -> bool:
        scheduler.answer_storage_clears()
        return bool(scheduler.told)

    one.until(come, step=False)
    ((answer, asked),) = scheduler.told
    assert asked == "clear" and not scheduler.storage_clears
    scheduler.told.clear()
    return answer.success


def test_the_engines_routes(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    assert one.stored() and scheduler.clear_hicache_storage_wrapped("clear") is None
    assert answered(one, scheduler) and not one.stored()
    for done, answer in (
        ("attached", scheduler.attach_hicache_storage_wrapped(None)),
        ("detached", scheduler.detach_hicache_storage_wrapped(None)),
    ):
        assert not answer.success and f"cannot be {done} while it runs" in answer.message
    one.tier.storage = None
    assert not scheduler.clear_hicache_storage_wrapped(None).success
    assert "no storage to be cleared" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_waits_while_it_is_cleared(worker, monkeypatch, fails):
    """But the client, who hears what has become of it; or that nothing has, when that has taken too long."""
    one = worker()
    scheduler, opened, clear = scheduler_of(one), threading.Event(), one.files.clear
    one.serve(tokens(1, 24))
    one.files.clear = lambda: opened.wait(30) and not fails and clear() or raising()
    begun = time.monotonic()
    assert scheduler.clear_hicache_storage_wrapped("clear") is None
    scheduler.answer_storage_clears()
    assert time.monotonic() - begun < 10 and not scheduler.told and one.stored()
    # What is written meanwhile is not what was to be removed.
    one.complete(decode_req := one.admit(tokens(50, 12), max_new=1))
    one.step()
    while decode_req.req in one.running:
        one.decode()
    one.until(lambda: one.tier.memory.wait() or not one.tier.saves.busy)
    opened.set()
    assert answered(one, scheduler) is not fails
    one.settle()
    assert len(one.stored()) == (9 if fails else 3)
    opened.clear()
    monkeypatch.setattr(storage_scheduler, "CLEAR_S", 0.0)
    scheduler.clear_hicache_storage_wrapped("clear")
    assert not answered(one, scheduler)
    opened.set()


def raising() -> None:
    raise OSError("it fails")


def test_a_weight_update_ends_its_use(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    for _ in range(2):
        scheduler.before_weight_update()
    assert one.storage.stopped and caplog.text.count("uses the storage of KV no more") == 1
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
