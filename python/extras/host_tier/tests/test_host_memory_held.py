"""What of host memory stays when room is made there: by the priority of requests, and for how long it is locked."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from decode_world import World
from host_world import HostSizes
from test_host_tier import PAGE, admit, leave_pool, saved, world
from test_traps import tokens

IMPORTANT, OTHERS = tokens(1, 20), [tokens(start, 20) for start in (30, 60, 90)]


class ByPriority(World):
    """With --radix-eviction-policy priority."""

    def _hosted(self, sizes, params):
        params.eviction_policy = "priority"
        return super()._hosted(sizes, params)


def by_priority(host: int = 48) -> World:
    return ByPriority(size=256, page_size=PAGE, host=HostSizes(host))


def on_host(one: World, prompt: list[int]) -> int:
    return one.tier.host.peek(prompt, None).length


def test_host_memory_keeps_what_requests_of_a_high_priority_have_had():
    """The device's tree does, and host memory evicted it first."""
    one = by_priority()
    saved(one, IMPORTANT, max_new=1, priority=10)
    for prompt in OTHERS:
        saved(one, prompt, max_new=1, priority=0)
    assert on_host(one, IMPORTANT) == 20 and on_host(one, OTHERS[0]) < 20
    one.check()


def test_what_comes_back_for_a_request_of_a_higher_priority_is_its_own():
    """To the tree it is new, and it is known to be in host memory only when it is to be saved."""
    one = by_priority()
    saved(one, IMPORTANT, max_new=1, priority=0)
    leave_pool(one)
    saved(one, IMPORTANT, max_new=1, priority=10)
    assert one.tier.loaded_tokens
    for prompt in OTHERS:
        saved(one, prompt, max_new=1, priority=1)
    assert on_host(one, IMPORTANT) == 20


# ---- quarantine ----


def test_what_a_failed_request_loaded_is_locked_until_its_copy_is_over():
    """Its prefill may take long to say that it writes no more, and all of that time saves found no room."""
    one = world(host=128, late=True, size=256)
    saved(one, tokens(1, 120))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 120) + tokens(9, 4))
    decode_req.kv_receiver.abort()
    for _ in range(3):
        one.step()
        assert one.transfer.quarantine == [decode_req] and one.tier.host.protected_size() == 120
        one.check()
    one.tier.memory.wait()
    one.step()
    # Its own pages are still being written to.
    assert one.transfer.quarantine == [decode_req] and decode_req.load is None
    assert one.tier.host.protected_size() == 0
    one.check()
    saved(one, tokens(60, 64))
    assert on_host(one, tokens(60, 64)) == 64 and not one.tier.saves.dropped_tokens
    decode_req.kv_receiver.quiet = True
    one.step()
    assert not one.transfer.quarantine
    one.check()


def copies_end_one_by_one(rank: int, first: int) -> list[Any]:
    """The copy is over on one rank some steps before it is on the other."""
    one = world(late=True, group=dist.group.WORLD)
    saved(one, tokens(1, 24))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    decode_req.kv_receiver.abort()
    told: list[Any] = []
    for step in range(6):
        if step == (2 if rank == first else 4):
            one.tier.memory.wait()
        one.step()
        told.append((len(one.transfer.quarantine), one.tier.figures(), decode_req.load is None))
        one.check()
    return told


@pytest.mark.parametrize("first", [0, 1])
def test_tp_ranks_let_go_of_it_in_the_same_step(pair, first):
    told, other = pair.run(copies_end_one_by_one, first)
    assert told == other
    assert [let_go for *_, let_go in told] == [False] * 4 + [True] * 2
    assert [quarantined for quarantined, *_ in told] == [1] * 6
