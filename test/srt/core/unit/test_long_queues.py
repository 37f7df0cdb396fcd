"""Queues of a decode worker: longer than what one step of admission looks at, and of requests without a priority."""

from __future__ import annotations

import pytest
from decode_world import World, queue
from sglang.srt.disaggregation.decode_radix.admission import ABORT_INTERVAL
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from test_traps import tokens


@pytest.mark.parametrize("place", [0, 150, 191, 193, 250, 399])
def test_a_request_that_fails_is_told_wherever_it_stands(place: int):
    """Its client has gone, or its prefill: what its receiver says is asked for by turns."""
    world = World(size=1024, page_size=4, reserved=2)
    # No row is free, so that nobody is admitted.
    world.pool.free_slots.clear()
    waiting = queue(world, *([n % 250, n // 250, 1, 1] for n in range(400)))
    for _ in range(40):
        world.step()
    assert all(decode_req.phase is Phase.READY for decode_req in waiting)
    (failed,) = waiting[place : place + 1]
    failed.kv_receiver.abort()
    # Of 400, each look brings the turn of 64 behind the first.
    for _ in range(10 * ABORT_INTERVAL):
        world.step()
    assert failed.req.finished_reason is not None


@pytest.mark.parametrize("length", [400, 1024, 1088])
@pytest.mark.parametrize("retracted", [False, True])
def test_each_handshake_has_its_turn(length: int, retracted: bool):
    """Of prefills that do not answer. While a retracted request waits, only every sixteenth step looks at the queue."""
    world = World(size=1024, page_size=4, reserved=2)
    waiting = [world.arrive([1 + n % 90, 1 + n // 90, 1, 1]) for n in range(length)]
    if retracted:
        one = world.arrive(tokens(1, 8))
        world.queue.queue.remove(one)
        world.queue.retracted_queue = [one.req]
    looked: set[int] = set()
    for n, decode_req in enumerate(waiting):
        poll = decode_req.kv_receiver.poll
        decode_req.kv_receiver.poll = lambda n=n, poll=poll: (looked.add(n), poll())[1]
    rounds = 3 * length // WINDOW + 3
    for _ in range(rounds * (ABORT_INTERVAL if retracted else 1)):
        world.queue.pop_preallocated()
    assert len(looked) == length
