"""A storage below host memory that fails in part: what is lost of it comes back later, and nobody else pays for it."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest
from sglang.srt.mem_cache.host_tier import storage_threads
from storage_world import PAGE, making, names_of
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


def test_a_look_up_does_not_wait_for_reads(world):
    """All readers are in long reads: what the storage does not have is known at once, and so is what has been read."""
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
