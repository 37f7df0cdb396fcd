"""The order of admission of the core alone: that of arrival, whatever the tree holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from decode_world import World, asked, queue, sent, serve, serve_to_end, tokens
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.disaggregation.decode_radix.admission import Admission
from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy
from sglang.srt.disaggregation.decode_radix.schedule import Schedule
from sglang.srt.disaggregation.decode_radix.tp_agreement import CANDIDATES


@contextmanager
def core_alone() -> Iterator[None]:
    """Workers that are made meanwhile have no other order, whatever extras run."""
    with ExitStack() as stack:
        for owner, more in (
            (DecodePreallocQueue, {"schedule_type": Schedule, "admission_type": Admission}),
            (DecodeTransferQueue, {"policy_type": AdmissionPolicy}),
        ):
            stack.enter_context(patch.multiple(owner, **more))
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    with core_alone():
        yield


def test_who_came_first_goes_first(alone):
    world = World(size=96, page_size=4, reserved=2)
    serve_to_end(world, tokens(1, 32))
    running = serve(world, tokens(9, 40), max_new=8).req
    cold, warm = queue(world, tokens(2, 36), tokens(1, 32) + tokens(3, 4))
    world.step()
    assert asked([cold, warm]) == [True, False]
    world.finish(running)
    world.step()
    assert warm.wire.asked
    world.check()


def test_a_higher_priority_goes_first(alone):
    world = World(size=96, page_size=4, reserved=2)
    world.scheduler.enable_priority_scheduling = True
    world.scheduler.schedule_low_priority_values_first = False
    running = serve(world, tokens(9, 40), max_new=8, priority=0).req
    (low,) = queue(world, tokens(2, 60), priority=1)
    (high,) = queue(world, tokens(3, 64), priority=5)
    world.step()
    world.finish(running)
    world.step()
    assert asked([low, high]) == [False, True]


def test_nobody_waits_for_the_transfer_of_another(alone):
    world = World(size=512)
    herd = queue(world, *(tokens(1, 32) + tokens(n, 8) for n in range(2, 6)))
    world.step()
    assert all(asked(herd)) and sent(herd) == 4 * 10
    # What has come is for those that ask after it.
    world.complete(herd[0])
    world.step()
    (late,) = queue(world, tokens(1, 32) + tokens(7, 8))
    world.step()
    assert late.req.decode_prefix_len == 32
    world.check()


def test_a_prompt_that_waits_is_compared_again_only_when_the_tree_has_changed(alone):
    world = World(size=96, page_size=4, reserved=2)
    running = serve(world, tokens(9, 60), max_new=8).req
    blocked, _ = queue(world, tokens(2, 60), tokens(3, 60))
    # While its handshake is not done, no step is left out.
    world.arrive(tokens(4, 8))
    compared, peek = [], world.tree.peek
    world.tree.peek = lambda keys, extra_key: compared.append(len(keys)) or peek(keys, extra_key)
    for _ in range(10):
        world.step()
    assert compared == [60] and not blocked.wire.asked
    world.finish(running)
    world.step()
    assert blocked.wire.asked
    world.check()


def many(rank: int) -> list[Any]:
    with core_alone():
        me = Rank(rank, 2048)
    requests = queue(me.world, *(tokens(n, 8) for n in range(1, 2 * CANDIDATES)))
    counts = []
    for _ in range(3):
        me.step()
        counts.append(sum(asked(requests)))
    return [counts, me.world.queue.ranks.disagreements]


def test_ranks_admit_those_that_they_have_compared(pair):
    counts, disagreements = assert_same(pair.run(many))
    assert counts == [CANDIDATES, 2 * CANDIDATES - 1, 2 * CANDIDATES - 1] and disagreements == 0
