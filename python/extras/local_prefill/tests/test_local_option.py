"""The option for prompts that decode computes itself."""

from __future__ import annotations

import pytest
from test_flag import DECODE, FLAG, parse

__all__ = ["parse"]


def test_short_remainders_of_prompts_are_computed_on_decode_unless_that_is_off(parse):
    option = "--disaggregation-decode-local-prefill"
    assert parse(*DECODE).disaggregation_decode_local_prefill is None
    assert parse(*DECODE, FLAG).disaggregation_decode_local_prefill == "auto"
    assert parse(*DECODE, FLAG, option, "off").disaggregation_decode_local_prefill == "off"
    parse(*DECODE, option, "off")
    # What YAML makes of it.
    assert parse(*DECODE, FLAG, option, "false").disaggregation_decode_local_prefill == "off"
    for wrong in ("", "0", "-1", "on", "1.5", "٣x"):
        with pytest.raises(ValueError, match="give off, auto or 1 token or more"):
            parse(*DECODE, FLAG, option, wrong)
    with pytest.raises(ValueError, match=f"{option} needs {FLAG}"):
        parse(*DECODE, option, "auto")


@pytest.mark.parametrize("way", [("deepep", "low_latency"), ("mooncake", "auto"), ("nixl", "auto")])
def test_prompts_are_not_computed_where_a_layer_takes_few_tokens(parse, way):
    """A step over a prompt would be an error there, which ends all ranks."""
    local = ["--disaggregation-decode-local-prefill", "auto"]
    backend, mode = way
    options = ["--moe-a2a-backend", backend, "--deepep-mode", mode, "--tp-size", "2"]
    assert parse(*DECODE, FLAG, *options).disaggregation_decode_local_prefill == "off"
    with pytest.raises(ValueError, match=f"local-prefill with --moe-a2a-backend {backend}"):
        parse(*DECODE, FLAG, *local, *options)
    parse(*DECODE, FLAG, *local, "--moe-a2a-backend", "deepep", "--tp-size", "2")


def test_prompts_are_not_computed_where_ranks_do_not_tell_each_other(parse, monkeypatch):
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    assert parse(*DECODE, FLAG).disaggregation_decode_local_prefill == "off"
    with pytest.raises(ValueError, match="local-prefill with SGLANG_SCHEDULER_SKIP_ALL_GATHER"):
        parse(*DECODE, FLAG, "--disaggregation-decode-local-prefill", "auto")
