"""Who imports whom: no circle, and the page of it is up to date."""

from __future__ import annotations

from pathlib import Path

import modules
import pytest

from sglang_pd_radix.patching.loader import PatchFile


def written(tmp_path, **files: str):
    for name, text in files.items():
        path = tmp_path / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules.imports(tmp_path)


def test_there_is_no_circle():
    graph = modules.of_checkout()
    assert len(graph) > 60 and sum(map(len, graph.values())) > 100, "the modules were not found"
    standing = {name: floor for floor, names in enumerate(modules.floors(graph)) for name in names}
    assert all(standing[other] < standing[name] for name in graph for other in graph[name])


def test_the_core_imports_no_extra_and_an_extra_another_only_if_its_page_says_so():
    for name, others in modules.of_checkout().items():
        page = modules.CODE.parents[1] / name / "README.md"
        allowed = page.read_text(encoding="utf-8") if page.is_file() else ""
        wrong = [other for other in others if other.startswith("extras/") and Path(other).name not in allowed]
        assert not wrong, f"{name} imports {wrong}"


def test_an_extra_is_one_module(tmp_path):
    made = written(tmp_path / "core", a="from sglang.srt import b, x\n", b="from sglang.srt.c import n\n")
    assert made == {"a": {"b"}, "b": set()}
    root = tmp_path / "extras" / "e"
    files = {"x": "from sglang.srt import y\n", "y": "import sglang.srt.b\n", "b": "import sglang.srt.b", "c": ""}
    written(root / "sglang" / "srt", **files)
    extra = [PatchFile("", root / "sglang" / "srt" / f"{name}.py", name in "bc", root) for name in files]
    assert modules.imports(tmp_path / "core", extra) == {"a": {"b", "extras/e"}, "b": set(), "extras/e": {"b"}}


def test_the_page_is_what_the_code_says():
    """Written by `python benchmark/modules.py`."""
    graph = modules.of_checkout()
    page = modules.PAGE.read_text(encoding="utf-8")
    assert modules.with_list(page, graph) == page


def test_what_counts_as_an_import(tmp_path):
    graph = written(
        tmp_path,
        a="from sglang.srt import a as engine, b\nfrom sglang.srt.c.d import thing\nimport sglang.srt.e\n",
        b="def later():\n    from sglang.srt.c import d\n",
        c__d="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sglang.srt import a\nfrom . import f\n",
        c__f="import os\nfrom sglang.srt.elsewhere import x\n",
        e="",
    )
    assert {name: set(of) for name, of in graph.items()} == {
        "a": {"b", "c/d", "e"},
        "b": {"c/d"},
        "c/d": {"c/f"},
        "c/f": set(),
        "e": set(),
    }
    assert modules.floors(graph) == [["c/f", "e"], ["c/d"], ["b"], ["a"]]
    assert modules.as_list(graph).splitlines()[0].split() == ["3", "a"]


def test_a_circle_is_named(tmp_path):
    graph = written(
        tmp_path, a="from sglang.srt import b", b="def f():\n    from sglang.srt import c", c="import sglang.srt.a"
    )
    with pytest.raises(modules.Circle, match="a -> b -> c -> a"):
        modules.floors(graph)


def test_a_page_without_its_marks_is_an_error():
    with pytest.raises(ValueError, match="between which the list belongs"):
        modules.with_list("nothing", {"a": frozenset()})
