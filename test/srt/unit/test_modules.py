"""Who imports whom: no circle, and the pages of it are up to date."""

from __future__ import annotations

import modules
import pytest


def written(tmp_path, **files: str):
    for name, text in files.items():
        path = tmp_path / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules.imports(tmp_path)


def test_there_is_no_circle():
    graph = modules.imports()
    assert len(graph) > 80 and sum(map(len, graph.values())) > 100, "the modules were not found"
    standing = {name: floor for floor, names in enumerate(modules.floors(graph)) for name in names}
    assert all(standing[other] < standing[name] for name in graph for other in graph[name])


def test_the_pages_are_what_the_code_says():
    """Written by `python benchmark/modules.py`."""
    graph = modules.imports()
    assert modules.PICTURE.read_text(encoding="utf-8") == modules.as_svg(graph)
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
