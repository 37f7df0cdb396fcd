"""Each extra can be deleted, and none has to be loaded: in real processes, with the engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader

pytestmark = pytest.mark.timeout(400)

PYTHON = Path(__file__).parents[4] / "python"
EVERYTHING = """
import importlib, sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server
from sglang_pd_radix.patching import loader, registry
told = loader.status()
for file in loader.patch_files(loader.engine_root(), loader.patch_roots(told["extras"])):
    importlib.import_module(file.module)
print(told["patch_root"], *told["extras"], *registry.check_pins())
"""


def run(code: str, python: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(python), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_the_order_names_each_folder():
    assert {*loader.known_extras(PYTHON)} == {path.parent.name for path in PYTHON.glob("extras/*/sglang")}


# What imports what, of these and in functions too, is in test_modules.py; this is what they find at run time.
@pytest.mark.thorough
@pytest.mark.parametrize("name", loader.known_extras(PYTHON))
def test_without_its_folder_everything_else_imports(name, tmp_path):
    python = tmp_path / "python"
    shutil.copytree(PYTHON, python, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    # With those that import it.
    gone = [name, *(other for other, needs in loader.needs(PYTHON).items() if name in needs)]
    for one in gone:
        shutil.rmtree(python / "extras" / one)
    done = run(EVERYTHING, python)
    others = [other for other in loader.known_extras(PYTHON) if other not in gone]
    assert done.stdout.split() == [str(python), *others], done.stderr[-3000:]


@pytest.mark.thorough  # By default, test_without_extras.py starts such workers.
def test_with_none_a_worker_imports_and_takes_no_option_of_theirs():
    options = ["--model-path", "m", "--load-balance-method", "longest_prefix"]
    code = f"{EVERYTHING}\nfrom sglang.srt.server_args import prepare_server_args\nprepare_server_args({options})"
    done = run(code, PYTHON, SGLANG_PD_RADIX_EXTRAS="none")
    assert (done.returncode, done.stdout.split()) == (2, [str(PYTHON)]), done.stderr[-3000:]
    assert "argument --load-balance-method: invalid choice: 'longest_prefix' (choose from" in done.stderr


def test_what_an_extra_imports_has_to_run_too(monkeypatch):
    assert all({*others} <= {*loader.known_extras(PYTHON)} for others in loader.needs(PYTHON).values())
    monkeypatch.setenv(loader.EXTRAS, "host_tier,kept_kv,prefix_order")
    assert loader.extras() == ["prefix_order", "kept_kv", "host_tier"]
    monkeypatch.setenv(loader.EXTRAS, "host_tier")
    with pytest.raises(PdRadixError, match="host_tier needs kept_kv, which is not there or not selected"):
        loader.extras()
