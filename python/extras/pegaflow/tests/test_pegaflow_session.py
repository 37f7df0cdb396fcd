"""A connection to a PegaFlow server whose client a test answers for: errors at points that a real server seldom has."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pegaflow import session as pegaflow_session
from sglang.srt.mem_cache.pegaflow.connection import Connection
from sglang.srt.mem_cache.pegaflow.session import (
    Asker,
    Counters,
    Load,
    Loader,
    Lookup,
    PegaFlowSession,
    Save,
    Saver,
)


class Client:
    """Takes everything; a test replaces what it is about."""

    def __init__(self) -> None:
        self.released: list[bytes] = []

    def health(self) -> None:
        pass

    def unregister_context(self, instance: str) -> None:
        pass

    def start_session_watcher(self, *args: Any) -> None:
        pass

    def register_context_batch(self, *args: Any) -> tuple[bool, str]:
        return True, ""

    def query_prefetch(self, instance: str, hashes: list[bytes], question: str) -> Any:
        return SimpleNamespace(num_hit_blocks=len(hashes), lease=b"lease")

    def load(self, *args: Any) -> tuple[bool, str]:
        return True, ""

    def release(self, lease: bytes) -> None:
        self.released.append(lease)


class State:
    def __init__(self, value: int = 1) -> None:
        self.value = value

    def shm_name(self) -> str:
        return "name"

    def get_state(self) -> int:
        return self.value


@pytest.fixture
def session(monkeypatch):
    """One whose threads run, registered once, with two pages of one buffer."""
    monkeypatch.setattr(pegaflow_session, "GRACE_S", 0.05)
    connection = object.__new__(Connection)
    layout = SimpleNamespace(names=["k"], page_size=4, buffers={}, num_pages=[2], page_bytes=[16])
    vars(connection).update(
        url="http://127.0.0.1:1",
        instance_id="one",
        namespace="test",
        device=torch.device("cpu"),
        device_id=0,
        counters=Counters(),
        layout=layout,
        up=True,
        stopped=False,
        client=Client(),
        registering=threading.Lock(),
        registrations=1,
        last_probe=0.0,
        _retry_s=2.0,
        _told="",
    )
    made = object.__new__(PegaFlowSession)
    made.connection, made._calls = connection, queue.SimpleQueue()
    made.saver, made.asker, made.loader = Saver(connection), Asker(connection), Loader(connection, State)
    threads = [threading.Thread(target=run, daemon=True) for run in (made.saver.run, made._run_calls)]
    for thread in threads:
        thread.start()
    yield made
    made.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def wait(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    pytest.fail("it did not come about")


def loaded(session: PegaFlowSession) -> Load:
    lookup = Lookup([b"a", b"b"])
    session.ask(lookup)
    wait(lambda: lookup.hits is not None)
    load = session.load(lookup, torch.arange(8))
    wait(lambda: load.final)
    return load


def raise_(error: Exception) -> Any:
    raise error


def test_what_cannot_be_sent_has_failed_and_is_over(session):
    """No memory to share, or no descriptor: the pages come back, and so does the lease."""
    session.loader.load_state = lambda: raise_(OSError("shm_open: No space left on device"))
    assert loaded(session).failed and session.connection.client.released == [b"lease"]
    assert session.up and session.counters.lost == 0 and session.counters.loads_failed == 2
    session.loader.load_state = State
    assert not loaded(session).failed


def test_a_state_that_cannot_be_read_is_a_load_that_failed(session):
    """And the thread goes on: everybody waits for it."""
    session.loader.load_state = lambda: SimpleNamespace(
        shm_name=lambda: "name", get_state=lambda: raise_(RuntimeError("gone"))
    )
    assert loaded(session).failed
    session.loader.load_state = State
    assert not loaded(session).failed


@pytest.mark.parametrize("how", ["says so in the state", "calls it invalid"])
def test_a_load_that_is_turned_down_is_no_lost_server(session, how):
    """Its lease had run out: to register anew would fail the loads of others."""
    state = State(-1 if "state" in how else 0)
    session.loader.load_state = lambda: state
    error = RuntimeError("unknown or expired") if "state" in how else ValueError("16 bytes")
    session.connection.client.load = lambda *args: raise_(error)
    assert loaded(session).failed
    assert session.connection.registrations == 1 and session.counters.lost == 0 and session.up


def test_the_pool_is_not_registered_anew_while_a_load_is_handed_over(session):
    """It would be accepted under the new registration, and fail, and its pages be given away, with the old one."""
    seen: list[int] = []
    meanwhile: list[threading.Thread] = []

    def load(*args: Any) -> tuple[bool, str]:
        seen.append(session.connection.registrations)
        meanwhile.append(threading.Thread(target=session.connection.renew, args=["a save has failed"]))
        meanwhile[0].start()
        # As long as it takes where nothing holds it up.
        meanwhile[0].join(0.5)
        seen.append(session.connection.registrations)
        return True, ""

    session.connection.client.load = load
    state = State(0)
    session.loader.load_state = lambda: state
    lookup = Lookup([b"a", b"b"])
    session.ask(lookup)
    wait(lambda: lookup.hits is not None)
    load_ = session.load(lookup, torch.arange(8))
    # The server has dropped it with the old registration.
    wait(lambda: load_.final)
    meanwhile[0].join()
    assert seen == [1, 1] and session.connection.registrations == 2 and load_.failed


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_of_a_device_that_has_failed_is_not_sent(session, monkeypatch, fails):
    """An error of a step on the device is raised where somebody waits for it: what the step wrote nobody knows."""
    waited: list[torch.device] = []
    sent: list[tuple] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        if fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    session.connection.device = torch.device("cuda", 0)
    session.connection.client.save = lambda *args: (sent.append((*args, len(waited))), (True, ""))[1]
    save = Save(torch.arange(8), [b"a", b"b"])
    session.save(save)
    wait(lambda: save.done)
    assert save.saved == (not fails) and len(waited) == 1 and len(sent) == (not fails)
    assert all(call[-1] == 1 for call in sent), "the server is called when the device has been waited for"


def test_a_question_that_was_not_answered_says_so(session):
    session.connection.client.query_prefetch = lambda *args: raise_(RuntimeError("gone"))
    session.connection.client.health = lambda: raise_(RuntimeError("gone"))
    lookup = Lookup([b"a"])
    session.ask(lookup)
    wait(lambda: lookup.hits is not None)
    assert lookup.failed and lookup.hits == 0 and not session.up
    another = Lookup([b"a"])
    session.ask(another)
    assert another.failed and another.hits == 0


@pytest.mark.parametrize("hits", [-1, 3])
def test_an_answer_that_cannot_be_is_none(session, hits):
    """A tree that believed it would have slots for tokens that it has not, or wait for ever."""
    query = session.connection.client.query_prefetch
    session.connection.client.query_prefetch = lambda *args: SimpleNamespace(num_hit_blocks=hits, lease=b"lease")
    lookup = Lookup([b"a", b"b"])
    session.ask(lookup)
    wait(lambda: lookup.hits is not None)
    assert lookup.failed and lookup.hits == 0 and not lookup.lease
    session.connection.client.query_prefetch = query
    assert session.up and not loaded(session).failed


def test_what_the_server_fetches_from_a_slower_tier_holds_nobody_up(session):
    """Its answer is that it is not ready yet; the thread asked for this again and for nothing else until it was."""
    query, fetched = session.connection.client.query_prefetch, threading.Event()

    def answer(instance: str, hashes: list[bytes], question: str) -> Any:
        slow = hashes[0].startswith(b"slow") and not fetched.is_set()
        return SimpleNamespace() if slow else query(instance, hashes, question)

    session.connection.client.query_prefetch = answer
    slow, gone = Lookup([b"slow"]), Lookup([b"slow too"])
    session.ask(slow)
    session.ask(gone)
    assert not loaded(session).failed
    assert slow.fetching and slow.hits is None and session.up
    # Who has given up is not waited for.
    session.drop(gone)
    wait(lambda: gone.hits is not None)
    assert gone.failed and slow.hits is None
    fetched.set()
    wait(lambda: slow.hits is not None)
    assert slow.hits == 1 and slow.lease and not slow.failed
