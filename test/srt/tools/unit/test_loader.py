"""The loader, in real processes, on a tiny engine: see sandbox.py."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sandbox import PACKAGE, Sandbox

from sglang_pd_radix.errors import PatchError
from sglang_pd_radix.patching import loader

QUEUE = """
    import dataclasses

    LIMIT = 1

    @dataclasses.dataclass
    class Queue:
        size: int = 1

        def push(self):
            return "engine push"

        def pop(self):
            return "engine pop"

    def describe(queue):
        return "engine sees " + type(queue).__name__

    def untouched():
        return Queue().push()
"""
QUEUE_PATCH = '''
    """A queue."""

    import dataclasses

    from sglang.srt import queue as engine

    __all__ = ["LIMIT", "Queue", "describe", "fresh"]

    LIMIT = 2

    @dataclasses.dataclass
    class Queue(engine.Queue):
        flag: bool = False

        def push(self):
            return "patched " + super().push()

    def describe(queue):
        return "patched, " + engine.describe(queue)

    def fresh():
        return helper()

    def helper():
        return __name__ + " " + str(engine.LIMIT)
'''


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    sandbox.engine({"srt/queue.py": QUEUE})
    sandbox.patch({"srt/queue.py": QUEUE_PATCH})
    return sandbox


def test_names_in_all_take_the_place_of_the_engines_and_the_rest_stays(patched: Sandbox) -> None:
    out = patched.run("""
        from sglang.srt.queue import LIMIT, Queue, describe, fresh, untouched
        import sglang.srt.queue as module
        print(LIMIT, Queue().push(), Queue().pop(), Queue(flag=True), untouched(), sep="|")
        print(describe(Queue()), fresh(), hasattr(module, "helper"), Queue.__module__, sep="|")
        print(module.__file__.replace("\\\\", "/").split("/")[-4:], module.__pd_radix__["names"])
        print(module.__pd_radix__["originals"]["Queue"]().push())
    """)
    assert out.splitlines() == [
        "2|patched engine push|engine pop|Queue(size=1, flag=True)|patched engine push",
        "patched, engine sees Queue|sglang.srt.queue 1|False|sglang.srt.queue",
        "['site', 'sglang', 'srt', 'queue.py'] ['LIMIT', 'Queue', 'describe', 'fresh']",
        "engine push",
    ]


def test_the_engines_name_is_still_the_engines_after_loading(sandbox: Sandbox) -> None:
    """``engine.f`` inside a patched ``f`` must not be the patched one, while a later change of the module is seen."""
    sandbox.engine({"srt/queue.py": "def f():\n    return 1\n\nother = 1\n"})
    sandbox.patch(
        {
            "srt/queue.py": """
                import sglang.srt.queue as engine
                __all__ = ["f", "change"]
                def f():
                    return 10 + engine.f() + engine.other
                def change():
                    engine.other = 100
            """
        }
    )
    assert sandbox.run("from sglang.srt.queue import *; print(f()); change(); print(f())") == "12\n111"


def test_traceback_points_at_the_patch_file(sandbox: Sandbox) -> None:
    sandbox.engine({"srt/queue.py": ""})
    sandbox.patch({"srt/queue.py": "__all__ = ['f']\n\n\ndef f():\n    raise KeyError('here')\n"})
    done = sandbox.start("-c", "from sglang.srt.queue import f; f()")
    assert f'File "{sandbox.ours}/sglang/srt/queue.py", line 5, in f' in done.stderr
    assert "    raise KeyError('here')" in done.stderr


@pytest.mark.parametrize("init", [None, "from sglang.srt.pkg import used\n"], ids=["namespace", "regular"])
def test_new_module_is_found_beside_the_engines(sandbox: Sandbox, init: str | None) -> None:
    """Also while the package's own ``__init__`` is still running, and with relative imports in both directions."""
    sandbox.engine({"srt/pkg/used.py": "VALUE = 'engine'\n", "srt/pkg/plain.py": "VALUE = 'engine'\n"})
    if init is not None:
        sandbox.engine({"srt/pkg/__init__.py": init})
    sandbox.patch(
        {
            "srt/pkg/used.py": "from .fresh import base\n__all__ = ['VALUE']\nVALUE = 'patched ' + base()\n",
            "srt/pkg/fresh.py": "from . import plain\n\n\ndef base():\n    return plain.VALUE\n",
            "srt/own/thing.py": "from ..pkg import fresh\n",
        }
    )
    out = sandbox.run("""
        import sglang.srt.pkg.used as used, sglang.srt.pkg.fresh as fresh, sglang.srt.own.thing
        from sglang_pd_radix.patching import loader
        print(used.VALUE, fresh.__name__, loader.status()["modules"])
    """)
    assert out == "patched engine sglang.srt.pkg.fresh ['sglang.srt.pkg.used']"


def test_new_module_is_found_in_a_package_that_nothing_else_changes(sandbox: Sandbox) -> None:
    sandbox.engine({"srt/pkg/__init__.py": ""})
    sandbox.patch({"srt/pkg/fresh.py": "VALUE = __name__\n"})
    assert sandbox.run("from sglang.srt.pkg.fresh import VALUE; print(VALUE)") == "sglang.srt.pkg.fresh"


@pytest.mark.parametrize("path", ["srt/pkg.py", "srt/pkg/__init__.py"])
def test_patch_file_cannot_hide_a_package_of_the_engine(sandbox: Sandbox, path: str) -> None:
    sandbox.engine({"srt/pkg/used.py": ""})
    sandbox.patch({path: ""})
    done = sandbox.start("-c", "import sglang")
    assert done.returncode != 0
    assert f"patch file {sandbox.ours}/sglang/{path} would hide the engine's package sglang.srt.pkg" in done.stderr


def test_package_init_can_be_patched(sandbox: Sandbox) -> None:
    sandbox.engine({"srt/pkg/__init__.py": "A = 1\n", "srt/pkg/sub.py": "B = 2\n"})
    sandbox.patch({"srt/pkg/__init__.py": "from .sub import B\n__all__ = ['A']\nA = B + 1\n"})
    assert sandbox.run("from sglang.srt.pkg import A; print(A)") == "3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__all__ = ['absent']\n", "NameError: __all__ names what the file does not define: absent"),
        ("X = 1\n", "TypeError: __all__ must list the names"),
        ("import no_such_module\n__all__ = []\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_broken_patch_file_stops_the_import_and_cannot_be_overlooked(sandbox: Sandbox, text: str, reason: str) -> None:
    sandbox.engine({"srt/queue.py": "", "srt/optional.py": "try:\n    from . import queue\nexcept ImportError: pass\n"})
    sandbox.patch({"srt/queue.py": text})
    done = sandbox.start("-c", "import sglang.srt.optional")
    assert done.returncode != 0
    assert f"patch file {sandbox.ours}/sglang/srt/queue.py failed: {reason}" in done.stderr
    assert "Set SGLANG_PD_RADIX=0 to run the engine without the patch set." in done.stderr
    again = sandbox.run("""
        for _ in range(2):
            try:
                import sglang.srt.queue
            except Exception as error:
                print(type(error).__name__)
    """)
    assert again.split() == ["PatchError", "PatchError"]
    assert sandbox.run("import sglang.srt.queue; print('engine')", SGLANG_PD_RADIX="0") == "engine"


# ---- extras ----

EXTRA = """
    from sglang.srt import queue as engine
    __all__ = ["Queue", "describe"]

    class Queue(engine.Queue):
        def push(self):
            return "{0} " + super().push()

    def describe(queue):
        return "{0}, " + engine.describe(queue)
"""
ASK = "from sglang.srt import queue; print(queue.Queue().push(), queue.describe(queue.made()), sep='|')"


@pytest.fixture
def stacked(patched: Sandbox) -> Sandbox:
    """Two extras over one module of the core, whose order is not that of their names."""
    made = QUEUE_PATCH.replace('"fresh"]', '"fresh", "made"]') + "\n    def made():\n        return Queue(flag=True)\n"
    patched.patch({"srt/queue.py": made, "srt/own/__init__.py": "", "srt/own/core.py": "VALUE = 'core'\n"})
    for name in ("zebra", "ant"):
        patched.patch({"srt/queue.py": EXTRA.format(name), f"srt/own/{name}.py": "from .core import VALUE\n"}, name)
    return patched


@pytest.mark.parametrize(
    ("selected", "names"),
    [
        (None, "ant zebra"),
        (" ", "ant zebra"),
        ("ant,zebra", "ant zebra"),
        (" zebra ,", "zebra"),
        ("ant", "ant"),
        ("none", ""),
    ],
)
def test_overlays_of_one_module_run_one_after_the_other(stacked: Sandbox, selected: str | None, names: str) -> None:
    """And what the core makes of its own classes is made of what the extras have made of them."""
    given = {} if selected is None else {"SGLANG_PD_RADIX_EXTRAS": selected}
    pushes, describes = (f"{names} patched".strip(), ", ".join([*names.split(), "patched"]))
    assert stacked.run(ASK, **given) == f"{pushes} engine push|{describes}, engine sees Queue"
    out = stacked.run(
        """
        import sglang.srt.queue, sglang.srt.own.core
        from sglang_pd_radix.patching import loader
        found = []
        for name in ("ant", "zebra"):
            try:
                found.append(__import__(f"sglang.srt.own.{name}", fromlist=[name]).VALUE)
            except ModuleNotFoundError:
                found.append(None)
        told = sglang.srt.queue.__pd_radix__
        print(loader.status()["extras"], found, told["names"], told["originals"]["Queue"]().push(), sep="|")
        """,
        **given,
    )
    found = ["core" if name in names else None for name in ("ant", "zebra")]
    changed = ["LIMIT", "Queue", "describe", "fresh", "made"]
    assert out == f"{[name for name in ('zebra', 'ant') if name in names]}|{found}|{changed}|engine push"


def test_a_name_of_no_extra_is_told_before_the_engine_runs(stacked: Sandbox) -> None:
    stacked.engine({"__init__.py": "print('engine')\n"})
    shutil.rmtree(stacked.ours / "extras" / "zebra")
    for given in ("zebra", "ant,zebra", "none,zebra"):
        done = stacked.start("-c", "import sglang", SGLANG_PD_RADIX_EXTRAS=given)
        assert done.returncode and not done.stdout
        name = given.split(",")[0] if given.startswith("none") else "zebra"
        said = f"SGLANG_PD_RADIX_EXTRAS names '{name}', and there is no such extra. It takes none, or some of: ant."
        assert done.stderr.splitlines()[-1].endswith(said)
    # One that is deleted leaves the others as they are, also with its name in the order.
    assert stacked.run(ASK).splitlines()[-1] == "ant patched engine push|ant, patched, engine sees Queue"


def test_a_new_module_is_in_one_tree_only(stacked: Sandbox) -> None:
    """Else an extra would change the core past its hooks, or be hidden by another."""
    stacked.patch({"srt/own/core.py": "VALUE = 'extra'\n"}, "ant")
    done = stacked.start("-c", "import sglang")
    core, extra = stacked.ours / "sglang/srt/own/core.py", stacked.ours / "extras/ant/sglang/srt/own/core.py"
    assert f"patch files {core} and {extra} are the same new module, sglang.srt.own.core" in done.stderr


def test_an_extra_has_options_of_its_own(sandbox: Sandbox) -> None:
    sandbox.engine(
        {
            "srt/server_args.py": """
                import argparse, dataclasses

                @dataclasses.dataclass
                class ServerArgs:
                    model: str = ""

                    @staticmethod
                    def add_cli_args(parser):
                        parser.add_argument("--model")

                def prepare(argv):
                    parser = argparse.ArgumentParser(prog="engine")
                    ServerArgs.add_cli_args(parser)
                    return ServerArgs(**vars(parser.parse_args(argv)))
            """
        }
    )
    option = """
        import dataclasses
        from sglang.srt import server_args as engine
        __all__ = ["ServerArgs"]

        @dataclasses.dataclass
        class ServerArgs(engine.ServerArgs):
            {0}: int = 0

            @staticmethod
            def add_cli_args(parser):
                engine.ServerArgs.add_cli_args(parser)
                parser.add_argument("--{0}", type=int, default=0)
    """
    sandbox.patch({"srt/server_args.py": option.format("flag")})
    sandbox.patch({"srt/server_args.py": option.format("option")}, "one")
    program = "import sys; from sglang.srt.server_args import prepare; print(prepare(sys.argv[1:]))"
    argv = ["-c", program, "--model", "m", "--flag", "1"]
    assert sandbox.start(*argv, "--option", "2").stdout == "ServerArgs(model='m', flag=1, option=2)\n"
    done = sandbox.start(*argv, "--option", "2", SGLANG_PD_RADIX_EXTRAS="none")
    assert done.returncode == 2 and "unrecognized arguments: --option 2" in done.stderr
    assert sandbox.start(*argv, SGLANG_PD_RADIX_EXTRAS="none").stdout == "ServerArgs(model='m', flag=1)\n"


def test_replaced_dataclass_pickles_into_a_spawned_process(patched: Sandbox) -> None:
    program = """
        import multiprocessing

        def work(queue, out):
            out.put((type(queue).__module__, queue.flag, queue.push()))

        if __name__ == "__main__":
            from sglang.srt.queue import Queue
            context = multiprocessing.get_context("spawn")
            out = context.Queue()
            child = context.Process(target=work, args=(Queue(flag=True), out))
            child.start()
            print(out.get(timeout=30))
            child.join()
    """
    path = patched.base / "program.py"
    path.write_text("\n".join(line[8:] for line in program.splitlines()))
    done = patched.start(str(path))
    assert done.stdout.strip() == "('sglang.srt.queue', True, 'patched engine push')", done.stderr


def test_a_folder_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its patches were left out without a word, and the loader said that all is applied."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").touch()
    assert loader._python_files(tmp_path) == [tmp_path / "a" / "b.py"]
    scan = os.scandir

    def denied(path: Path) -> Any:
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PatchError, match="cannot be read: Permission denied"):
        loader._python_files(tmp_path)


def test_command_line_of_the_engine_is_patched(patched: Sandbox) -> None:
    patched.engine({"launch_server.py": "from sglang.srt.queue import Queue\nprint(__name__, Queue().push())\n"})
    assert patched.start("-m", "sglang.launch_server").stdout.strip() == "__main__ patched engine push"


def test_circular_import_gets_the_patched_class(patched: Sandbox) -> None:
    patched.engine(
        {
            "srt/queue.py": QUEUE.replace("    def describe", "    from sglang.srt import user\n\n    def describe", 1),
            "srt/user.py": "from sglang.srt.queue import Queue as Taken\n\ndef use():\n    return Taken().push()\n",
        }
    )
    assert patched.run("import sglang.srt.queue; from sglang.srt.user import use; print(use())") == (
        "patched engine push"
    )


def test_late_start_patches_what_is_imported_already(patched: Sandbox) -> None:
    patched.engine({"srt/user.py": "from sglang.srt.queue import Queue\n"})
    out = patched.run(
        """
        import os, sglang.srt.user as user
        print(user.Queue().push())
        del os.environ["SGLANG_PD_RADIX"]
        import sglang_pd_radix.patching.boot as boot
        boot.install()
        boot.install()
        print(user.Queue().push(), sum(type(f).__name__ == "_EngineFinder" for f in __import__("sys").meta_path))
        """,
        SGLANG_PD_RADIX="0",
    )
    assert out.splitlines() == ["engine push", "patched engine push 1"]


def test_switched_off_leaves_nothing_behind(patched: Sandbox) -> None:
    out = patched.run(
        """
        import sys
        from sglang.srt.queue import Queue
        print(Queue().push(), [type(f).__name__ for f in sys.meta_path if type(f).__module__.startswith("sglang")])
        print("sglang_pd_radix.patching.loader" in sys.modules)
        """,
        SGLANG_PD_RADIX="0",
    )
    assert out.splitlines() == ["engine push []", "False"]


@pytest.mark.parametrize("no, yes", [("0 ", ""), ("false", " "), ("False", "1"), ("no", "True"), ("n", "yes")])
def test_the_engines_words_for_no_and_yes_are_its_own(patched: Sandbox, no: str, yes: str) -> None:
    for word, who in ((no, "engine"), (yes, "patched engine")):
        said = patched.run("from sglang.srt.queue import Queue; print(Queue().push())", SGLANG_PD_RADIX=word)
        assert said == f"{who} push"


@pytest.mark.parametrize("word", ["off", "00", "2"])
def test_a_word_that_says_neither_ends_only_what_imports_the_engine(patched: Sandbox, word: str) -> None:
    done = patched.start("-c", "print('alive')", SGLANG_PD_RADIX=word)
    assert (done.stdout, done.stderr) == ("alive\n", "")
    done = patched.start("-c", "import sglang", SGLANG_PD_RADIX=word)
    assert done.returncode and f"SGLANG_PD_RADIX is '{word}': give 1" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.5.10", "sglang 0.5.10 is not patched: this patch set is for 0.5.10.post1 only"),
        ("0.5.9.post2", "sglang 0.5.9.post2 is not patched: this patch set is for 0.5.10.post1 only"),
        ("0.5.11", "sglang 0.5.11 is not patched: this release has the flag built in"),
        ("0.6.0rc1", "sglang 0.6.0rc1 is not patched: this release has the flag built in"),
    ],
)
def test_other_engine_is_left_alone_and_one_line_says_so(patched: Sandbox, version: str, reason: str) -> None:
    patched.engine({}, version)
    done = patched.start(
        "-c",
        "import subprocess, sys; from sglang.srt.queue import Queue; print(Queue().push(), flush=True);"
        "subprocess.run([sys.executable, '-c', 'import sglang']);"
        "from sglang_pd_radix.patching import loader; print(loader.active(), loader.status()['reason'])",
    )
    assert done.stderr == f"sglang-pd-radix: inactive: {reason}.\n"
    assert done.stdout.splitlines() == ["engine push", f"False {reason}"]


STATE = "from sglang_pd_radix.patching import loader; import sglang; print(loader.active(), loader.status()['reason'])"


def test_a_source_tree_in_front_of_the_installed_engine_is_left_alone(patched: Sandbox) -> None:
    """It has no metadata: the version that is found there is the installed engine's."""
    tree = patched.base / "tree"
    (tree / "sglang").mkdir(parents=True)
    (tree / "sglang" / "__init__.py").write_text("")
    path = os.pathsep.join(map(str, (patched.ours, tree, patched.site)))
    done = patched.start("-c", STATE, PYTHONPATH=path)
    reason = (
        f"the engine that runs is in {tree / 'sglang'}, and its version is unknown: "
        f"sglang 0.5.10.post1 is installed in {patched.engine_root}"
    )
    assert (done.stdout, done.stderr) == (f"False {reason}\n", f"sglang-pd-radix: inactive: {reason}.\n")
    # And with metadata of its own.
    shutil.copytree(patched.site / "sglang-0.5.10.post1.dist-info", tree / "sglang-0.5.10.post1.dist-info")
    assert patched.start("-c", STATE, PYTHONPATH=path).stdout == "True applied to sglang 0.5.10.post1\n"


@pytest.mark.parametrize("how", ["link", "linked environment", "editable", "strict editable", "egg-info", "zip"])
def test_an_engine_is_known_however_it_is_installed(patched: Sandbox, how: str) -> None:
    tree, site = patched.base / "my tree" / "python", patched.site
    tree.mkdir(parents=True)
    (metadata,) = site.glob("*.dist-info")
    path = [patched.ours, site]
    if how == "zip":
        path[1] = Path(shutil.make_archive(str(patched.base / "engine"), "zip", site))
    elif how == "linked environment":
        path[1] = patched.base / "current"
        path[1].symlink_to(site)
    else:
        patched.engine_root.rename(tree / "sglang")
    if how == "link":
        patched.engine_root.symlink_to(tree / "sglang")
    elif how == "editable":
        told = {"url": tree.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(told))
        path.append(tree)
    elif how == "strict editable":
        # As setuptools installs it: folders of their own, in which each file is a link.
        told = {"url": tree.parent.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(told))
        links = patched.base / "build" / "__editable__.sglang"
        shutil.copytree(tree / "sglang", links / "sglang", copy_function=lambda file, link: os.symlink(file, link))
        path.append(links)
    elif how == "egg-info":
        metadata.rename(tree / "sglang.egg-info")
        (tree / "sglang.egg-info" / "METADATA").rename(tree / "sglang.egg-info" / "PKG-INFO")
        path.append(tree)
    done = patched.start("-c", STATE, PYTHONPATH=os.pathsep.join(map(str, path)))
    assert (done.stdout, done.stderr) == ("True applied to sglang 0.5.10.post1\n", "")


def test_status_tells_what_was_done(patched: Sandbox) -> None:
    out = patched.run("""
        from sglang_pd_radix.patching import loader
        print(loader.active(), loader.status()["modules"])
        import sglang.srt.queue
        status = loader.status()
        print(loader.active(), status["modules"], status["reason"])
        print(status["patch_root"] == str(loader.patch_root()), status["engine"])
    """)
    assert out.splitlines() == [
        "False []",
        "True ['sglang.srt.queue'] applied to sglang 0.5.10.post1",
        f"True {patched.engine_root}",
    ]


def test_programs_without_the_engine_import_nothing(patched: Sandbox) -> None:
    """Nor does a program that only asks whether the engine is there, as transformers does."""
    out = patched.run("""
        import importlib.util, sys
        print(importlib.util.find_spec("sglang") is not None)
        print([name for name in sys.modules if name.split(".")[0] in ("sglang", "sglang_pd_radix", "wrapt")])
    """)
    ours = ["sglang_pd_radix", "sglang_pd_radix.patching", "sglang_pd_radix.patching.boot"]
    assert out.splitlines() == ["True", str(ours)]


def test_cpu_host_support_comes_before_any_code_of_the_engine(patched: Sandbox) -> None:
    cpu_host = patched.ours / "sglang_pd_radix" / "supplied" / "cpu_host"
    (cpu_host / "__init__.py").write_text("def install():\n    print('cpu host')\n")
    patched.engine({"__init__.py": "print('engine')\n"})
    assert patched.run("import sglang, sglang.srt.queue").split("\n") == ["cpu host", "engine"]
    assert patched.run("import sglang", SGLANG_PD_RADIX="0") == "engine"


def test_patch_tree_never_passes_for_the_engine(patched: Sandbox) -> None:
    """The tree comes first on ``sys.path`` here; with no engine at all, nothing of it is active."""
    assert patched.run("import sglang; print(sglang.__file__)") == str(patched.engine_root / "__init__.py")
    (patched.engine_root / "__init__.py").unlink()
    done = patched.start("-S", "-c", "import sglang_pd_radix.patching.boot, sglang; print(sglang.__file__)")
    assert done.stdout.strip() == "None", done.stderr


def test_failed_engine_import_can_be_tried_again(patched: Sandbox) -> None:
    patched.engine({"__init__.py": "import os\nif os.environ.pop('FAIL', None):\n    raise ValueError('first')\n"})
    out = patched.run(
        """
        try:
            import sglang
        except ValueError as error:
            print(error)
        from sglang.srt.queue import Queue
        print(Queue().push())
        """,
        FAIL="1",
    )
    assert out.splitlines() == ["first", "patched engine push"]


def test_start_line_survives_a_broken_installation(tmp_path: Path) -> None:
    """The .pth line runs in every Python: without the package it must be silent."""
    line = (PACKAGE.parent / "sglang_pd_radix.pth").read_text()
    assert re.fullmatch(r"import [^\n]+\n", line)  # one line, of the form that site.py executes
    sandbox = Sandbox(tmp_path)
    (sandbox.ours / "sglang_pd_radix" / "patching" / "boot.py").unlink()
    done = sandbox.start("-S", "-c", f"{line}\nprint('alive')")
    assert (done.stdout, done.stderr) == ("alive\n", "")
