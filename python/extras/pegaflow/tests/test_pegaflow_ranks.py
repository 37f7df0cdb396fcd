"""TP ranks that save to a PegaFlow server and load from it: two processes, whose trees and pools stay the same.

Server, trees, pools and the reduction between the ranks are real; only the CUDA driver under the server is a stand-in.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_server
import pytest
import small_engine
import torch.distributed as dist
from ranks import assert_same
from sglang.srt.mem_cache.pegaflow import prefetches
from sglang.srt.mem_cache.pegaflow import session as pegaflow_session
from small_engine import SmallEngine
from waiting import until

pytestmark = pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))

PROMPT = random.Random(0).choices(range(1000), k=140)
HELD = 128
MORE = random.Random(1).choices(range(1000), k=140)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    server = host_server.HostServer(tmp_path_factory.mktemp("pegaflow")).start()
    yield server.endpoint
    server.kill()


@pytest.fixture
def name():
    """A namespace that no other test has."""
    return f"ranks-{random.random()}"


class Rank:
    """One rank's tree and pool; ``history`` has what must be the same on all ranks, step by step."""

    def __init__(self, rank: int, endpoint: str, name: str, mla: bool = False, size: int = 512) -> None:
        # Each has its own part of every page, or all have the same.
        name, weights = (name, 0) if mla else (f"{name}-{rank}", 10 * rank)
        self.small = SmallEngine(SimpleNamespace(endpoint=endpoint), size, mla=mla, namespace=name, rank=weights)
        self.tree, self.session = self.small.tree, self.small.session
        self.tree.tp_group, self.tree.saves._saves = dist.group.WORLD, rank == 0 or not mla
        self.history: list[Any] = []
        # So that their threads do not come to an end in the same step.
        self.pause_s = 0.001 + 0.002 * rank

    def step(self) -> None:
        tree = self.tree
        tree.advance()
        under_way = [(found.rid, found.stage.value, found.pages, found.given_up) for found in tree.prefetches.open]
        sizes = tree.evictable_size(), tree.protected_size(), self.small.allocator.available_size()
        self.history.append((*sizes, under_way, len(tree.saves.under_way), len(tree.saves.to_come)))
        time.sleep(self.pause_s)

    def wait(self, rid: str, seconds: float = 8) -> int:
        """Step until ``rid`` waits for nothing; the tokens that were loaded for it."""
        end = time.monotonic() + seconds
        while not self.tree.check_prefetch_progress(rid):
            self.step()
            assert time.monotonic() < end, "still loading"
        loaded = self.tree.pop_prefetch_loaded_tokens(rid)
        self.history.append((rid, "loaded", loaded))
        return loaded

    def rest(self) -> None:
        while self.tree.busy:
            self.step()

    def run(self, tokens: list[int]) -> int:
        held = self.small.run(tokens)
        self.history.append(("held", held))
        self.rest()
        return held

    def serve(self, rid: str, tokens: list[int]) -> tuple[int, int]:
        self.small.ask(rid, tokens)
        return self.wait(rid), self.run(tokens)

    def flush(self) -> None:
        self.rest()
        self.small.flush()
        # What one has saved may be found before what the other has.
        dist.barrier()


@contextmanager
def rank_of(*args: Any, **options: Any) -> Iterator[Rank]:
    before = pegaflow_session.PROBE_S, prefetches.TIMEOUT_S
    pegaflow_session.PROBE_S, prefetches.TIMEOUT_S = 0.2, 1.0
    try:
        one = Rank(*args, **options)
        yield one
        one.rest()
        one.small.audit()
        one.small.close()
    finally:
        pegaflow_session.PROBE_S, prefetches.TIMEOUT_S = before


# ---- what both ranks do ----


def fewer_pages(rank: int, endpoint: str, name: str, held_by_1: int) -> list:
    """Rank 1 has lost the end of a prompt, and what it saves is late."""
    with rank_of(rank, endpoint, name) as one:
        one.tree.tp_group = None
        if rank == 0 or held_by_1:
            one.small.run(PROMPT[: held_by_1 if rank else None])
        one.small.flush()
        one.tree.tp_group = dist.group.WORLD
        dist.barrier()
        if rank == 1:
            hand_over = one.session.save
            one.session.save = lambda save: threading.Timer(0.1, hand_over, [save]).start()  # type: ignore[method-assign]
        assert one.serve("first", PROMPT) == (held_by_1, held_by_1)
        one.serve("second", MORE)
        one.flush()
        # What both have computed, both have saved.
        assert one.serve("third", PROMPT) == (HELD, HELD)
        one.serve("fourth", MORE[:100] + PROMPT)
        return one.history


def one_copy(rank: int, endpoint: str, name: str) -> list:
    """An MLA model: rank 0 saves, all load."""
    with rank_of(rank, endpoint, name, mla=True) as one:
        one.serve("first", PROMPT)
        one.flush()
        assert one.serve("second", PROMPT) == (HELD, HELD)
        saved = one.session.counters.saved
        assert saved == (HELD // 16 if rank == 0 else 0), saved
        assert one.session.counters.loaded == HELD // 16
        return one.history


def lease_lost(rank: int, endpoint: str, name: str, victim: int) -> list:
    """The server takes the load of one rank and turns down that of the other, whose lease it has no more."""
    with rank_of(rank, endpoint, name) as one:
        one.serve("first", PROMPT)
        one.flush()
        load = one.session.load

        def without_lease(lookup, slots, skip=0):
            one.session.connection.client.release(lookup.lease)
            return load(lookup, slots, skip)

        if rank == victim:
            one.session.load = without_lease  # type: ignore[method-assign]
        one.small.ask("second", PROMPT)
        assert one.wait("second") == 0
        counters = one.session.counters
        one.rest()
        assert (counters.loaded, counters.loads_failed) == ((0, 8) if rank == victim else (8, 0))
        assert counters.lost == 0, "a lease that has run out is no lost server"
        one.session.load = load  # type: ignore[method-assign]
        assert one.run(PROMPT) == 0
        one.flush()
        assert one.serve("third", PROMPT) == (HELD, HELD)
        return one.history


def server_dies(rank: int, endpoint: str, name: str, victim: int, when: str) -> list:
    """The server of one rank dies, and comes back; the other rank's goes on."""
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if rank == victim:
            # One copy takes so long that its server can be killed in the middle.
            server = host_server.HostServer(Path(folder), copy_us=150_000).start()
            endpoint = server.endpoint
        try:
            with rank_of(rank, endpoint, name) as one:
                if when == "load":
                    one.run(PROMPT)
                    one.flush()
                    one.small.ask("first", PROMPT)
                    while not one.tree.prefetches.loading_tokens:
                        one.step()
                else:
                    one.small.run(PROMPT)
                    one.step()
                if server:
                    time.sleep(0.05)
                    server.kill()
                if when == "load":
                    assert one.wait("first") == 0
                one.rest()
                if server:
                    until(lambda: not one.session.up, "the end of the session")
                # A miss, since one of them has no server, whatever the other finds in its own.
                assert one.serve("second", PROMPT if when == "load" else MORE)[0] == 0
                if server:
                    server.copy_us = 0
                    server.start()
                    until(lambda: one.session.up, "the session")
                dist.barrier()
                for tokens in (PROMPT, MORE):
                    one.run(tokens)
                one.flush()
                assert one.serve("third", PROMPT) == (HELD, HELD)
                assert one.serve("fourth", MORE) == (HELD, HELD)
                return one.history
        finally:
            if server:
                server.kill()


def come_to_it_first(rank: int, endpoint: str, name: str, first: int) -> list:
    """What was found has no room but alone; one rank comes to the request some steps before the other."""
    with rank_of(rank, endpoint, name, size=320) as one:
        for tokens in (PROMPT, MORE):
            one.serve(f"save {tokens[0]}", tokens)
        one.flush()
        one.small.ask("first", PROMPT)
        one.small.ask("second", MORE)
        while one.tree.prefetches.open[0].stage.value != "found" or len(one.tree.prefetches.open) > 1:
            one.step()
        for _ in range(5):
            if rank == first:
                one.tree.check_prefetch_progress("second")
            one.step()
        assert one.tree.prefetches.open[0].stage.value == "found", "no rank begins without the other"
        assert one.wait("second") == HELD
        return one.history


def server_forgets(rank: int, endpoint: str, name: str, victim: int) -> list:
    """The server of one rank drops what it has, unseen; all ranks save what they hold of it once more."""
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if rank == victim:
            server = host_server.HostServer(Path(folder)).start()
            endpoint = server.endpoint
        try:
            with rank_of(rank, endpoint, name, size=2048) as one:
                one.serve("first", PROMPT)
                small_engine.wait_until_found(one.session, one.small.saves)
                if server:
                    server.forget()
                dist.barrier()
                saved = one.session.counters.saved
                # All of it is in the tree; that the server is asked shows what it lacks.
                one.step()
                one.small.ask("second", PROMPT)
                assert one.tree.check_prefetch_progress("second")
                one.rest()
                assert one.session.counters.saved == saved + HELD // 16
                one.flush()
                assert one.serve("third", PROMPT) == (HELD, HELD)
                return one.history
        finally:
            if server:
                server.kill()


# ---- the tests ----


@pytest.mark.parametrize("held_by_1", [0, 48])
def test_what_only_one_rank_finds_is_loaded_by_none(pair, endpoint, name, held_by_1):
    assert_same(pair.run(fewer_pages, endpoint, name, held_by_1))


def test_mla_pages_are_saved_once(pair, endpoint, name):
    assert_same(pair.run(one_copy, endpoint, name))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_load_that_fails_on_one_rank(pair, endpoint, name, victim):
    history = assert_same(pair.run(lease_lost, endpoint, name, victim))
    assert ("second", "loaded", 0) in history


@pytest.mark.parametrize("when", ["load", "save"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_server_of_one_rank_dies(pair, endpoint, name, victim, when):
    assert_same(pair.run(server_dies, endpoint, name, victim, when))


@pytest.mark.parametrize("victim", [0, 1])
def test_what_the_server_of_one_rank_has_lost_is_saved_again_by_all(pair, endpoint, name, victim):
    assert_same(pair.run(server_forgets, endpoint, name, victim))


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_to_a_request_first_waits_for_the_other(pair, endpoint, name, first):
    assert_same(pair.run(come_to_it_first, endpoint, name, first))
