"""Trees that save to a real PegaFlow server and load from it; only the CUDA driver under the server is a stand-in."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pegaflow_host"))

import host_server  # noqa: E402

pytestmark = pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = host_server.HostServer(tmp_path_factory.mktemp("pegaflow")).start()
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path):
    """One that the test may kill."""
    server = host_server.HostServer(tmp_path).start()
    yield server
    server.kill()


@pytest.fixture
def engine(monkeypatch):
    """Makes engines, and looks at each of them at the end."""
    import small_engine
    from sglang.srt.mem_cache import pegaflow_radix_cache, pegaflow_session

    monkeypatch.setattr(pegaflow_session, "PROBE_S", 0.2)
    monkeypatch.setattr(pegaflow_radix_cache, "TIMEOUT_S", 1.0)
    engines = []

    def make(*args, namespace=None, **options):
        namespace = namespace or f"test-{random.random()}"
        engines.append(small_engine.SmallEngine(*args, namespace=namespace, **options))
        return engines[-1]

    yield make
    for made in engines:
        made.audit()
        made.close()


def prompt(length, seed=0):
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_saved_evicted_loaded(shared, engine, page, mla):
    small = engine(shared, page=page, mla=mla)
    tokens = prompt(300)
    assert small.serve(tokens) == (0, 0)
    small.flush()
    held = 299 // page * page
    assert small.serve(tokens) == (held, held)
    # On the device now.
    assert small.serve(tokens) == (0, held)


def test_two_engines_share_one_pool(shared, engine):
    one, two = engine(shared, namespace="both"), engine(shared, namespace="both")
    other = engine(shared, namespace="other")
    tokens = prompt(200)
    one.serve(tokens)
    assert one.tree.drain()
    assert two.serve(tokens) == (192, 192)
    assert other.serve(tokens) == (0, 0)
