"""What drafts take of the pool, and what admission leaves for them."""

from __future__ import annotations

import itertools

import pytest
from decode_world import World
from overlapped_loop import LoopEnds
from sglang.srt.disaggregation.decode_radix.budget import Lengths
from speculating_loop import SpeculatingLoop


@pytest.mark.parametrize(
    ("overlap", "page_size", "expected"),
    [(True, 1, (8, 8)), (True, 16, (8, 32)), (False, 1, (0, 4)), (False, 16, (0, 16))],
)
def test_what_drafts_take_is_what_the_engine_allocates(overlap, page_size, expected):
    """To the slot, in the steps of one request; and the engine wants as much again before each of them."""
    loop = SpeculatingLoop(True, overlap, size=256, page_size=page_size, reserved=0)
    drafts = loop.queue.accounts.lengths.drafts
    assert drafts == expected
    made = loop.arrive([1, 2, 1, 1, 2], max_new=20)
    loop.handshake(made)
    ahead = []

    def between() -> None:
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.running:
            ahead.append(made.req.kv_allocated_len - made.req.kv_committed_len)
        if loop.told and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 60

    loop.run(between)
    assert max(ahead) == drafts.held
    world = World()
    assert type(world.queue.accounts.lengths) is Lengths


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_who_drafts_can_finish_beside_a_transfer(overlap, page_size):
    """Of 64 tokens the transfer takes 36: enough is left for 28, and not for what is drafted behind them."""
    for first in itertools.product((1, 2), repeat=3):
        loop = SpeculatingLoop(True, overlap, size=64, page_size=page_size, reserved=0)
        made = [loop.arrive([*first, *[1] * 13], max_new=12)]
        loop.handshake(made[0])
        _run_to_its_end(loop, made)
        assert [req.rid for req in loop.told] == [made[0].req.rid]
        assert made[0].req.to_finish is None and len(made[0].req.output_ids_through_stop) == 12


def _run_to_its_end(loop: SpeculatingLoop, made: list) -> None:
    """A second request comes when the first runs, and is left in transfer until that has ended."""

    def between() -> None:
        if loop.running and len(made) == 1:
            made.append(loop.arrive([3] * 36, max_new=2))
            loop.handshake(made[1])
        for decode_req in loop.asked:
            if decode_req is made[0] or loop.told:
                loop.complete(decode_req)
        if loop.told and len(made) == 2 and made[1] in loop.asked:
            raise LoopEnds
        assert loop.iterations < 60, "the second waits for ever"

    loop.run(between)
