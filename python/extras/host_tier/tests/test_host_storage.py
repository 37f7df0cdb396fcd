"""A storage below host memory: what comes back from it, for whom, and that a storage which fails costs hits only."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import assert_same
from sglang.srt.mem_cache.host_tier import storage_threads
from sglang.srt.mem_cache.host_tier.storage_backends import PagesInFiles, PageStorage
from storage_kinds import opened
from storage_world import PAGE, PATIENT, StorageWorld, making, names_of
from test_traps import tokens


@pytest.fixture
def world(tmp_path):
    """Makes decode workers with one storage, in files."""
    yield from making(tmp_path, "file")


@pytest.fixture
def any_world(tmp_path, kind):
    """Makes decode workers with one storage, of each kind."""
    yield from making(tmp_path, kind)


# ---- what comes back ----


def test_what_has_left_host_memory_comes_back(any_world):
    one = any_world()
    prompt = tokens(1, 24)
    assert one.serve(prompt) == 0
    one.forget()
    decode_req = one.admit(prompt + tokens(9, 10))
    req = decode_req.req
    assert (decode_req.kv_receiver.prefix_len, req.from_host, req.from_storage) == (24, 24, 24)
    one.complete(decode_req)
    one.step()
    one.check()
    state = one.tier.report()["storage"]
    assert (state["fetched"], state["late"], state["loading"], state["requests"]) == (24, 0, 0, 0)
    assert one.storage.fetches.brought == {}


def test_what_another_worker_has_generated_comes_from_there(any_world):
    """Neither its prompt nor its answer is sent."""
    one, two = any_world(), any_world()
    prompt = tokens(1, 24)
    one.serve(prompt, max_new=9)
    # 7, then 5 seven times; of the last token of an answer there is no KV.
    assert two.serve(prompt + [7] + [5] * 7 + [1, 2, 3]) == 32
    assert two.tier.report()["storage"]["fetched"] == 32


def test_what_is_stored_is_not_written_again(any_world):
    one, two = any_world(), any_world()
    one.serve(tokens(1, 24))
    assert one.tier.report()["storage"]["written"] == 24
    two.storage.stopped = True
    two.serve(tokens(1, 24))
    state = two.tier.report()["storage"]
    assert (state["written"], state["known"]) == (0, 24)
    one.forget()
    one.serve(tokens(1, 24) + tokens(9, 4))
    # What was fetched need not be looked at.
    state = one.tier.report()["storage"]
    assert (state["written"], state["known"]) == (28, 0)


def test_prompts_of_another_extra_key_are_not_the_same(any_world):
    one = any_world()
    one.serve(tokens(1, 24), extra_key="a")
    one.forget()
    assert one.serve(tokens(1, 24), extra_key="b") == 0
    assert one.serve(tokens(1, 24)) == 0
    one.forget()
    assert one.serve(tokens(1, 24), extra_key="a") == 24


def test_a_short_prompt_is_not_asked_for(world):
    one = world(limits=PATIENT._replace(threshold=32))
    one.serve(tokens(1, 24))
    one.forget()
    assert one.serve(tokens(1, 24)) == 0 and one.tier.report()["storage"]["fetched"] == 0
    one.forget()
    # It has too little of this one.
    assert one.serve(tokens(1, 24) + tokens(9, 20)) == 0


# ---- a storage that fails ----

BRIEF = PATIENT._replace(base_s=0.2, per_ki_s=0.0)


def time_is_up(one: StorageWorld) -> None:
    """For all that wait: on a slow machine a short time would be up before what a test does in it."""
    for fetch in one.storage.fetches.open:
        fetch.deadline = 0.0


class Gate:
    """A storage that hangs until a test opens it."""

    def __init__(self, files: PageStorage, name: str):
        self.open, self.calls, self._call = threading.Event(), 0, getattr(files, name)
        setattr(files, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        assert self.open.wait(30)
        return self._call(*args)


@pytest.mark.parametrize("name", ["exists", "get"])
def test_a_storage_that_hangs_costs_its_hit_and_a_while(any_world, name):
    one, two = any_world(), any_world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    gate = Gate(two.files, name)
    waiting = two.arrive(prompt)
    two.handshake(waiting)
    # Others pass it.
    passing = two.admit(tokens(50, 3))
    two.until(lambda: gate.calls)
    assert waiting in two.queue.queue
    time_is_up(two)
    two.until(lambda: waiting not in two.queue.queue)
    assert (waiting.kv_receiver.prefix_len, waiting.req.from_storage) == (0, 0)
    assert two.tier.report()["storage"]["late"] == 1 and two.storage.fetches.loading_tokens == 0
    for decode_req in (waiting, passing):
        two.complete(decode_req)
    two.step()
    two.check()
    # What comes late is written to nobody's pages, which `check` would find.
    taken = two.tier.host.pool.alloc(two.tier.host.pool.available_size())
    stored = two.tier.memory.pools[0][1].kv_buffer.view(torch.uint8).clone()
    gate.open.set()
    two.until(lambda: two.quiet, step=False)
    assert torch.equal(two.tier.memory.pools[0][1].kv_buffer.view(torch.uint8), stored)
    two.tier.host.pool.free(taken)
    two.check()


def test_what_has_come_in_time_counts(any_world):
    """A slow storage: the first pages are there when the time is up."""
    one, two = any_world(), any_world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    get, gate, calls = two.files.get, threading.Event(), []

    def slow(*args):
        calls.append(args)
        if len(calls) > 3:
            time_is_up(two)
            gate.wait(30)
        return get(*args)

    two.files.get = slow
    decode_req = two.admit(prompt)
    assert decode_req.req.from_storage == 12 and two.tier.report()["storage"]["late"] == 1
    gate.set()
    two.complete(decode_req)
    two.step()
    two.check()


def test_who_does_not_answer_is_left_alone_for_a_while(any_world, caplog):
    """Or each request would wait as long for nothing."""
    one = any_world()
    gate = Gate(one.files, "exists")
    waiting = one.arrive(tokens(100, 24))
    one.until(lambda: gate.calls)
    time_is_up(one)
    one.until(lambda: not one.storage.busy)
    assert one.threads.reading.pausing and caplog.text.count("it has not answered in time") == 1
    # At once.
    late = one.arrive(tokens(1, 12))
    one.handshake(late)
    one.step()
    assert late.kv_receiver.asked and gate.calls == 1
    gate.open.set()
    one.threads.reading._until = 0.0
    one.handshake(waiting)
    asked = one.arrive(tokens(200, 24))
    one.until(lambda: gate.calls == 2 and one.storage.is_done(asked.req.rid))


@pytest.mark.parametrize("name", ["exists", "get"])
def test_errors_are_told_once_and_it_is_tried_again(any_world, monkeypatch, caplog, name):
    monkeypatch.setattr(storage_threads, "PAUSE_S", 0.05)
    one, two = any_world(), any_world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(two.files, name, raising(errno.EIO))
        two.storage._host.writes = None
        for _ in range(3):
            assert two.serve(prompt) == 0
            two.forget()
            time.sleep(0.06)
    assert caplog.text.count("Reading from the KV storage") == 1 and "Input/output error" in caplog.text
    # The last error may be noted, and the pause after it begin, only after its request was told.
    served, end = two.serve(prompt), time.monotonic() + 20
    while served != 24 and time.monotonic() < end:
        two.forget()
        time.sleep(0.06)
        served = two.serve(prompt)
    assert served == 24


def raising(number: int):
    def call(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_storage_that_takes_nothing(world, monkeypatch, caplog, number):
    """Full, or only to be read: requests go on, and what could not be written is written when there is more of it."""
    one = world()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", raising(number))
        one.serve(tokens(1, 24))
        one.serve(tokens(50, 12))
        assert not one.stored() and not list(one.files.path.iterdir())
    state = one.tier.report()["storage"]
    # One page of it failed, and after that it was left alone. It is saved in three parts, and tried again with each.
    assert (state["written"], state["failed"]) == (0, PAGE) and state["dropped"] >= 32
    assert caplog.text.count("Writing to the KV storage") == 1 and os.strerror(number) in caplog.text
    # The time for which it is left alone is over.
    one.tier.storage.threads.writing._until = 0.0
    one.serve(tokens(1, 24) + tokens(9, 4))
    assert one.tier.report()["storage"]["written"] == 28
    one.forget()
    assert one.serve(tokens(1, 24) + tokens(9, 4)) == 28


def test_a_folder_that_goes_away_is_made_anew(world):
    import shutil

    one = world()
    one.serve(tokens(1, 24))
    shutil.rmtree(one.files.path)
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
    one.forget()
    assert one.serve(tokens(1, 24)) == 24


def test_a_folder_that_may_only_be_read_is_read(world, monkeypatch, caplog):
    one = world()
    one.serve(tokens(1, 24))
    with monkeypatch.context() as patch:
        patch.setattr("os.mkdir", raising(errno.EROFS))
        patch.setattr("builtins.open", read_only(open))
        two = world()
        assert two.serve(tokens(1, 24) + tokens(9, 4)) == 24
    assert caplog.text.count("Writing to the KV storage") == 1


def read_only(opened: Any) -> Any:
    def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, mode, *args, **options)

    return call


# ---- pages ----


@pytest.mark.parametrize("change", ["short", "empty", "long", "bits", "another page", "header"])
def test_what_is_not_what_was_written_is_not_believed(any_world, change):
    one, two = any_world(), any_world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    names = names_of(prompt)
    assert sorted(names) == one.inside.names()
    data, other = one.inside.data(names[2]), one.inside.data(names[3])
    changed = {
        "short": data[:-1],
        "empty": b"",
        "long": data + b"0",
        "bits": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "another page": data[:16] + other[16:],
        "header": b"abcd" + data[4:],
    }[change]
    if not isinstance(one.files, PagesInFiles):
        # Mooncake has no empty objects.
        changed = changed or data[:1]
    one.inside.put(names[2], changed)
    assert two.serve(prompt) == 8
    # It was written anew.
    two.forget()
    assert two.serve(prompt) == 24


def test_two_may_write_the_same_page_at_once(tmp_path, kind):
    files = [opened(kind, tmp_path, 1 << 16) for _ in range(2)]
    page = torch.arange(1 << 16, dtype=torch.int64).to(torch.uint8)
    wrong: list[Any] = []

    def write(one: PageStorage) -> None:
        for _ in range(60):
            one.set("key", page)

    def read() -> None:
        buffer = torch.empty_like(page)
        while writers[0].is_alive() or writers[1].is_alive():
            found = files[0].get("key", buffer)
            if found is not None and not torch.equal(found, page):
                wrong.append(found)

    writers = [threading.Thread(target=write, args=(one,)) for one in files]
    for thread in writers:
        thread.start()
    read()
    assert not wrong and not files[0].corrupt and files[1].exists("key")


# ---- what is written ----


def test_a_page_that_is_given_away_while_it_is_read_is_not_written(any_world):
    one = any_world()
    read, pages = one.threads.pages.read, one.threads.pages

    def reading(page: int, buffer: torch.Tensor) -> None:
        read(page, buffer)
        # In another thread, an eviction.
        pages.given_away[page] += 1

    pages.read = reading
    one.serve_in_one(tokens(1, 24))
    assert not one.inside.names() and one.tier.report()["storage"]["dropped"] == 24
    pages.read = read
    # With what comes behind it.
    one.serve(tokens(1, 24) + tokens(9, 4))
    assert one.tier.report()["storage"]["written"] == 28


# ---- ends ----


def test_new_weights_do_not_read_what_the_old_have_written(any_world):
    one = any_world()
    prompt = tokens(1, 24)
    one.serve(prompt)
    one.storage.stop()
    one.forget()
    one.weights += 1
    assert one.serve(prompt) == 0
    one.forget()
    assert one.serve(prompt) == 0 and one.tier.report()["storage"]["written"] == 24
    stored = one.inside.names()
    one.serve(tokens(50, 12))
    assert one.inside.names() == stored and not one.tier.report()["storage"]["in_use"]


# ---- ranks ----


def on_ranks(rank: int, folder: str, case: str, kind: str) -> list[Any]:
    """A rank stores; what it has is gone from all else, and one rank's storage is not as the other's."""
    limits = BRIEF if case == "hangs" else PATIENT
    one = StorageWorld(f"{folder}/{rank}", group=dist.group.WORLD, limits=limits, kind=kind)
    prompt = tokens(1, 24)
    if rank == 1 and case == "was full":
        name, put = names_of(prompt)[2], one.files.set
        one.files.set = lambda key, page: key != name and put(key, page)
    told: list[Any] = [one_after_another(one, prompt)]
    one.forget()
    if rank == 1:
        change(one, case)
    told.append(one_after_another(one, prompt + tokens(9, 8)))
    one.check()
    told += [one.tier.figures(), one.storage.fetches.loading_tokens, one.queue.ranks.disagreements]
    one.close()
    return told


def one_after_another(one: StorageWorld, prompt: list[int]) -> tuple[int, int]:
    """A request in steps that both ranks take, as many on each."""
    decode_req = one.arrive(prompt, max_new=1)
    receiver = decode_req.kv_receiver
    one.handshake(decode_req)
    one.until_on_all(lambda: receiver.asked)
    one.complete(decode_req)
    one.step()
    while decode_req.req in one.running:
        one.decode()
    one.until_on_all(lambda: one.tier.memory.wait() or not one.tier.saves.busy)
    one.settle_alone()
    return receiver.prefix_len, decode_req.req.from_storage


def change(one: StorageWorld, case: str) -> None:
    names = names_of(tokens(1, 24))
    if case == "a page is missing":
        one.inside.lose(names[3])
    elif case == "a page is corrupt":
        one.inside.put(names[2], b"0" * len(one.inside.data(names[2])))
    elif case == "hangs":
        one.gate = Gate(one.files, "get")
    elif case == "fails":
        one.files.get = raising(errno.EIO)


@pytest.mark.parametrize(
    ("case", "hit"),
    [
        ("the same", 24),
        ("a page is missing", 12),
        ("a page is corrupt", 8),
        ("was full", 8),
        ("hangs", 0),
        ("fails", 0),
    ],
)
def test_ranks_fetch_the_same(pair, tmp_path, case, hit, kind):
    told = assert_same(pair.run(on_ranks, str(tmp_path), case, kind))
    assert told[:2] == [(0, 0), (hit, hit)] and told[-2:] == [0, 0]
