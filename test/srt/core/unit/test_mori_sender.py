"""Mori's sender, which is the engine's: what it says of a request that another rank or stage has failed.

Its library needs RDMA. Of that only the names are here, which the engine's file imports and a failure does not call.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from mooncake_world import World
from sglang.srt.disaggregation.base import KVPoll

NAMES = "BackendType EngineDesc IOEngine IOEngineConfig MemoryDesc MemoryLocationType PollCqMode RdmaBackendConfig"


@pytest.fixture
def mori(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, content in (("mori", ""), ("mori.cpp", "TransferStatus"), ("mori.io", NAMES)):
        module = ModuleType(name)
        for one in content.split():
            setattr(module, one, type(one, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sglang.srt.disaggregation.mori.conn", raising=False)
    yield importlib.import_module("sglang.srt.disaggregation.mori.conn")
    sys.modules.pop("sglang.srt.disaggregation.mori.conn")


def test_its_reason_is_told(monkeypatch: pytest.MonkeyPatch, mori: ModuleType) -> None:
    """It once said "KV transfer failed" of whatever had happened."""
    world = World(monkeypatch)
    manager = world.prefill[0].manager
    sender = mori.MoriKVSender(manager, world.addr, 7, [0], 0)
    sender.fail("decode is gone, says another stage")
    assert sender.poll() == KVPoll.Failed and sender.failure_reason() == "decode is gone, says another stage"
    with pytest.raises(RuntimeError, match="decode is gone, says another stage"):
        sender.failure_exception()
    assert 7 not in manager.failure_records and 7 not in manager.request_status
    world.close()


def test_of_its_rooms_no_books_are_kept_that_nobody_closes(monkeypatch: pytest.MonkeyPatch, mori: ModuleType) -> None:
    """A sender was never forgotten."""
    world = World(monkeypatch)
    manager = world.prefill[0].manager
    assert not mori.MoriKVManager.ends_rooms and manager.ends_rooms
    manager.ends_rooms = False
    mori.MoriKVSender(manager, world.addr, 7, [0], 0)
    assert not manager.rooms.live
    world.close()
