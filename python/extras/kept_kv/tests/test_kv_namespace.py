"""The name under which KV is kept outside of a worker."""

from __future__ import annotations

import namespaces
from namespaces import options
from sglang.srt.mem_cache.kv_namespace import kv_namespace


def test_what_separates_workers_by_default():
    namespaces.separates_weights_and_formats(kv_namespace)


def test_a_directory_is_known_by_where_it_is(tmp_path, monkeypatch):
    """The same words name another model in another folder."""
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        given = ("model", "./model", "model/", str(tmp_path / folder / "model"))
        (name,) = {kv_namespace(options(model_path=path)) for path in given}
        names.append(name)
    assert names[0] != names[1]


def test_the_operators_name_says_which_weights_are_the_same():
    namespaces.lets_the_operator_name_weights(kv_namespace)
