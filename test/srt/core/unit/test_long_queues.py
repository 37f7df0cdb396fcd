"""Queues of a decode worker: longer than what one step of admission looks at, and of requests without a priority."""

from __future__ import annotations

import pytest
from decode_world import World, queue, serve, tokens
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.admission import ABORT_INTERVAL
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams


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


def test_a_retracted_request_waits_for_a_row_as_for_memory():
    world = World(size=96, max_reqs=2)
    first, second = (serve(world, tokens(n, 9), max_new=4).req for n in (1, 2))
    world.retract(second)
    rows, world.pool.free_slots = world.pool.free_slots, []
    for _ in range(3):
        assert world.step() == [] and world.queue.retracted_queue == [second] and second.finished_reason is None
    world.pool.free_slots = rows
    assert world.step() == [second] and world.running == [first, second]
    world.check()


def test_a_second_live_request_of_one_room_is_refused():
    """In the engine one ends the other's books, and then the scheduler."""
    world = World()
    first = world.arrive(tokens(1, 9))
    second = Req("second", "", tokens(1, 9), SamplingParams(), bootstrap_host="10.0.0.1", bootstrap_room=1)

    def refused() -> bool:
        world.queue.add(second)
        return world.streamed[-1:] == [second] and "a room of its own" in second.finished_reason.message

    assert refused(), "while the first waits for memory"
    world.handshake(first)
    world.step()
    assert refused(), "while its KV is in transfer"
    first.kv_receiver.abort()
    world.step()
    assert world.transfer.quarantine == [first]
    assert refused(), "while its KV may still be written"
    assert [dr.req for dr in world.queue.queue] == []
    first.kv_receiver.quiet = True
    world.step()
    world.check()


def test_what_a_buffer_held_before_is_not_taken_for_another_requests():
    """The room of its last user: metadata that has not come yet would read as another's."""
    world = World(size=64, page_size=4)
    world.meta.bootstrap_room[:] = 99
    decode_req = world.arrive(tokens(1, 22))
    world.handshake(decode_req)
    world.step()
    receiver = decode_req.kv_receiver
    assert world.meta.bootstrap_room[receiver.aux_index, 0] == 0 == receiver.metadata_room()
    assert (world.meta.bootstrap_room == 99).any()


def test_failures_are_told_when_what_they_held_has_been_given_back():
    """A DP controller hears of a rank's load with its outputs, and those may be the last for long."""
    one = World(size=256, page_size=4)
    reqs = [one.arrive(tokens(start, 40)) for start in (1, 100, 200)]
    for decode_req in reqs:
        one.handshake(decode_req)
    one.step()
    told = []

    def stream_output(ended, *args, **kwargs) -> None:
        told.append((len(one.transfer.queue), one.allocator.available_size()))

    one.scheduler.stream_output = stream_output
    for decode_req in reqs:
        decode_req.kv_receiver.state = KVPoll.Failed
    # Nobody writes for the first any more; the others wait in quarantine.
    reqs[0].kv_receiver.quiet = True
    one.step()
    assert [queued for queued, _ in told] == [0, 0, 0]
