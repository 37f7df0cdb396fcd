"""Storages below host memory."""

from __future__ import annotations

from collections.abc import Iterator

import mooncake_master
import pytest
import storage_kinds
from mooncake_master import Master


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """Skips where Mooncake is not installed."""
    with mooncake_master.running(tmp_path_factory.mktemp("mooncake")) as started:
        yield started
        # Before the master goes, or each looks for it for a while.
        storage_kinds.close_clients()


@pytest.fixture(params=storage_kinds.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each storage backend, as `storage_kinds` has it."""
    return request.getfixturevalue("master").kind if request.param == "mooncake" else request.param
