"""A digest of pages sees what has changed, and sees it whatever the chunks, the pages and the ranks are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.page_digest import PageDigests
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

LAYERS, HEADS, DIM, TOKENS = 2, 4, 6, 64


def pool_of(k: list[torch.Tensor], v: list[torch.Tensor], page: int):
    pool = object.__new__(MHATokenToKVPool)
    pool.k_buffer, pool.v_buffer, pool.page_size = k, v, page
    return pool


def buffers(seed: int = 0, dtype=torch.bfloat16, heads: int = HEADS) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn((TOKENS, heads, DIM), generator=generator).to(dtype) for _ in range(2 * LAYERS)]
    return made[:LAYERS], made[LAYERS:]


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@given(
    seed=st.integers(0, 2**32 - 1),
    numbers=st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True),
    cuts=st.lists(st.integers(0, 8), max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_digests_of_chunks_add_up(seed, numbers, cuts):
    digests = PageDigests(pool_of(*buffers(seed), 4))
    edges = sorted({0, len(numbers), *(min(cut, len(numbers)) for cut in cuts)})
    parts = [digests.of(pages(*numbers[a:b]), a) for a, b in zip(edges, edges[1:], strict=False) if a < b]
    assert torch.equal(sum(parts), digests.of(pages(*numbers)))


@given(
    buffer=st.integers(0, 2 * LAYERS - 1),
    token=st.integers(0, 7),
    head=st.integers(0, HEADS - 1),
    byte=st.integers(0, 2 * DIM - 1),
    bit=st.integers(0, 7),
)
@settings(deadline=None, max_examples=100)
def test_every_single_bit_counts(buffer, token, head, byte, bit):
    sent = PageDigests(pool_of(*buffers(), 4))
    k, v = buffers()
    [*k, *v][buffer].view(torch.uint8)[8 + token, head, byte] ^= 1 << bit
    arrived = PageDigests(pool_of(k, v, 4))
    claim = sent.claim(sent.of(pages(2, 3)))
    assert f"KV head {head} " in arrived.difference(pages(2, 3), [claim])
    # And nothing beside the pages that were sent.
    assert arrived.difference(pages(0, 1, 4), [sent.claim(sent.of(pages(0, 1, 4)))]) is None


def test_a_layer_for_another_and_keys_for_values_are_found():
    k, v = buffers()
    sent = PageDigests(pool_of(k, v, 4))
    claim = sent.claim(sent.of(pages(1)))
    for wrong in ((k[::-1], v), (v, k)):
        assert PageDigests(pool_of(*wrong, 4)).difference(pages(1), [claim]) is not None


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (4, 2), (2, 4), (8, 2), (2, 8)])
def test_ranks_of_different_sizes_compare(senders, receivers):
    """With 8 ranks and 4 heads, two ranks have the same head."""
    k, v = buffers()

    def ranks(size: int) -> list[PageDigests]:
        made = []
        for rank in range(size):
            first, number = rank * HEADS // size, max(1, HEADS // size)
            part = [[b[:, first : first + number].contiguous() for b in side] for side in (k, v)]
            made.append(PageDigests.of_rank(pool_of(*part, 4), rank, size, HEADS))
        return made

    claims = [one.claim(one.of(pages(3, 1))) for one in ranks(senders)]
    for one in ranks(receivers):
        assert one.difference(pages(3, 1), claims) is None
    # Of heads that nobody has told of, nothing is taken for granted.
    last = ranks(receivers)[-1]
    assert "no digest of KV head" in last.difference(pages(3, 1), claims[: len(claims) // 2])


def test_latents():
    pool = object.__new__(MLATokenToKVPool)
    pool.kv_buffer, pool.page_size = [torch.randn(TOKENS, 1, DIM) for _ in range(LAYERS)], 4
    first, second = (PageDigests.of_rank(pool, rank, 2, HEADS) for rank in range(2))
    assert second.difference(pages(1, 2), [first.claim(first.of(pages(1, 2)))]) is None


def test_index_keys_count():
    """A page of them is a row, which is no multiple of a KV row."""
    pool = NSATokenToKVPool(256, 64, 16, torch.float32, 8, LAYERS, "cpu", 128, False, 24)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.view(torch.uint8).random_()
    digests = PageDigests.of_rank(pool, 0, 1, HEADS)
    claims = [digests.claim(digests.of(pages(1, 3)))]
    assert digests.difference(pages(1, 3), claims) is None
    rows = pool.index_k_with_scale_buffer[-1]
    rows[2] += 1
    assert digests.difference(pages(1, 3), claims) is None
    rows[[1, 3]] = rows[[3, 1]]
    assert digests.difference(pages(1, 3), claims) is not None
    rows[[1, 3]] = rows[[3, 1]]
    rows[3, -1] += 1
    assert digests.difference(pages(1, 3), claims) is not None


def test_other_pools_are_refused():
    with pytest.raises(ValueError, match="SimpleNamespace.*--disaggregation-decode-verify-pages"):
        PageDigests(SimpleNamespace(page_size=1))


@given(st.text(max_size=80))
def test_no_claim_of_a_peer_raises(text):
    digests = PageDigests(pool_of(*buffers(), 4))
    assert digests.difference(pages(1), [text]) is not None


def test_the_digest_is_that_of_other_releases():
    """It is on the wire, and the workers of a deployment are not upgraded in one moment."""
    k, v = ([torch.arange(64 * DIM, dtype=torch.int32).view(torch.float32).view(64, 1, DIM).clone()] for _ in range(2))
    digests = PageDigests(pool_of(k, v, 4))
    assert digests.claim(digests.of(pages(3, 1), 2)) == "0:73d79fa9348498c0"


def test_stages_claim_their_layers_and_decode_wants_all():
    generator = torch.Generator().manual_seed(0)
    k, v = ([torch.randn((64, 4, 6), generator=generator) for _ in range(5)] for _ in "kv")

    def of_layers(first: int, end: int, num_layers: int | None = 5) -> PageDigests:
        pool = object.__new__(MHATokenToKVPool)
        pool.k_buffer, pool.v_buffer, pool.page_size, pool.start_layer = k[first:end], v[first:end], 4, first
        return PageDigests.of_rank(pool, 0, 1, 4, num_layers)

    pages = np.array([3, 1], np.int32)
    claims = [one.claim(one.of(pages)) for one in (of_layers(0, 2), of_layers(2, 5))]
    assert [claim.split(":")[2] for claim in claims] == ["0-2", "2-5"]
    whole = of_layers(0, 5, None)
    # One stage, which has all layers, says what a worker without stages says.
    assert whole.claim(whole.of(pages)).count(":") == 1
    assert whole.difference(pages, claims) is None
    assert whole.difference(pages, claims[::-1] * 2) is None
    assert "no digest of KV head 0 from layer 2 on" in whole.difference(pages, claims[:1])
    assert "no digest of KV head 0" in whole.difference(pages, claims[1:])
    v[4][4, 2, 1] += 1
    assert "KV head 2 is not what prefill sent" in whole.difference(pages, claims)
