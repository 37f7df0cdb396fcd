"""The option by which prefill reads from decode: what it takes, and what is refused with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import DecodeWorker
from sglang.srt.disaggregation.decode_reads import make_reads
from sglang.srt.mem_cache.radix_cache import RadixCache
from test_flag import DECODE, FLAG, PREFILL, assert_told_what_turns_the_cache_off, parse  # noqa: F401

READ = "--disaggregation-prefill-read-decode"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([*DECODE, FLAG], "is for prefill workers, but --disaggregation-mode is decode"),
        ([], "is for prefill workers, but --disaggregation-mode is null"),
        ([*PREFILL[:3], "mooncake"], "which is nixl, and --disaggregation-transfer-backend is mooncake"),
        ([*PREFILL, "--disable-radix-cache"], "not verified together with --disable-radix-cache"),
        ([*PREFILL, "--enable-hierarchical-cache"], "not verified together with --enable-hierarchical-cache"),
        ([*PREFILL, "--pipeline-parallel-size", "2"], "not verified together with --pipeline-parallel-size above 1"),
        ([*PREFILL, "--dllm-algorithm", "LowConfidence"], "not verified together with --dllm-algorithm"),
    ],
)
def test_prefill_reads_from_decode_where_that_is_verified(parse, options, why):  # noqa: F811
    assert parse(*PREFILL).disaggregation_prefill_read_decode is None
    assert parse(*PREFILL, READ, "64").disaggregation_prefill_read_decode == 64
    with pytest.raises(ValueError, match=why):
        parse(*options, READ, "64")
    for wrong in ("0", "-3"):
        with pytest.raises(ValueError, match="give 1 token or more"):
            parse(*PREFILL, READ, wrong)


def test_what_turns_the_radix_cache_off_is_told(parse, tmp_path):  # noqa: F811
    assert_told_what_turns_the_cache_off(parse, tmp_path, READ, *PREFILL, READ, "64")


def test_a_tree_that_keeps_nothing_is_refused():
    """The engine has one for a multimodal model of the Transformers backend."""
    engines = DecodeWorker(64, 1, max_reqs=4, max_len=64, reserved=1, tree_type=RadixCache).tree
    engines.disable = True
    args: Any = SimpleNamespace(disaggregation_prefill_read_decode=64)
    with pytest.raises(ValueError, match=f"{READ} needs the radix cache, .* Transformers backend"):
        make_reads(SimpleNamespace(server_args=args, tree_cache=engines), SimpleNamespace(has_state=False))
