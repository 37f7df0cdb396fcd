"""What the doctor and the server say where Mooncake cannot run."""

from __future__ import annotations

import importlib

import pytest

from sglang_pd_radix.supplied import mooncake_host

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


class Host:
    """A machine: what it lacks, and what pip and apt-get were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, package: bool, libraries: list[str], user: int) -> None:
        self.package, self.libraries, self.commands = package, libraries, []
        self.fails: str | None = None
        monkeypatch.setattr(mooncake_host, "installed", lambda: self.package)
        monkeypatch.setattr(mooncake_host, "missing_libraries", lambda error: list(self.libraries))
        monkeypatch.setattr(mooncake_host, "trouble", lambda cpu: ("trouble", "way out") if self.broken() else None)
        monkeypatch.setattr(mooncake_host.subprocess, "run", self.run)
        monkeypatch.setattr(mooncake_host.shutil, "which", lambda name: name)
        monkeypatch.setattr(mooncake_host.os, "geteuid", lambda: user)

    def broken(self) -> bool:
        return not self.package or bool(self.libraries)

    def run(self, command: list[str], **options):
        self.commands.append(command)
        if self.fails and self.fails in command:
            return type("Done", (), {"returncode": 1})
        if "pip" in command:
            self.package = True
        elif "install" in command:
            self.libraries = []
        return type("Done", (), {"returncode": 0})


LIBRARIES = ["libibverbs.so.1", "libodd.so.9", "libnuma.so.1"]


def test_root_gets_package_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, False, LIBRARIES, user=0)
    assert mooncake_host.install(True, ["-c", "c.txt"]) is None
    pip, update, install = host.commands
    assert pip[1:] == ["-m", "pip", "install", "-c", "c.txt", "mooncake-transfer-engine-non-cuda"]
    assert update[0] == install[0] == "apt-get" and update[-1] == "update"
    # Only what is known to be a package: not the library of another name.
    assert install[-2:] == ["libibverbs1", "libnuma1"]


def test_without_root_libraries_stay_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, True, LIBRARIES, user=1000)
    assert mooncake_host.install(True) == ("trouble", "way out")
    assert host.commands == []


@pytest.mark.parametrize(("fails", "calls"), [("pip", 3), ("update", 2), ("install", 3)])
def test_a_failed_command_leaves_its_trouble(monkeypatch: pytest.MonkeyPatch, fails: str, calls: int) -> None:
    host = Host(monkeypatch, False, LIBRARIES, user=0)
    host.fails = fails
    assert mooncake_host.install(True) == ("trouble", "way out")
    assert len(host.commands) == calls


def test_program_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    host = Host(monkeypatch, True, LIBRARIES, user=0)
    assert mooncake_host.main([]) == 1 and host.commands == []
    assert "cannot be used here: trouble. Way out: way out." in capsys.readouterr().err
    assert mooncake_host.main(["--install", "--constraints", "c.txt"]) == 0
    assert "can be used here" in capsys.readouterr().out
