"""From an earlier version of this package without the flag to this one with it and back, under load, worker by worker:
no request is lost, and nothing is sent twice.

Both versions are wheels, each built from its commit and installed into a folder of its own.
"""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from pd import FLAG, ask, check_idle, counter, words
from rolling import Load, join, named, wait
from test_drain_command import drain

pytestmark = [pytest.mark.timeout(3000), pytest.mark.thorough]

ROOT = Path(__file__).parents[4]
EARLIER = "fea6761"
PAGE = 16
# What decode computes itself is not sent.
ON = [FLAG, "--disaggregation-decode-local-prefill", "off"]
SENT = "sglang:kv_transfer_sent_bytes_total"
# Decode first, then prefill, and the other way round; each order has both versions side by side.
ROLLS = [
    ("new", ("decode-0", "prefill-0", "decode-1", "prefill-1")),
    ("old", ("prefill-1", "decode-1", "prefill-0", "decode-0")),
]


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> dict[str, Path]:
    """Folders with the wheels of an earlier commit and of this checkout in them."""
    found = subprocess.run(["git", "-C", str(ROOT), "archive", EARLIER], capture_output=True)
    if found.returncode:
        pytest.skip(f"no commit {EARLIER} here: {found.stderr.decode()}")
    source = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(source, filter="data")
    return {"old": installed(source, tmp_path_factory), "new": installed(ROOT, tmp_path_factory)}


def installed(source: Path, tmp_path_factory) -> Path:
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=100)
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=100)
    return folder


def path_with(folder: Path) -> str:
    """PYTHONPATH by which a worker finds this version first, and not this one of the tests."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(folder), *(one for one in others if one and Path(one) != ROOT / "python")])


def test_versions_and_the_flag_change_under_load(clusters, model, versions):
    old = {"PYTHONPATH": path_with(versions["old"])}
    cluster = clusters.get(
        model,
        prefill=2,
        decode=2,
        prefill_env=[old, old],
        decode_env=[old, old],
        common_args=["--page-size", str(PAGE)],
        env={"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"},
        backend="nixl",
    )
    held = {}
    try:
        page_bytes = bytes_of_a_page(cluster)
        # What prefills have sent that are gone.
        sent = -sum(counter(url, SENT) for url in cluster.prefill_urls)
        with Load(cluster.router_url, page=PAGE) as load:
            load.wait_answers(8)
            for version, names in ROLLS:
                for name in names:
                    process = named(cluster, name)
                    began = time.monotonic()
                    drain(cluster, process, end=False)
                    if process.role == "prefill":
                        sent += counter(process.url, SENT)
                    process.popen.send_signal(signal.SIGTERM)
                    wait(lambda process=process: process.returncode() is not None)
                    seconds = time.monotonic() - began
                    if process.role == "prefill":
                        # A decode worker without the flag has to miss two heartbeats, else it goes on to ask ranks that
                        # have ended. A forked worker is back at once.
                        time.sleep(10)
                    process.env["PYTHONPATH"] = path_with(versions[version])
                    if process.role == "decode":
                        process.command = [one for one in process.command if one not in ON]
                        process.command += ON if version == "new" else []
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
        sent += sum(counter(url, SENT) for url in cluster.prefill_urls)
        print(f"{sent / 2**20:.2f} MiB sent, {load.pages} pages of {page_bytes} bytes were not held")
        assert sent == load.pages * page_bytes
    finally:
        clusters.stop()


def bytes_of_a_page(cluster) -> int:
    """Of all layers, as prefill counts what it sends; decode workers without the flag hold nothing."""

    def sent() -> float:
        return sum(counter(url, SENT) for url in cluster.prefill_urls)

    before = sent()
    ask(cluster.router_url)(words(random.Random(5), 4 * PAGE), 4)
    wait(lambda: sent() > before)
    for url in cluster.prefill_urls:
        check_idle(url)
    return int(sent() - before) // 4
