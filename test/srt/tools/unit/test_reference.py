"""docs/reference.md is what the code says, and what is written in reference.py is all that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from code_texts import texts
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_pd_radix.patching import syntax
from sglang_pd_radix.tools import reference
from sglang_pd_radix.tools.cli import COMMANDS

ROOT = Path(__file__).parents[4]
PATCH, PACKAGE = ROOT / "python" / "sglang" / "srt", ROOT / "python" / "sglang_pd_radix"
#: Where names are only listed, so that they would find themselves.
LISTED = PACKAGE / "tools" / "reference.py"


@pytest.fixture(scope="module")
def said() -> set[str]:
    """Every text of the code."""
    extras = ROOT.glob("python/extras/*/sglang")
    return texts(PATCH, *extras, *(path for path in PACKAGE.rglob("*.py") if path != LISTED))


def test_the_page_is_what_the_code_says():
    """Written by `pd-radix reference --markdown > docs/reference.md`."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").strip() == reference.as_markdown().strip()


def test_every_variable_of_this_package_is_there(said):
    known = {v.name for v in (*reference.VARIABLES, *reference.ENGINE_VARIABLES)} | {*reference.INTERNAL_VARIABLES}
    used = {text for text in said if re.fullmatch(r"(?:SGLANG|MC)_[A-Z0-9_]+", text)} - {"SGLANG_ROUTER"}
    assert used <= known, f"not in reference.py: {sorted(used - known)}"
    ours = {v.name for v in reference.VARIABLES} | {*reference.INTERNAL_VARIABLES}
    assert ours <= used, f"nobody reads {sorted(ours - used)}"


@pytest.mark.parametrize("variable", reference.ENGINE_VARIABLES, ids=lambda variable: variable.name)
def test_defaults_of_the_engines_variables(variable):
    field = type(envs).__dict__.get(variable.name)
    if field is None:
        assert not variable.name.startswith("SGLANG_DISAGG"), "the engine has those in one place"
        return
    assert variable.default == str(field.default)


def test_options_are_those_beside_the_engines():
    base = ServerArgs.__mro__[-2]
    fields = {name for name in ServerArgs.__dataclass_fields__ if name not in base.__dataclass_fields__}
    options = {re.findall(r"`--([a-z-]+)`", names)[0].replace("-", "_") for names, *_ in reference.engine_options()}
    # The flag's second name is one of its own to the parser.
    assert options == fields | {"disaggregation_enable_decode_radix_cache"} and len(fields) >= 8


def test_options_of_commands():
    assert {"--only", "--runs", "--compare"} <= reference.option_names("bench")
    for command in COMMANDS:
        for names, _default, meaning in reference.command_options(command):
            assert meaning, f"pd-radix {command} {names} has no help"


def test_metrics_are_those_that_are_made():
    made: set[str] = set()
    for tree in (PATCH, *ROOT.glob("python/extras/*/sglang")):
        for path in tree.rglob("*.py"):
            made |= set(re.findall(r"= (?:counter|gauge)\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
    listed = {name.removeprefix("sglang:").removesuffix("_total") for name, *_ in reference.metrics()}
    assert listed == made and len(made) > 10


def keys_of(function: ast.FunctionDef) -> set[str]:
    """The keys of the dictionaries that a function makes, and those that it adds."""
    parts = [*ast.walk(function)]
    names = [key for part in parts if isinstance(part, ast.Dict) for key in part.keys]
    names += [part.slice for part in parts if isinstance(part, ast.Subscript)]
    return {name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)}


FIELDS = {
    "longest_queue_step_s",
    "free_req_slots",
    "oldest",
    "computes_up_to",
    "itl",
    "ttft",
    "ttft_refusal",
    "window_size",
}


def test_fields_of_a_pool_are_those_that_a_worker_tells():
    """The functions that make `kv_pool` are found by some of its fields, wherever they stand."""
    functions = [
        node
        for path in [*PATCH.rglob("*.py"), *PATCH.parents[1].glob("extras/*/sglang/**/*.py")]
        for node in ast.walk(syntax.parse(path.read_text(encoding="utf-8"), path))
        if isinstance(node, ast.FunctionDef) and (FIELDS & keys_of(node) or node.name == "pool_record")
    ]
    keys = set().union(*map(keys_of, functions))
    assert keys - {"kv_pool", "pegaflow"} == {*reference.POOL_FIELDS}


def test_fields_and_routes_are_in_the_code(said):
    assert {*reference.DETAIL_FIELDS} <= said
    routes = {text for text in said if re.fullmatch(r"/[a-z]+_(?:prefix|room|rooms)", text)}
    assert routes == {*reference.ROUTES}
    assert {value for _, value, _ in reference.ADDED_VALUES} <= said
