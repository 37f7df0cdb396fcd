"""A real Prometheus for the tests, on a free port, with the rules of this package."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import yaml

from sglang_pd_radix.tools.cluster.ports import free_ports
from sglang_pd_radix.tools.dashboard import RULES, SCRAPE

PROMETHEUS = shutil.which("prometheus")


class Prometheus:
    """What is asked of a running one."""

    def __init__(self, url: str):
        self.url = url

    def _get(self, path: str, **query: str) -> dict:
        reply = requests.get(f"{self.url}/api/v1/{path}", params=query, timeout=30)
        assert reply.ok, reply.text
        return reply.json()["data"]

    def query(self, expr: str) -> list[tuple[dict, float]]:
        """The labels and the value of each line of a query, now; those that are not a number left out."""
        found = [(line["metric"], float(line["value"][1])) for line in self._get("query", query=expr)["result"]]
        return [(labels, value) for labels, value in found if value == value]

    def firing(self) -> set[tuple[str, str]]:
        """Name and worker of each alarm that fires."""
        alerts = self._get("alerts")["alerts"]
        return {(a["labels"]["alertname"], a["labels"].get("instance", "")) for a in alerts if a["state"] == "firing"}

    def wait(self, alarm: str, instance: str, fires: bool = True, seconds: float = 40) -> None:
        """Wait until an alarm fires, or does so no more."""
        end = time.monotonic() + seconds
        while ((alarm, instance) in self.firing()) != fires:
            assert time.monotonic() < end, f"{alarm} of {instance}: {self.firing()}"
            time.sleep(0.5)


@contextmanager
def prometheus(folder: Path, targets: list[str], wait: str = "2s") -> Iterator[Prometheus]:
    """Scrape ``targets`` (host:port) every second, with the alarms of this package, which wait ``wait`` to fire.

    As they are, they wait for minutes.
    """
    assert PROMETHEUS is not None
    rules = re.sub(r"^( +for:) .*", rf"\1 {wait}", RULES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (folder / RULES.name).write_text(rules, encoding="utf-8")
    config = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / SCRAPE.name).write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        PROMETHEUS,
        f"--web.listen-address={address}",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 30
        while True:
            assert process.poll() is None and time.monotonic() < end, (folder / "prometheus.log").read_text()
            try:
                if requests.get(f"http://{address}/-/ready", timeout=5).ok:
                    break
            except requests.ConnectionError:
                time.sleep(0.1)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(timeout=20)
