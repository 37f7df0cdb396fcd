"""What the doctor and the server say where Mooncake cannot run."""

from __future__ import annotations

import importlib

import pytest

from sglang_pd_radix import mooncake_host

ERROR = "libibverbs.so.1: cannot open shared object file: No such file or directory"


def breaks(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def load(name: str) -> None:
        if name == "mooncake.engine":
            raise ImportError(error)

    monkeypatch.setattr(mooncake_host, "installed", lambda: True)
    monkeypatch.setattr(importlib, "import_module", load)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_host, "installed", lambda: False)
    assert mooncake_host.trouble(cpu=True)[1] == "pip install mooncake-transfer-engine-non-cuda"
    assert mooncake_host.trouble(cpu=False)[1] == "pip install mooncake-transfer-engine"
    with pytest.raises(ImportError, match="not installed.*pip install mooncake-transfer-engine;.*nixl"):
        mooncake_host.check(cpu=False)


def test_every_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, ERROR)
    listing = "\tlibibverbs.so.1 => not found\n\tlibnuma.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\n"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: type("Spec", (), {"submodule_search_locations": ["/"]})
    )
    monkeypatch.setattr(mooncake_host.Path, "glob", lambda self, pattern: ["engine.so"])
    monkeypatch.setattr(mooncake_host.shutil, "which", lambda name: name)
    monkeypatch.setattr(mooncake_host.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": listing}))
    what, way_out = mooncake_host.trouble(cpu=True)
    assert "libibverbs.so.1, libnuma.so.1" in what
    assert way_out.endswith("apt-get install libibverbs1 libnuma1")


@pytest.mark.parametrize(
    ("error", "what", "way_out"),
    [
        (ERROR, "libibverbs.so.1", "libibverbs1"),
        ("libodd.so.9: cannot open shared object file: x", "libodd.so.9", "<package of libodd.so.9>"),
        ("libcudart.so.12: cannot open shared object file: x", "CUDA build", "mooncake-transfer-engine-non-cuda"),
        ("undefined symbol: f", "undefined symbol: f", "--force-reinstall"),
    ],
)
def test_without_ldd_what_the_linker_said(monkeypatch: pytest.MonkeyPatch, error: str, what: str, way_out: str) -> None:
    breaks(monkeypatch, error)
    monkeypatch.setattr(mooncake_host.shutil, "which", lambda name: None)
    found = mooncake_host.trouble(cpu=True)
    assert what in found[0] and way_out in found[1]


def test_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_host, "installed", lambda: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    assert mooncake_host.trouble(cpu=False) is None
    mooncake_host.check(cpu=True)
