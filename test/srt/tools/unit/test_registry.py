"""The register and its pins: on a small pair of source trees, and on the real patch set and the installed engine."""

from __future__ import annotations

import ast
import gc
import json
import shutil
from pathlib import Path

import pytest
from sandbox import Sandbox

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader, registry, syntax
from sglang_pd_radix.tools import cli

BASE = """
    class Base:
        def poll(self):
            return 0

        @property
        def ready(self):
            return True
"""
QUEUE = """
    from sglang.srt.base import Base

    LIMIT = 1

    def helper():
        return 1

    def other():
        return 2

    class Local:
        def inherited(self):
            return 1

    class Queue(Base, Local):
        @staticmethod
        def make():
            return Queue()

        def push(self):
            return 1

        def pop(self):
            return 1

    class Small:
        pass
"""
PATCH = '''
    """What this file is for.

    Upstream: the file's own.
    """

    from sglang.srt import queue as engine
    from sglang.srt.mixin import Mixin

    __all__ = ["LIMIT", "Queue", "Small", "Extra", "helper", "other", "fresh"]

    LIMIT = 2
    _other = engine.other
    _Queue = engine.Queue

    class Queue(Mixin, _Queue):
        """A better queue.

        It has more to say.

        Upstream: the class's own,
        on two lines.
        """

        @staticmethod
        def make():
            """Makes one of ours."""
            return _Queue.make()

        def push(self):
            """Pushes twice,
            in one paragraph."""
            return super().push() + super().push()

        def pop(self):
            """Pops what it likes.

            Upstream: the method's own.
            """
            return super().push()

        def poll(self):
            """Polls less."""
            return 5

        def inherited(self):
            """Found in a base of the same file."""
            return super().inherited()

        def _new(self):
            return 1

    class Small:
        """Takes the whole class."""

    class Extra:
        """Not in the engine."""

    def helper():
        """Asks the engine's."""
        return engine.helper()

    def other():
        """Asks it by another name."""
        return _other()

    def fresh():
        return 1
'''
MIXIN = '''
    """A module of ours."""

    class Mixin:
        @property
        def ready(self):
            """Ready later."""
            return False
'''


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    box = Sandbox(tmp_path)
    box.engine({"srt/base.py": BASE, "srt/queue.py": QUEUE})
    box.patch({"srt/queue.py": PATCH, "srt/mixin.py": MIXIN})
    return box


def rows(box: Sandbox) -> dict[str, registry.Replacement]:
    return {row.name: row for row in registry.replacements(box.engine_root, box.ours)}


def test_every_change_is_classified(sandbox: Sandbox) -> None:
    found = {name: (row.kind, row.pin) for name, row in rows(sandbox).items()}
    assert found == {
        "*": ("adds", None),
        "LIMIT": ("replaces", "sglang.srt.queue:LIMIT"),
        "Queue": ("extends", None),
        "Queue.make": ("wraps", "sglang.srt.queue:Queue.make"),
        "Queue.push": ("wraps", "sglang.srt.queue:Queue.push"),
        "Queue.pop": ("replaces", "sglang.srt.queue:Queue.pop"),
        "Queue.poll": ("replaces", "sglang.srt.base:Base.poll"),
        "Queue.inherited": ("wraps", "sglang.srt.queue:Local.inherited"),
        "Queue._new": ("adds", None),
        "Queue.ready": ("replaces", "sglang.srt.base:Base.ready"),
        "Small": ("replaces", "sglang.srt.queue:Small"),
        "Extra": ("adds", None),
        "helper": ("wraps", "sglang.srt.queue:helper"),
        "other": ("wraps", "sglang.srt.queue:other"),
        "fresh": ("adds", None),
    }


def test_why_and_upstream_come_from_the_docstrings(sandbox: Sandbox) -> None:
    found = rows(sandbox)
    assert found["Queue"].why == "A better queue."
    assert found["Queue.push"].why == "Pushes twice, in one paragraph."
    assert found["Queue.pop"].upstream == "the method's own."
    assert found["Queue.push"].upstream == "the class's own, on two lines."
    assert found["helper"].upstream == "the file's own."
    assert found["*"].why == "A module of ours."
    assert found["Queue.push"].file == "sglang/srt/queue.py"
    source = (sandbox.ours / found["Queue.push"].file).read_text().splitlines()
    assert source[found["Queue.push"].line - 1].strip() == "def push(self):"
    assert not [row.name for row in found.values() if row.undocumented]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('"""Pushes twice,\n            in one paragraph."""', "Queue.push"),
        ('"""Asks the engine\'s."""', "helper"),
        ('"""Takes the whole class."""', "Small"),
    ],
)
def test_missing_docstring_is_noticed(sandbox: Sandbox, text: str, name: str) -> None:
    changed = PATCH.replace(text, "x: int = 1")
    assert changed != PATCH
    sandbox.patch({"srt/queue.py": changed})
    assert [row.name for row in rows(sandbox).values() if row.undocumented] == [name]


def test_all_must_be_plain_and_true(sandbox: Sandbox) -> None:
    sandbox.patch({"srt/queue.py": "__all__ = ['absent']\n"})
    with pytest.raises(PdRadixError, match="__all__ names absent"):
        rows(sandbox)
    sandbox.patch({"srt/queue.py": "__all__ = sorted(globals())\n"})
    with pytest.raises(PdRadixError, match="__all__ must be a plain list"):
        rows(sandbox)


def drift(box: Sandbox, path: Path) -> list[tuple[str, str]]:
    return [(item.pin, item.problem) for item in registry.check_pins(box.engine_root, box.ours, path)]


def test_pins_hold_until_the_engine_changes(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    count = registry.write_pins(sandbox.engine_root, sandbox.ours, path)
    assert count == len(json.loads(path.read_text())) == 10
    assert drift(sandbox, path) == []

    # What the patch set does not touch, comments outside, position and trailing whitespace may change.
    same = "# new first line\n" + sandbox.engine_root.joinpath("srt/queue.py").read_text()
    sandbox.engine({"srt/queue.py": same.replace("return 1\n", "return 1   \n") + "\n\nnew = 1\n"})
    assert drift(sandbox, path) == []

    sandbox.engine({"srt/queue.py": QUEUE.replace("@staticmethod", "@classmethod")})
    assert drift(sandbox, path) == [("sglang.srt.queue:Queue.make", "changed")]

    sandbox.engine({"srt/queue.py": QUEUE.replace("def helper", "def renamed")})
    assert drift(sandbox, path) == [("sglang.srt.queue:helper", "gone")]

    sandbox.engine({"srt/queue.py": QUEUE, "srt/base.py": BASE.replace("return True", "return 1")})
    assert drift(sandbox, path) == [("sglang.srt.base:Base.ready", "changed")]


def test_missing_and_stale_pins(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    (found,) = registry.pins(sandbox.engine_root, sandbox.ours).values()
    path.write_text(json.dumps({**found, "sglang.srt.queue:nothing": "0"}))
    assert drift(sandbox, path) == [("sglang.srt.queue:nothing", "stale")]
    path.write_text("{}")
    assert {problem for _, problem in drift(sandbox, path)} == {"missing"}
    path.unlink()
    assert len(drift(sandbox, path)) == 10


EXTRA = '''
    """What the extra is for."""

    from sglang.srt import queue as engine
    from sglang.srt.mixin import Mixin

    __all__ = ["Queue", "helper"]

    class Queue(Mixin, engine.Queue):
        """A queue that the extra changes."""

        def pop(self):
            """Asks the core's, which asks nobody."""
            return super().pop()

        def _new(self):
            return super()._new()

    def helper():
        """Asks the core's."""
        return engine.helper()
'''


def test_what_an_extra_changes_is_pinned_to_the_engine_in_its_own_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    path, own = tmp_path / "pins.json", sandbox.ours / "extras" / "one" / "pins.json"
    sandbox.patch({"srt/queue.py": EXTRA, "srt/more.py": '"""A module of the extra."""\n'}, "one")
    found = registry.replacements(sandbox.engine_root, sandbox.ours)
    changes = {row.name: (row.file, row.kind, row.pin) for row in found if row.extra == "one"}
    file = "extras/one/sglang/srt/queue.py"
    assert changes == {
        "*": ("extras/one/sglang/srt/more.py", "adds", None),
        "Queue": (file, "extends", None),
        "Queue.pop": (file, "wraps", "sglang.srt.queue:Queue.pop"),
        "Queue.ready": (file, "replaces", "sglang.srt.base:Base.ready"),
        "Queue._new": (file, "adds", None),
        "helper": (file, "wraps", "sglang.srt.queue:helper"),
    }
    assert len([row for row in found if not row.extra]) == 15 and f"## `{file}`" in registry.as_markdown(found)
    assert registry.write_pins(sandbox.engine_root, sandbox.ours, path) == 13 and drift(sandbox, path) == []
    core, extra = (json.loads(each.read_text()) for each in (path, own))
    assert len(core) == 10 and {*extra} == {pin for _, _, pin in changes.values() if pin}
    assert extra.items() <= core.items()

    # Both see the same change once, and neither misses the other.
    sandbox.engine({"srt/queue.py": QUEUE.replace("def helper():", "def helper(*args):")})
    assert drift(sandbox, path) == [("sglang.srt.queue:helper", "changed")]
    sandbox.engine({"srt/queue.py": QUEUE})
    shutil.rmtree(own.parent)
    assert drift(sandbox, path) == []


def test_the_page_has_a_row_for_each_change_and_counts_the_rest(sandbox: Sandbox) -> None:
    sandbox.patch({"srt/queue.py": PATCH.replace("Polls less", "Polls a | b")})
    found = list(rows(sandbox).values())
    text = registry.as_markdown(found)
    assert "Polls a \\| b" in text
    table = [line for line in text.splitlines() if line.startswith("| `")]
    changes = [row.name for row in found if row.kind != "adds"]
    assert [line.split("`")[1] for line in table] == changes + [row.file for row in found if row.name == "*"]
    own = len([row for row in found if row.file == "sglang/srt/queue.py" and row.kind == "adds"])
    assert own and f"And {own} part" in text
    # What they have in common is said once, and what a row has of its own beside it.
    assert text.count("the class's own, on two lines.") == 1 and "Pops what it likes. the method's own. |" in text


# -- the real thing --------------------------------------------------------------------------------------------------


class _ParsesAtItsEnd:
    """As a pending task does that is collected: what it logs has a traceback, whose lines are parsed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("x = (1 + 2) * [3, 4]")


def test_a_tree_is_built_whatever_is_collected_meanwhile() -> None:
    """Python 3.11.7 and before made a SystemError of it, in one run of the tests in many."""
    text = Path(registry.__file__).read_text(encoding="utf-8")
    for _ in range(20):
        for _ in range(50):
            _ParsesAtItsEnd()
        assert syntax.parse(text, registry.__file__).body
    assert gc.isenabled()


def test_patch_set_is_documented_and_pinned_to_the_installed_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert loader.engine_version() == loader.ENGINE_VERSION
    assert cli.main(["patches"]) == 0
    said = capsys.readouterr()
    assert said.out and said.err == ""
