"""Shared by the unit tests."""

import pytest
import zmq

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
