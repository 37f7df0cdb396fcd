"""The names under which ranks keep their KV in a server."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.page_names import rank_namespace
from sglang.srt.mem_cache.pegaflow.memory import KVLayout
from sglang.srt.mem_cache.tier import Tier


def layout(
    page_size: int = 4, heads: int = 2, dim: int = 8, dtype: Any = torch.float32, layers: int = 2
) -> list[object]:
    buffers = {f"k{i}": torch.zeros((8, heads, dim), dtype=dtype) for i in range(layers)}
    return KVLayout(buffers, page_size, False).describe()


def test_each_layout_and_rank_has_a_name_of_its_own():
    # Bytes of a page are the same in most of them.
    layouts = [
        layout(),
        layout(page_size=8, heads=1),
        layout(heads=4, dim=4),
        layout(heads=1, dim=16),
        layout(dim=16, dtype=torch.float16),
        layout(layers=1),
    ]
    assert len({rank_namespace("m", one, 0, 1) for one in layouts}) == len(layouts)
    assert rank_namespace("m", layout(), 0, 1) == rank_namespace("m", layout(), 0, 1)
    ranks = [("m", 0, 1), ("m", 0, 2), ("m", 1, 2), ("m", None, 2), ("n", 0, 1)]
    assert len({rank_namespace(name, layout(), rank, size) for name, rank, size in ranks}) == len(ranks)


def test_the_tree_is_its_own_tier_and_no_name_of_one_hides_one_of_the_other():
    """`tree.state` hid `Tier.state`: a decode worker with metrics ended in its first step."""
    names = {name for name in vars(Tier) if not name.startswith("_")}
    assert not names & set(dir(DecodeRadixCache))
