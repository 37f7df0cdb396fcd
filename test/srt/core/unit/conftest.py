"""Shared by the unit tests."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Not set at all, it leaves out of `SchedulerReqTimeStats` what is tested here.
os.environ.setdefault("SGLANG_DISAGGREGATION_ENDED_REQUESTS", "0")
# As in a worker on a CPU host: it says so before its processes import the engine.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import end_of_a_run
import pytest
import sglang.srt.managers.scheduler  # noqa: F401  Some modules cannot be the first to be imported.
import torch
import zmq
from hypothesis import HealthCheck, settings
from sglang.srt import server_args

if TYPE_CHECKING:
    from ranks import Pair


# Three of these processes share two cores: threads of one mostly wait for each other.
torch.set_num_threads(1)

pytest_sessionfinish = end_of_a_run.pytest_sessionfinish


def pytest_collection_finish() -> None:
    """What has been imported stays, and no collection has to walk the engine and all that it brings."""
    gc.collect()
    gc.freeze()


# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

shared = zmq.Context.instance()
# The managers of the wire tests have threads that never end, as in the engine, and so their sockets stay open.
shared.set(zmq.MAX_SOCKETS, 65535)


def _shared_context(*args: int) -> zmq.Context:
    return shared


_shared_context.instance = zmq.Context.instance  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def one_zmq_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes a context for each socket, with threads and descriptors; a thousand workers are made here."""
    monkeypatch.setattr(zmq, "Context", _shared_context)


@pytest.fixture(autouse=True)
def no_socket_to_a_peer_stays() -> Iterator[None]:
    """ZeroMQ would go on to reach those of each worker that tests have made."""
    yield
    wire_ends = sys.modules.get("wire_ends")
    while wire_ends is not None and wire_ends.MADE:
        wire_ends.close_sockets(wire_ends.MADE.pop())
    common = sys.modules.get("sglang.srt.disaggregation.common.conn")
    # The engine keeps its own for good, in a context with places for a thousand.
    while common is not None and common.CommonKVReceiver._socket_cache:
        common.CommonKVReceiver._socket_cache.popitem()[1].close(linger=0)


def _restore_server_args() -> Iterator[None]:
    # Workers made here say their options to the whole process, as the engine does; the next test asks it for its own.
    before = server_args._global_server_args
    yield
    server_args._global_server_args = before


server_args_of_a_test = pytest.fixture(autouse=True)(_restore_server_args)
# What a fixture of a whole module says reaches all of its tests, and no other module's.
server_args_of_a_module = pytest.fixture(scope="module", autouse=True)(_restore_server_args)


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two TP ranks."""
    from ranks import Pair

    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        yield pair
        pair.stop()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the system has no thread left."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def without() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            yield

    return without


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each transfer backend."""
    return request.param


@pytest.fixture
def wire_module(backend: str) -> ModuleType:
    """`nixl_world` or `mooncake_world`."""
    return importlib.import_module(f"{backend}_world")


@pytest.fixture
def make_wire(wire_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a prefill and a decode worker on the wire, of the sizes that it is given."""
    made: list[Any] = []

    def make(**sizes: Any) -> Any:
        made.append(wire_module.World(monkeypatch, **sizes))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def wire(make_wire: Callable[..., Any]) -> Any:
    """One rank of each."""
    return make_wire()
