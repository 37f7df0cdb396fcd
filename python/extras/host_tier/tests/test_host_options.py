"""What host memory below the decode tree is not verified with, and trees without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World, serve_to_end, tokens
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.host_tier.support import STORAGES
from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache
from sglang.srt.mem_cache.tier import NO_TIER
from sglang.srt.server_args import prepare_server_args
from test_host_tier import PAGE

from sglang_pd_radix.tools.make_model import make_model


def options(**given: Any) -> Any:
    args = SimpleNamespace(
        disaggregation_decode_local_prefill="off",
        **dict.fromkeys(
            (
                "disable_radix_cache",
                "enable_hisparse",
                "disaggregation_decode_enable_offload_kvcache",
                "enable_lmcache",
                "enable_streaming_session",
                "enable_lora_overlap_loading",
                "enable_return_routed_experts",
                "speculative_algorithm",
                "model_path",
                "speculative_draft_model_path",
                "hicache_storage_backend",
            ),
            None,
        ),
        hicache_write_policy="write_through",
        enable_hierarchical_cache=True,
        pp_size=1,
        attn_cp_size=1,
        dllm_algorithm=None,
        disaggregation_transfer_backend="nixl",
    )
    vars(args).update(given)
    return args


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (
            cache_support.DECODE,
            {"hicache_storage_backend": "hf3fs"},
            r"--hicache-storage-backend hf3fs \(file, mooncake are",
        ),
        (cache_support.DECODE, {"hicache_write_policy": "write_back"}, "--hicache-write-policy write_back"),
        *(
            (kind, {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm")
            for kind in cache_support.kinds_with("linear attention")
        ),
    ],
)
def test_what_is_not_verified_with_it_is_refused(kind, given, says):
    cache_support.check(kind, options())
    for name in STORAGES:
        cache_support.check(kind, options(hicache_storage_backend=name))
    with pytest.raises(ValueError, match=says):
        cache_support.check(kind, options(**given))


def test_without_it_a_tree_has_none():
    one = World(size=64, page_size=PAGE)
    assert not isinstance(one.tree, HostTierRadixCache) and one.tree.tier is NO_TIER
    serve_to_end(one, tokens(1, 24))
    assert len(one.queue.accounts.figures()) == 4


def test_host_memory_that_is_no_larger_than_the_pool_is_refused(tmp_path):
    model = ["--model-path", str(make_model(tmp_path / "m")), "--device", "cpu"]
    pair = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl", FLAG]
    with pytest.raises(ValueError, match=f"--hicache-ratio is 1: host memory.*{FLAG}"):
        prepare_server_args([*model, *pair, "--enable-hierarchical-cache", "--hicache-ratio", "1"])
