"""From an earlier version of this package without the flag to this one with it and back, under load, worker by worker.

The earlier version is that of a commit, run from its source: what an editable install of it would run.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from pd import FLAG, check_idle, counter
from rolling import Load, join, named
from test_drain_command import drain

pytestmark = [pytest.mark.timeout(3000), pytest.mark.thorough]

ROOT = Path(__file__).parents[3]
EARLIER = "fea6761"
# Decode first, then prefill, and the other way round; each order has both versions side by side.
ROLLS = [
    ("new", ("decode-0", "prefill-0", "decode-1", "prefill-1")),
    ("old", ("prefill-1", "decode-1", "prefill-0", "decode-0")),
]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """The `python` folder of an earlier version."""
    found = subprocess.run(["git", "-C", str(ROOT), "archive", EARLIER, "python"], capture_output=True)
    if found.returncode:
        pytest.skip(f"no commit {EARLIER} here: {found.stderr.decode()}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "python"


def path_with(folder: Path) -> str:
    """PYTHONPATH by which a worker finds this version first, and not this one of the tests."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(folder), *(one for one in others if one and Path(one) != ROOT / "python")])


def test_versions_and_the_flag_change_under_load(clusters, model, earlier):
    old = {"PYTHONPATH": path_with(earlier)}
    cluster = clusters.get(
        model,
        prefill=2,
        decode=2,
        prefill_env=[old, old],
        decode_env=[old, old],
        common_args=["--page-size", "16"],
        backend="nixl",
    )
    held = {}
    try:
        assert all(str(earlier) in process.env["PYTHONPATH"] for process in cluster.processes[:4])
        with Load(cluster.router_url) as load:
            load.wait_answers(8)
            for version, names in ROLLS:
                for name in names:
                    process = named(cluster, name)
                    seconds = drain(cluster, process)
                    folder = ROOT / "python" if version == "new" else earlier
                    process.env["PYTHONPATH"] = path_with(folder)
                    if process.role == "decode":
                        process.command = [one for one in process.command if one != FLAG]
                        process.command += [FLAG] if version == "new" else []
                    began = time.monotonic()
                    cluster.restart(name)
                    ready = time.monotonic() - began
                    join(cluster, process)
                    load.wait_answers(20)
                    print(f"{name} {version}: ended in {seconds:.1f} s, ready {ready:.1f} s later", load.answered)
                    assert not load.failed, load.failed[:3]
                if version == "new":
                    held = {url: counter(url, "sglang:decode_prefix_hit_tokens_total") for url in cluster.decode_urls}
        assert not load.failed, load.failed[:3]
        # What has been asked for lies in a tree, and is not asked for again: this version with the flag was at work.
        # The gateway may send all that is known to the worker which came first.
        assert sum(held.values()) > 0, held
        for url in cluster.prefill_urls:
            check_idle(url)
    finally:
        clusters.stop()
