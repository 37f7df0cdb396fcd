"""What pages of KV are called."""

from __future__ import annotations

from sglang.srt.mem_cache.page_names import first_hash, page_names
from test_traps import tokens


def test_pages_are_named_by_all_that_comes_before():
    first = page_names(tokens(1, 16), 4, first_hash(None))
    assert len(set(first)) == 4 and page_names(tokens(1, 18), 4, first_hash(None)) == first
    assert page_names(tokens(1, 16)[8:], 4, first[1]) == first[2:]
    other = page_names(tokens(1, 8) + tokens(50, 8), 4, first_hash(None))
    assert other[:2] == first[:2] and not set(other[2:]) & set(first)
    for key in ("", "a", "b", "\ud800"):
        assert not set(page_names(tokens(1, 16), 4, first_hash(key))) & set(first)
    pairs = list(zip(tokens(1, 16), tokens(2, 16), strict=True))
    assert len(page_names(pairs, 4, first_hash(None))) == 4
    assert page_names(pairs, 4, first_hash(None)) != page_names(tokens(1, 16), 4, first_hash(None))
