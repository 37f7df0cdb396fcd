"""A prefill of several context-parallel ranks: every rank has all KV, and the first sends."""

from __future__ import annotations

from collections.abc import Iterator

import mooncake_world as mooncake
import nixl_world as nixl
import numpy as np
import pytest
import requests
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import KVPoll

# A miss, a hit in part, a full hit: tokens of the prompt and of the prefix, and where chunks end, in pages.
PROMPTS = [(26, 0, (3, 5)), (26, 8, (3, 5)), (24, 24, ())]


@pytest.fixture
def made() -> Iterator[list]:
    worlds: list = []
    yield worlds
    for world in worlds:
        world.close()


def over_mooncake(monkeypatch, made: list, **options) -> mooncake.World:
    made.append(mooncake.World(monkeypatch, **options))
    return made[-1]


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
@pytest.mark.parametrize(("prompt_len", "prefix_len", "chunks"), PROMPTS)
def test_mooncake_of_context_parallel_ranks(monkeypatch, made, tp, prompt_len, prefix_len, chunks):
    world = over_mooncake(monkeypatch, made, prefill_tp=tp[0], decode_tp=tp[1], prefill_cp=2)
    assert requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()["version"] == 1
    request = world.request(1, prompt_len, prefix_len).bootstrap()
    send(request, chunks)
    request.finish()
    request.assert_landed()
    world.assert_books_closed()
    assert [rank.manager.events.sent_bytes > 0 for rank in world.prefill] == [
        rank.cp_rank == 0 and prefix_len < prompt_len for rank in world.prefill
    ]


@pytest.mark.parametrize(("prompt_len", "prefix_len", "chunks"), PROMPTS)
def test_nixl_of_context_parallel_ranks(monkeypatch, prompt_len, prefix_len, chunks):
    world = nixl.World(monkeypatch, prefill_cp=2)
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    send(request, chunks)
    request.wait_senders(KVPoll.Success)
    # Stages and ranks look more than once.
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    assert {transfer.sender for transfer in world.wire.transfers} == {world.prefill[0].agent.name}
    for rank in world.prefill:
        assert not any(rank.manager.rooms_held().values())


def send(request: mooncake.Request | nixl.Request, chunks: tuple[int, ...]) -> None:
    """As the schedulers do: of a rank that decode has not asked, the cursor starts at the prompt's first page."""
    for sender, rank in zip(request.senders, request.world.prefill, strict=True):
        start = request.first_page if rank.cp_rank == 0 else 0
        assert sender.decode_prefix_len // rank.manager.kv_args.page_size == start
        for end in (*chunks, request.num_pages):
            sender.send(np.arange(start, end, dtype=np.int32))
            start = end


def test_pages_that_the_engine_shares_out_are_sent_whole(monkeypatch, made):
    """By their numbers: of a chunk of pages 0, 1 and 9, two ranks send the first two, and page 9 nobody."""
    world = over_mooncake(monkeypatch, made, prefill_cp=2)
    chunk = np.array([0, 1, 9], np.int32)
    managers = [rank.manager for rank in world.prefill]
    parts = [utils.filter_kv_indices_for_cp_rank(manager, chunk, slice(0, 3))[0] for manager in managers]
    assert np.concatenate(parts).tolist() == [0, 1]
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")
    assert requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()["version"] == 0
