"""A storage below host memory that fails in part: what is lost of it comes back later, and nobody else pays for it."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.host_tier import storage_reads, storage_threads, storage_tree
from sglang.srt.mem_cache.host_tier.storage_files import PageFiles
from sglang.srt.mem_cache.host_tier.storage_keys import page_names
from storage_world import PAGE, ByHand, StorageWorld, making, names_of
from test_traps import tokens


@pytest.fixture
def world(tmp_path):
    """Makes decode workers with one storage, in files."""
    yield from making(tmp_path, "file")


@pytest.fixture
def any_world(tmp_path, kind):
    """Makes decode workers with one storage, of each kind."""
    yield from making(tmp_path, kind)


def failing(call: Any, number: int, fails: Any) -> Any:
    """``call``, which fails where ``fails`` says so of its first argument."""

    def instead(first: Any, *args: Any, **options: Any) -> Any:
        if fails(first):
            raise OSError(number, os.strerror(number))
        return call(first, *args, **options)

    return instead


# ---- writing ----


@pytest.mark.parametrize("which", [0, 1])
def test_a_page_that_could_not_be_written_is_written_later(any_world, which):
    """Also if it was the last, or the only one, of what is written at once."""
    one = any_world()
    prompt = tokens(1, 8)
    bad = [names_of(prompt)[which]]
    one.files.set = failing(one.files.set, errno.EIO, lambda key: key in bad and bad.pop())
    one.serve(prompt, max_new=1)
    assert not bad and one.storage.state()["failed"] == PAGE
    # The pause is over.
    one.threads.writing._until = 0.0
    one.serve(prompt + tokens(9, 8), max_new=1)
    one.forget()
    assert one.serve(prompt + tokens(9, 8)) == 16


@pytest.mark.parametrize("gone", [slice(0, 3), slice(2, 4)])
def test_what_somebody_has_removed_since_is_written_again_with_what_comes_behind(any_world, monkeypatch, gone):
    """By age: nobody could use what is written behind it, for as long as it stays in host memory here."""
    one, two = any_world(), any_world(writes=False)
    prompt = tokens(1, 24)
    one.serve(prompt)
    for name in names_of(prompt)[gone]:
        one.inside.lose(name)
    # It has been looked for a moment ago.
    one.serve(prompt + tokens(9, 8))
    assert one.storage.state()["known"] == 0 and two.serve(prompt) < 24
    two.forget()
    monkeypatch.setattr(storage_tree, "LOOK_AGAIN_S", 0.0)
    one.serve(prompt + tokens(9, 8) + tokens(50, 4))
    assert one.storage.state()["known"] > 0
    assert two.serve(prompt + tokens(9, 8) + tokens(50, 4)) == 36


def test_what_is_looked_for_again_counts_as_used(world):
    """Whoever removes what is old leaves it."""
    one, two = world(), world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    for path in one.stored():
        os.utime(path, (1, 1))
    two.storage.stopped = True
    two.serve(prompt)
    assert two.storage.state()["known"] == 24
    assert all(min(path.stat().st_atime, path.stat().st_mtime) > 1 for path in one.stored())


# ---- fetching ----


@pytest.mark.parametrize(("gone", "brought", "questions"), [(0, 0, 1), (1, 4, 2), (7, 28, 5), (None, 32, 2)])
def test_nothing_is_read_behind_a_gap_at_the_start(any_world, gone, brought, questions):
    """Room was made for it, in place of what is wanted; nothing came. Of a removal by age, such gaps stay.

    gone: which of 8 pages.
    """
    one, two = any_world(), any_world(host=64, size=128)
    prompt, wanted = tokens(1, 32), [tokens(start, 32) for start in (100, 200)]
    one.serve(prompt)
    two.storage.stopped = True
    for other in wanted:
        two.serve(other, max_new=1)
    two.storage.stopped = False
    two.tree.evict_shortfall(two.tree.evictable_size())
    if gone is not None:
        one.inside.lose(names_of(prompt)[gone])
    asked, exists = [], two.files.exists
    two.files.exists = lambda key: asked.append(key) or exists(key)
    assert two.admit(prompt).req.from_storage == brought
    two.check()
    held = [two.tier.host.peek(other, None).length for other in wanted]
    assert len(asked) == questions and (held == [32, 32]) == (gone == 0)


def fetched_together(two: StorageWorld, prompts: list[list[int]]) -> list[int]:
    """How much of each prompt comes from the storage where all are to be fetched from one step on."""
    two.storage.stopped = False
    two.tree.evict_shortfall(two.tree.evictable_size())
    waiting = [two.arrive(prompt, max_new=1) for prompt in prompts]
    for decode_req in waiting:
        two.handshake(decode_req)
    two.until(lambda: all(fetch.found is not None for fetch in two.storage.fetches.open), step=False)
    two.until(lambda: not any(decode_req in two.queue.queue for decode_req in waiting))
    two.check()
    return [decode_req.req.from_storage for decode_req in waiting]


def test_a_fetch_does_not_count_on_what_another_of_its_step_has_locked(world):
    one = world(host=512, size=512)
    first, second, other = tokens(1, 48), tokens(100, 40), tokens(200, 8)
    one.serve(first, max_new=1)
    one.serve(second, max_new=1)
    # 40 of the first and 8 of another's; 24 are free.
    two = world(host=72, size=512)
    two.storage.stopped = True
    two.serve(first[:40], max_new=1)
    two.serve(other, max_new=1)
    # 16 free, and 8 of the other's.
    assert fetched_together(two, [first, second]) == [8, 24]


def test_fetches_of_one_step_share_what_they_lock(world):
    """Locked once, it leaves as much room for both."""
    one = world(host=512, size=512)
    prompts = [tokens(1, 40) + tokens(start, 8) for start in (100, 200)]
    for prompt in prompts:
        one.serve(prompt, max_new=1)
    two = world(host=64, size=512)
    two.storage.stopped = True
    two.serve(prompts[0][:40], max_new=1)
    assert fetched_together(two, prompts) == [8, 8]


@pytest.mark.parametrize("stays", [False, True])
def test_a_file_that_cannot_be_read_costs_its_page_only(world, monkeypatch, stays):
    """It is written anew, also where it could not be removed."""
    one, two = world(), world()
    prompt, other = tokens(1, 24), tokens(50, 24)
    for written in (prompt, other):
        one.serve(written)
    bad = f"{names_of(prompt)[2]}.bin"
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", failing(open, errno.EIO, lambda path: str(path).endswith(bad)))
        if stays:
            patch.setattr("os.unlink", failing(os.unlink, errno.EPERM, lambda path: str(path).endswith(bad)))
        assert two.serve(prompt) == 8
        assert two.threads.answers and two.serve(other) == 24
    assert two.storage.state()["corrupt"] == PAGE
    two.forget()
    assert two.serve(prompt) == 24


def test_a_file_system_may_give_a_part_of_a_file_at_a_time(tmp_path, monkeypatch):
    """What is whole is no page that was cut short, which would be removed."""
    files, page = PageFiles(str(tmp_path), 16), torch.arange(16, dtype=torch.uint8)
    files.set("a", page)

    class InParts(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:
            return super().readinto(memoryview(buffer)[:5])

    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: InParts(path, mode))
    found = files.get("a", torch.zeros(16, dtype=torch.uint8))
    assert found is not None and found.tolist() == page.tolist()


def test_many_files_in_a_row_that_cannot_be_read_are_the_storages_failure(tmp_path, monkeypatch):
    files, page = PageFiles(str(tmp_path), 16), torch.zeros(16, dtype=torch.uint8)
    for i in range(6):
        files.set(str(i), page)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", failing(open, errno.EIO, lambda path: not str(path).endswith("5.bin")))
        # The same one again is no other; one that can be read ends the row.
        assert [files.get(key, page) is None for key in ("0", "0", "1", "5", "2", "3")] == [True] * 3 + [False] + [
            True
        ] * 2
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                files.get("4", page)
    # Nothing is removed then.
    assert [files.exists(str(i)) for i in range(6)] == [False] * 4 + [True] * 2
    assert files.get("4", page) is not None


@pytest.mark.parametrize(("name", "threads"), [("exists", storage_threads.LOOKERS), ("get", storage_threads.READERS)])
def test_who_has_asked_before_all_threads_hang_goes_on(world, monkeypatch, name, threads):
    monkeypatch.setattr(storage_threads, "HANGS_S", 0.05)
    # They would wait for 20 s.
    one = world(host=512, size=512)
    prompts = [tokens(100 * i, 24) for i in range(threads + 1)]
    for prompt in prompts:
        one.serve(prompt, max_new=1)
    one.forget()
    opened, calls = threading.Event(), []
    monkeypatch.setattr(one.files, name, lambda key, *_: calls.append(key) or opened.wait(30))
    waiting = [one.arrive(prompt) for prompt in prompts]
    for decode_req in waiting:
        one.handshake(decode_req)
    begun = time.monotonic()
    one.until(lambda: not one.storage.busy)
    assert time.monotonic() - begun < 10 and len(calls) == threads
    assert one.storage.state()["late"] == len(waiting)
    opened.set()


def test_who_hashes_long_prompts_does_not_hang(world, monkeypatch):
    """Or nobody else would ask a storage that answers."""
    monkeypatch.setattr(storage_threads, "HANGS_S", 0.05)
    one = world(host=512, size=512)
    opened, hashing = threading.Event(), []

    def long(*args: Any) -> Any:
        hashing.append(args)
        return opened.wait(30) and page_names(*args)

    monkeypatch.setattr(storage_reads, "page_names", long)
    for i in range(storage_threads.LOOKERS):
        one.arrive(tokens(100 * i, 24))
    one.until(lambda: len(hashing) == storage_threads.LOOKERS)
    time.sleep(0.1)
    assert one.threads.answers
    one.step()
    assert len(one.storage.fetches.open) == storage_threads.LOOKERS
    opened.set()
    one.until(lambda: not one.storage.busy)
    assert not one.storage.state()["late"]


def test_a_look_up_does_not_wait_for_reads(world, monkeypatch):
    """All readers are in long reads: what the storage does not have is known at once, and so is what has been read."""
    monkeypatch.setattr(storage_threads, "HANGS_S", 20.0)
    one = world(host=512, size=512)
    prompts = [tokens(100 * i, 24) for i in range(storage_threads.READERS)]
    for prompt in prompts:
        one.serve(prompt, max_new=1)
    one.forget()
    opened, get, calls = threading.Event(), one.files.get, []
    one.files.get = lambda *args: calls.append(args) or (opened.wait(30) and get(*args))
    for prompt in prompts:
        one.arrive(prompt)
    one.until(lambda: len(calls) == storage_threads.READERS)
    # They would wait for 20 s.
    begun = time.monotonic()
    one.admit(tokens(7, 24))
    assert time.monotonic() - begun < 10 and len(one.storage.fetches.open) == storage_threads.READERS
    opened.set()
    one.until(lambda: not one.storage.busy)
    assert one.storage.state()["fetched"] == 24 * storage_threads.READERS and not one.storage.state()["late"]


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
def test_what_was_read_before_a_clear_is_written_again(any_world, asked):
    """Also where the fetch began when the clear had been asked for and not been done. asked: when the fetch was."""
    one, two = any_world(), any_world(threads=ByHand)
    prompt = tokens(1, 24)
    one.serve(prompt, max_new=1)
    clearing = two.storage.clear() if asked == "meanwhile" else None
    decode_req = two.arrive(prompt, max_new=1)
    two.handshake(decode_req)
    two.threads.run(9, writes=False)
    for _ in range(2):
        # What was found is agreed upon, and is to be read.
        two.step()
    two.threads.run(9, writes=False)
    assert two.storage.fetches.loading_tokens == 24
    clearing = clearing or two.storage.clear()
    assert not clearing.done() and one.inside.names()
    two.threads.run(9)
    assert clearing.result(0) and not two.inside.names()
    served(two, decode_req)
    assert two.storage.state()["fetched"] == 24 and not two.inside.names()
    # With what comes behind it.
    served(two, two.arrive(prompt + tokens(9, 8), max_new=1))
    two.forget()
    decode_req = two.arrive(prompt + tokens(9, 8), max_new=1)
    served(two, decode_req)
    assert decode_req.req.from_storage == 32


def served(one: StorageWorld, decode_req: Any) -> None:
    """A request to its end, with threads that work by hand."""
    one.handshake(decode_req)
    while decode_req in one.queue.queue:
        one.threads.run(9)
        one.step()
    one.complete(decode_req)
    one.step()
    while decode_req.req in one.running:
        one.decode()
    one.settle()


def test_two_that_clear_one_folder_at_once(tmp_path, monkeypatch):
    """One takes away what the other is about to make a folder in."""
    files, page = PageFiles(str(tmp_path / "rank"), 16), torch.zeros(16, dtype=torch.uint8)
    mkdir, other = Path.mkdir, PageFiles(str(tmp_path / "rank"), 16)

    def taken(path: Path, *args: Any, **options: Any) -> None:
        if path == files.folder:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        mkdir(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", taken)
        assert files.clear()
    assert not files.folder.exists() and files.set("0", page) and other.exists("0")


def test_a_clear_after_which_no_folder_can_be_made_is_one(world, monkeypatch):
    """All is gone: what is in host memory is written again, with what comes behind it."""
    one, prompt = world(), tokens(1, 24)
    one.serve(prompt, max_new=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", failing(Path.mkdir, errno.ENOSPC, lambda path: path == one.files._parts))
        assert one.storage.clear().result(20)
    assert not one.stored()
    one.serve(prompt + tokens(300, 8), max_new=1)
    assert len(one.stored()) == 8


def test_a_rank_for_which_another_one_writes_clears_nothing(any_world):
    """It would do that later than the one that writes, which takes what it has written since for stored."""
    one, two = any_world(), any_world(writes=False, threads=ByHand)
    one.serve(tokens(1, 24), max_new=1)
    clears = [rank.storage.clear() for rank in (one, two)]
    assert clears[0].result(20) and not one.inside.names()
    one.serve(tokens(100, 24), max_new=1)
    two.threads.run(9)
    assert clears[1].result(0) and len(one.inside.names()) == 6


def test_what_another_removes_by_a_clear_is_written_again(any_world):
    """Of two that are told to clear the storage they share, one does so later, when the other has written again."""
    one, two = any_world(threads=ByHand), any_world(threads=ByHand)
    prompt, turns = tokens(1, 24), [tokens(300, 8), tokens(400, 8)]
    clears = [each.storage.clear() for each in (one, two)]
    one.threads.run(9)
    served(one, one.arrive(prompt, max_new=1))
    assert len(one.inside.names()) == 6
    two.threads.run(9)
    assert all(clear.result(0) for clear in clears) and not one.inside.names()
    # A request asks after it when it comes; by its end that has been found out.
    served(one, one.arrive(prompt + turns[0], max_new=1))
    assert len(one.inside.names()) == 8
    # Once.
    served(one, one.arrive(prompt + turns[0] + turns[1], max_new=1))
    assert one.storage.state()["known"] == 0


def test_a_folder_knows_that_somebody_else_has_cleared_it(tmp_path):
    files, other = PageFiles(str(tmp_path / "rank"), 16), PageFiles(str(tmp_path / "rank"), 16)
    assert not files.was_cleared() and not other.was_cleared()
    for _ in range(2):
        # It removes what the other has written, and knows of its own.
        assert files.clear() and not files.was_cleared()
        assert other.was_cleared() and not other.was_cleared()
    shutil.rmtree(files.folder)
    assert files.was_cleared() and files.set("0", torch.zeros(16, dtype=torch.uint8))
    assert other.was_cleared() and not other.was_cleared()


def test_a_page_under_way_while_another_clears_the_folder_is_written(tmp_path, monkeypatch):
    """It was an error, after which nothing was written for 5 s."""
    files, other = PageFiles(str(tmp_path / "rank"), 16), PageFiles(str(tmp_path / "rank"), 16)
    replace, cleared = os.replace, []

    def meanwhile(part: Path, path: str) -> None:
        if not cleared:
            cleared.append(part)
            other.clear()
        replace(part, path)

    monkeypatch.setattr(os, "replace", meanwhile)
    page = torch.zeros(16, dtype=torch.uint8)
    assert files.set("0", page) and cleared and other.exists("0")


# ---- what killed workers leave ----


def test_a_part_that_goes_away_does_not_end_the_removal_of_the_others(tmp_path, monkeypatch):
    files = PageFiles(str(tmp_path), 16)
    for i in range(5):
        part = files._parts / str(i)
        part.touch()
        os.utime(part, (0, 0))
    (files._parts / "new").touch()
    stat, went = Path.stat, []

    def going(path: Path, **options: Any) -> Any:
        if path.parent == files._parts and not went:
            # Its worker has written it.
            went.append(path)
            path.rename(tmp_path / "0.bin")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", going)
    files.remove_left()
    assert went and [path.name for path in files._parts.iterdir() if path not in went] == ["new"]


def test_what_a_worker_has_not_ended_clearing_is_removed(tmp_path):
    folder = tmp_path / "rank"
    files = PageFiles(str(folder), 16)
    names = ["rank.gone-1", "rank.gone-2", "rank2.gone-1"]
    for name in names:
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "0.bin").touch()
    for name in names[0], names[2]:
        os.utime(tmp_path / name, (0, 0))
    files.remove_left()
    end = time.monotonic() + 20
    while (tmp_path / names[0]).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    # One that is being removed, and one of another rank.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank", *names[1:]]
