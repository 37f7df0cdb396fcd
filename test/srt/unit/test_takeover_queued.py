"""How many tokens of prompts whose prefill is gone wait to be computed here at a time, and what counts as one."""

from __future__ import annotations

import pytest
from decode_world import HostSizes
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation import takeover
from test_takeover import LOCAL, POLICY, arrive, ended_well, loop_of, lose, played
from test_traps import tokens


def die(loop: Loop) -> None:
    """All that wait lose their prefill."""
    for decode_req in list(loop.queue.queue):
        lose(decode_req)


def test_so_many_tokens_wait_and_the_rest_fails(monkeypatch):
    monkeypatch.setattr(takeover, "MOST_QUEUED", 30)

    def come(loop: Loop) -> None:
        for token in range(1, 5):
            arrive([token] * 12, shakes_hands=False)(loop)

    # 24 tokens beside one of them.
    loop = played({1: come, 3: die})
    assert ended_well(loop) == {"r1", "r2", "r3"} and len(loop.told) == 4
    # However long one is, if none waits.
    loop = played({1: arrive([1] * 50, shakes_hands=False), 3: die})
    assert ended_well(loop) == {"r1"}


@pytest.mark.parametrize("lengths", [(40, 12, 12, 12), (12, 40, 12, 12), (12, 12, 40, 12)])
def test_so_many_tokens_wait_beside_the_longest(monkeypatch, lengths):
    """The longest itself was counted, so that one long prompt shut out all others."""
    monkeypatch.setattr(takeover, "MOST_QUEUED", 30)

    def come(loop: Loop) -> None:
        for token, length in enumerate(lengths, 1):
            arrive([token] * length, shakes_hands=False)(loop)

    loop = played({1: come, 3: die}, size=256)
    assert ended_well(loop) == {"r1", "r2", "r3"} and len(loop.told) == 4


def test_what_a_step_has_computed_waits_no_more(monkeypatch):
    """Of a prompt whose last slice was computed, all of it was counted."""
    monkeypatch.setattr(takeover, "MOST_QUEUED", 30)

    def come(loop: Loop) -> None:
        for token in (1, 2):
            arrive([token] * (72 if token == 1 else 12), shakes_hands=False)(loop)

    def late(loop: Loop) -> None:
        # 16 of the first one's tokens are left, and those of the second.
        assert sorted(one.left for one in loop.transfer.local.waiting) == [12, 16]
        arrive([3] * 72, shakes_hands=False)(loop)
        die(loop)

    loop = played({1: come, 3: die, 11: late}, size=256)
    assert ended_well(loop) == {"r1", "r2", "r3"}


@pytest.mark.parametrize("kept", [True, False])
def test_what_host_memory_holds_of_it_is_not_lacking(monkeypatch, kept):
    """Conversations of a few thousand tokens came back, of which a few tokens are new, and most failed.

    What was counted on and is evicted before the admission is computed as well.
    """
    monkeypatch.setattr(takeover, "MOST_QUEUED", 30)
    loop = loop_of(size=256, page_size=4, host=HostSizes(1024))
    prompts = [tokens(n, 40) for n in (1, 45, 90)]

    def between() -> None:
        if loop.iterations in (1, 6, 11):
            arrive(prompts[loop.iterations // 5], max_new=1)(loop)
        for one in loop.asked:
            loop.complete(one)
        if loop.iterations == 40:
            loop.tree.evict_shortfall(loop.tree.evictable_size())
            for prompt in prompts:
                lose(arrive(prompt + [5, 6], shakes_hands=False, max_new=2)(loop))
        if loop.iterations == 41:
            assert len(loop.queue.queue) == 3 and not loop.told[3:]
            if not kept:
                loop.tier.drop_unlocked()
        if loop.iterations > 42 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300

    loop.run(between)
    loop.check_answers()
    assert len(ended_well(loop)) == 6
    assert loop.tier.loaded_tokens == (120 if kept else 0)
    assert min(part[1] for part in loop.extended) == (40 if kept else 0)


def test_one_that_host_memory_is_being_copied_for_starts_over_with_what_is_left(monkeypatch):
    """It waits for its prefill with part of it copied, or to be: that is there for its next start."""
    monkeypatch.setattr(takeover, "MOST_QUEUED", 30)
    loop = loop_of(size=512, page_size=4, host=HostSizes(1024))
    prompts = [tokens(n, 40) for n in (1, 45, 90)]

    def between() -> None:
        if loop.iterations in (1, 6, 11):
            arrive(prompts[loop.iterations // 5], max_new=1)(loop)
        if loop.iterations < 40:
            for one in loop.asked:
                loop.complete(one)
        if loop.iterations == 40:
            loop.tree.evict_shortfall(loop.tree.evictable_size())
            for prompt in prompts:
                arrive(prompt + [5] * 10, max_new=2)(loop)
        if loop.iterations == 44:
            assert len(loop.asked) == 3
            for one in loop.asked:
                lose(one)
        for ghost in loop.transfer.quarantine:
            ghost.kv_receiver.quiet = True
        if loop.iterations > 46 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300

    loop.run(between)
    loop.check_answers()
    assert len(ended_well(loop)) == 6


def test_those_that_are_lost_together_stand_in_their_order():
    """They stood the other way round, and by the TTFT target's book as if they had come after all others."""
    options = LOCAL | {"disaggregation_decode_ttft_target": 1e6}
    loop = Loop(options=options, reserved=0, size=8192, page_size=4, max_reqs=400)
    loop.transfer.local.policy = POLICY
    seen = {}

    def between() -> None:
        if loop.iterations == 1:
            for token in range(1, 4):
                loop.handshake(loop.arrive([token] * 11))
        elif loop.iterations == 4:
            for decode_req in list(loop.asked):
                lose(decode_req)
            # Nobody is admitted any more.
            loop.pool.free_slots, loop.check = [], lambda: None
            for token in (50, 51):
                loop.handshake(loop.arrive([token] * 11))
        elif loop.iterations == 6:
            seen["stand"] = [decode_req.entry.arrival for decode_req in loop.queue.queue]
            seen["in time"] = list(loop.transfer.policy.ttft._in_time)
            raise LoopEnds

    loop.run(between)
    first, *others = seen["stand"]
    assert len(others) == 4 and seen["stand"] == sorted(seen["stand"])
    # Numbers that nobody has would stay in the book.
    assert seen["in time"] == seen["stand"][3:]
