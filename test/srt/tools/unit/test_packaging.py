"""A real wheel and a real editable install, each put into a throw-away environment and taken out again."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from sandbox import PACKAGE, Sandbox

ROOT = PACKAGE.parents[1]
SITE = sysconfig.get_paths()["purelib"]
PATCH = "__all__ = ['answer']\n\n\ndef answer():\n    return 'patched', __file__\n"
EXTRA = "__all__ = ['which']\n\n\ndef which():\n    return __file__\n"
ASK = "from sglang.srt.tiny import answer; print(*answer())"


def _run(*command: str | Path, cwd: Path) -> str:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "PYTHON", "PIP_"))}
    settings["SGLANG_USE_CPU_ENGINE"] = "0"
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def _build(source: Path, target: Path) -> Path:
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=source)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout with one small patch file in the place of the patch set."""
    base = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, base)
    sandbox = Sandbox(base / "sandbox")
    sandbox.patch({"srt/tiny.py": PATCH})
    sandbox.patch({"srt/tiny.py": EXTRA}, "one")
    sandbox.ours.rename(base / "python")
    shutil.copy(PACKAGE.parent / "sglang_pd_radix.pth", base / "python")
    return base


class Environment:
    """A virtual environment with a tiny engine; wrapt and the build backend come from the one that runs the tests."""

    def __init__(self, base: Path) -> None:
        self.base = base
        _run(sys.executable, "-m", "venv", "--without-pip", base, cwd=base)
        self.bin = base / ("Scripts" if os.name == "nt" else "bin")
        (self.site,) = base.glob("lib/python*/site-packages")
        sandbox = Sandbox(base / "sandbox")
        sandbox.engine({"srt/tiny.py": "def answer():\n    return 'engine', __file__\n"})
        for entry in sandbox.site.iterdir():
            entry.rename(self.site / entry.name)
        (self.site / "tests.pth").write_text(SITE + "\n")

    def pip(self, *arguments: str | Path) -> str:
        python = self.bin / "python"
        return _run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=self.base)

    def files(self) -> set[str]:
        kept = {str(path.relative_to(self.base)) for path in self.base.rglob("*") if "__pycache__" not in path.parts}
        return kept

    def ask(self, code: str = ASK, *flags: str) -> list[str]:
        return _run(self.bin / "python", *flags, "-c", code, cwd=self.base).split()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_wheel_installs_runs_and_leaves(
    source: Path, environment: Environment, tmp_path_factory: pytest.TempPathFactory
):
    wheel = _build(source, tmp_path_factory.mktemp("wheel"))
    before = environment.files()
    environment.pip("install", "--no-deps", "--no-index", wheel)

    carried = environment.site / "sglang_pd_radix" / "_patches" / "sglang" / "srt" / "tiny.py"
    assert environment.ask() == ["patched", str(carried)]
    assert environment.ask(ASK, "-I") == ["patched", str(carried)]
    extra = environment.site / "sglang_pd_radix" / "_patches" / "extras" / "one" / "sglang" / "srt" / "tiny.py"
    assert environment.ask("from sglang.srt.tiny import which; print(which())") == [str(extra)]
    assert {path.name for path in (environment.site / "sglang").iterdir()} <= {"__init__.py", "srt", "__pycache__"}
    assert _run(environment.bin / "pd-radix", "--version", cwd=environment.base).startswith("pd-radix ")

    environment.pip("uninstall", "-y", "sglang-pd-radix")
    assert environment.files() == before
    assert environment.ask()[0] == "engine"


def test_editable_install_uses_the_checkout(source: Path, environment: Environment) -> None:
    before = environment.files()
    environment.pip("install", "--no-deps", "--no-index", "--no-build-isolation", "-e", source)

    patch = source / "python" / "sglang" / "srt" / "tiny.py"
    assert environment.ask() == ["patched", str(patch)]
    patch.write_text(PATCH.replace("'patched'", "'edited'"))
    try:
        assert environment.ask() == ["edited", str(patch)]
    finally:
        patch.write_text(PATCH)
    assert not (environment.site / "sglang_pd_radix").exists()
    # The checkout's python/ is on sys.path, and its sglang/ is not taken for the engine even from inside it.
    engine = str(environment.site / "sglang" / "__init__.py")
    assert environment.ask("import sglang; print(sglang.__file__)") == [engine]
    code = f"import os; os.chdir({str(source / 'python')!r}); import sglang; print(sglang.__file__)"
    assert environment.ask(code) == [engine]

    environment.pip("uninstall", "-y", "sglang-pd-radix")
    assert environment.files() == before
    assert environment.ask()[0] == "engine"


def test_wheel_of_this_checkout_carries_every_patch_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(_build(ROOT, tmp_path)) as wheel:
        names = set(wheel.namelist())
        scripts = configparser.ConfigParser()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts.read_string(wheel.read(entry_points).decode())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    assert dict(scripts["console_scripts"]) == {"pd-radix": "sglang_pd_radix.tools.cli:main"}
    python = ROOT / "python"
    trees = [python / "sglang", *python.glob("extras/*/sglang")]
    files = {path.relative_to(python) for tree in trees for path in tree.rglob("*.py")}
    patches = {f"sglang_pd_radix/_patches/{path}" for path in files}
    extras = {name for name in names if "/_patches/extras/" in name and not name.endswith(".py")}
    folders = {f"sglang_pd_radix/_patches/{tree.parent.relative_to(python)}" for tree in trees[1:]}
    of_each = {f"{folder}/README.md" for folder in folders}
    of_each |= {f"sglang_pd_radix/_patches/{path.relative_to(python)}" for path in python.glob("extras/*/pins.json")}
    assert extras == of_each | {"sglang_pd_radix/_patches/extras/ORDER"}
    own = {str(path.relative_to(python)) for path in PACKAGE.rglob("*.py")}
    assert patches and "sglang_pd_radix/tools/bench/command.py" in own
    assert {name for name in names if name.endswith(".py")} == patches | own
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"sglang_pd_radix", "sglang_pd_radix.pth"}
    assert "sglang_pd_radix/patching/pins.json" in names
    for line in (
        "Requires-Python: <3.13,>=3.10",
        "Requires-Dist: sglang==0.5.10.post1",
        "License-Expression: Apache-2.0",
    ):
        assert line in metadata.splitlines()


def test_constraints_hold_the_engine_and_the_tools() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["sglang"] == "0.5.10.post1"
    assert {"nixl", "smg", "sglang-router", "wrapt", "torch", "pytest", "hypothesis", "ruff", "mypy"} <= set(pins)
