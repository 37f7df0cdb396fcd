"""A tiny engine and a tiny patch tree in a temporary directory, for tests of the loader and the register."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[4] / "python" / "sglang_pd_radix"


class Sandbox:
    """``site/`` holds the engine and its metadata, ``ours/`` a copy of our package beside a patch tree."""

    def __init__(self, base: Path) -> None:
        self.base, self.site, self.ours = base, base / "site", base / "ours"
        shutil.copytree(PACKAGE, self.ours / "sglang_pd_radix", ignore=shutil.ignore_patterns("__pycache__"))
        self.engine({"__init__.py": ""})

    @property
    def engine_root(self) -> Path:
        return self.site / "sglang"

    def engine(self, files: dict[str, str], version: str | None = None) -> None:
        """Write engine files; paths are relative to ``sglang/``."""
        _write(self.engine_root, files)
        for old in self.site.glob("*.dist-info") if version else ():
            shutil.rmtree(old)
        if version or not list(self.site.glob("*.dist-info")):
            version = version or "0.5.10.post1"
            metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
            _write(self.site / f"sglang-{version}.dist-info", {"METADATA": metadata})

    def patch(self, files: dict[str, str], extra: str = "") -> None:
        """Write patch files of the core, or of an extra, laid over those before; paths are relative to ``sglang/``."""
        extras, order = self.ours / "extras", self.ours / "extras" / "ORDER"
        if extra and not (extras / extra).is_dir():
            _write(extras, {"ORDER": f"{order.read_text() if order.is_file() else ''}{extra}\n"})
        _write(extras / extra / "sglang" if extra else self.ours / "sglang", files)

    def start(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the sandbox with these arguments."""
        settings = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        settings |= {
            "PYTHONPATH": f"{self.ours}{os.pathsep}{self.site}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SGLANG_USE_CPU_ENGINE": "0",
            **environment,
        }
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.base, env=settings, capture_output=True, text=True, timeout=60
        )

    def run(self, code: str, **environment: str) -> str:
        """Run a snippet, which must succeed; its standard output, stripped."""
        done = self.start("-c", textwrap.dedent(code), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
