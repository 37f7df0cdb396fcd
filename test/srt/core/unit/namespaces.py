"""What every name under which KV is kept outside of a worker does."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any


def options(**given: Any) -> SimpleNamespace:
    args = {
        "model_path": "org/Model-1",
        "revision": None,
        "weight_version": "default",
        "kv_namespace": "",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "quantization_param_path": None,
        "torchao_config": "",
        "load_format": "auto",
        "json_model_override_args": "{}",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "speculative_draft_model_quantization": None,
    }
    return SimpleNamespace(**{**args, **given})


WEIGHTS = [
    {"model_path": "org/Model-2"},
    {"model_path": "/other/Model-1"},
    {"revision": "a"},
    {"weight_version": "2"},
]
FORMATS = [
    {"dtype": "float16"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"quantization": "fp8"},
    {"quantization_param_path": "scales.json"},
    {"torchao_config": "int4wo-128"},
    {"load_format": "dummy"},
    {"json_model_override_args": '{"rope_theta": 1}'},
]


def separates_weights_and_formats(named) -> None:
    names = [named(options(**given)) for given in ({}, *WEIGHTS, *FORMATS)]
    assert len(set(names)) == len(names)
    assert names[0] == named(options())
    assert re.fullmatch(r"Model-1-[0-9a-f]{24}", names[0])


def lets_the_operator_name_weights(named) -> None:
    mine = {"kv_namespace": "team a/llama"}
    name = named(options(**mine))
    assert name.startswith("team-a-llama-")
    assert {named(options(**mine, **given)) for given in WEIGHTS} == {name}
    others = [named(options(**mine, **given)) for given in FORMATS]
    assert len({name, *others, named(options(kv_namespace="b")), named(options())}) == len(others) + 3
