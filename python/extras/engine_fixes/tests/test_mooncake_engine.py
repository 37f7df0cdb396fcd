"""What the server says when Mooncake's engine does not start or cannot register memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

from sglang_pd_radix.supplied import mooncake_host


class Library:
    """Stands for Mooncake's library."""

    start = register = 0

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str) -> int:
        return self.start

    def get_rpc_port(self) -> int:
        return 5

    def batch_register_memory(self, pointers: list[int], lengths: list[int]) -> int:
        return self.register


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Library]:
    module = ModuleType("mooncake.engine")
    kind = type("Library", (Library,), {})
    module.TransferEngine = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    return kind


@pytest.fixture
def rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mooncake_host, "RDMA_DEVICES", tmp_path)


def test_a_library_that_does_not_start(library, rdma) -> None:
    library.start = -1
    with pytest.raises(RuntimeError, match="does not start on 10.0.0.1 for transfers over RDMA") as error:
        MooncakeTransferEngine("10.0.0.1", 0)
    for way_out in ("--disaggregation-ib-device", "MC_FORCE_TCP=1", "--disaggregation-transfer-backend nixl"):
        assert way_out in str(error.value)


def test_memory_that_cannot_be_registered(library, rdma, caplog) -> None:
    library.register = -12
    assert MooncakeTransferEngine("10.0.0.1", 0).batch_register([1, 2], [1 << 20, 1 << 20]) == -12
    assert "could not register 2 buffers, 2 MiB in total (code -12)" in caplog.text and "ulimit -l" in caplog.text
    caplog.clear()
    library.register = 0
    assert MooncakeTransferEngine("10.0.0.1", 0).batch_register([1], [1]) == 0
    assert not caplog.records
