"""Admission over two TP ranks: prefills that do not answer, ranks that differ for long, trees that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from decode_world import World, queue, serve_to_end, tokens
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.tp_agreement import DISAGREEMENTS

from sglang_pd_radix.patching import loader


def silent_prefill(rank: int, silent: int) -> list[Any]:
    """So many requests of a prefill that does not answer came first; those of another prefill keep coming."""
    me = Rank(rank, 1024)
    for n in range(silent):
        me.world.arrive([n % 250, n // 250, 1, 1])
    others: list[Any] = []
    for n in range(24):
        others += queue(me.world, [n, 251, 1, 1], prefill="b:1", max_new=1)
        me.world.step()
        for decode_req in list(me.world.transfer.queue):
            me.world.complete(decode_req)
        for req in list(me.world.running):
            me.world.finish(req)
    waited = [n for n, dr in enumerate(others) if not dr.wire.asked]
    return [waited, me.world.queue.ranks.disagreements, len(me.world.queue.queue) - silent]


@pytest.mark.parametrize("silent", [100, 300, 1000])
def test_a_prefill_that_does_not_answer_hides_no_other(pair, silent):
    """A step looked at the first 256 of the queue, whoever they waited for, and nobody behind them was admitted."""
    waited, disagreements, queued = assert_same(pair.run(silent_prefill, silent))
    assert disagreements == 0
    # Some steps until it is their turn to be asked about.
    assert len(waited) == queued <= 1 + silent // 128


def test_a_retracted_request_that_is_aborted_holds_nobody_up():
    """It did not fit, was aborted, and what waits in the queue was not looked at for some steps."""
    world = World(size=128, page_size=4, reserved=2)
    queue(world, tokens(1, 40), tokens(2, 40), max_new=8)
    for _ in range(2):
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
    assert len(world.running) == 2
    req = world.running[1]
    for _ in range(4):
        world.decode()
    world.retract(req)
    (other,) = queue(world, tokens(5, 4), max_new=1)
    # What it takes to come back, others hold; for the other there is enough.
    world.tree.evict_shortfall(world.tree.evictable_size())
    taken = world.allocator.alloc(world.allocator.available_size() - 16)
    world.step()
    assert req in world.queue.retracted_queue and not other.wire.asked
    world.abort_retracted(req)
    world.step()
    assert other.wire.asked
    world.allocator.free(taken)
    world.check()


def differ_for_long(rank: int, differing: int) -> list[Any]:
    """One rank's tree has lost 4 tokens, and a request waits."""
    world = World(size=256, page_size=4, group=dist.group.WORLD)
    serve_to_end(world, tokens(1, 32))
    if rank == differing:
        world.tree.evict_shortfall(4)
    queue(world, tokens(2, 8))
    for step in range(2 * DISAGREEMENTS):
        try:
            world.step()
        except RuntimeError as error:
            return [step, str(error)]
    return ["goes on", ""]


@pytest.mark.parametrize("differing", [0, 1])
def test_ranks_that_differ_for_long_end_together(pair, differing):
    """They skip steps, and would for ever: nothing brings them together again."""
    steps, why = assert_same(pair.run(differ_for_long, differing))
    assert steps == DISAGREEMENTS - 1 and "TP ranks have disagreed for 64 steps" in why


def with_extras_of_its_own(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "extras", lambda: ("a", "b")[: rank + 1])
        with pytest.raises(ValueError) as refused:
            World(size=64, group=dist.group.WORLD)
    return [str(refused.value)]


def test_ranks_of_other_extras_do_not_start(pair):
    """An extra may begin a collective when the worker starts: in gloo, ranks of two lists aborted."""
    (message,) = assert_same(pair.run(with_extras_of_its_own))
    assert "SGLANG_PD_RADIX_EXTRAS" in message


def test_one_rank_alone_reduces_nothing(monkeypatch):
    """Each reduction waits for a thread of gloo's: on a busy host that took up to 1.6 s in the middle of a step."""
    world = World(size=256)
    assert world.queue.ranks.size == 1
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("there is nobody to reduce with"))
    serve_to_end(world, tokens(1, 40))
    assert serve_to_end(world, tokens(1, 40)).decode_prefix_len > 0
    failing = world.arrive(tokens(2, 40))
    world.handshake(failing)
    world.step()
    failing.kv_receiver.state = KVPoll.Failed
    world.step()
    assert not world.transfer.queue
    world.check()
