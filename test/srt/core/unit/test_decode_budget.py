"""What admission may give away of the pool, and what it must leave for those that are live."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from decode_world import World, asked, queue
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.decode_radix.budget import (
    AdmissionPlan,
    Budget,
    Memory,
    Uses,
)
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.prefix_reader import PrefixPeek
from sglang.srt.mem_cache.state_kind import Kept, Need
from test_traps import serve, tokens


class Use(NamedTuple):
    """One request's part of `Uses`."""

    held: int
    shared: int
    at_length: int


def together(reqs: list[Use]) -> Uses:
    private = sum(use.held - use.shared for use in reqs)
    return Uses([use.held for use in reqs], private, [use.at_length for use in reqs])


def budget(free: Memory, running: list[Use] | None = None, in_tree: int = 0, **more: Any) -> Budget:
    uses = together(running or [])
    return Budget(free, free.kv, in_tree, lambda: uses, uses.lacks(), **more)


def brings(made: Budget) -> tuple[int, int]:
    """What a retraction of all that run brings, and what the neediest of them lacks then."""
    retractable = made.retractable(made.locked)
    return retractable, made.running.lacks(retractable)


def test_what_a_request_holds_it_need_not_be_given():
    """Its prompt is locked by another as well, so a retraction would not bring it; and it has it."""
    running = [Use(held=404, shared=400, at_length=704)]
    # 4 of its own, and the rest of 704 is still to come, of which a retraction of itself brings nothing.
    one = budget(Memory(0), running)
    assert brings(one) == (4, 300)
    # Two such: what one holds alone the other can have.
    two = budget(Memory(0), [*running, Use(200, 0, 210)], in_tree=400)
    assert brings(two) == (604, 704 - 604)


def found(length: int, evictable: int) -> PrefixPeek:
    return PrefixPeek(length, evictable, [], 0)


class FiveKept(Kept):
    """Of a pool beside KV five are kept, and one more for each admission."""

    def __init__(self, kept: int = 5):
        self.kept = kept

    def plus(self, need: Need) -> Kept:
        return FiveKept(self.kept + 1)

    def with_need(self, need: Need) -> int:
        return need.soon + self.kept


def shared_budget() -> Budget:
    """Two that decode: 40 and 10 tokens of their own, and 60 of the first in the tree, which nobody else holds."""
    made = budget(Memory(1000, 100), [Use(100, 60, 260), Use(10, 0, 20)], in_tree=60, ahead=6, retracted=7)
    made.beside = FiveKept()
    assert brings(made) == (110, 150)
    return made


def test_what_an_admission_needs_figure_by_figure():
    made = shared_budget()
    # Of what it finds, 8 are held by the one that decodes: with them locked, a retraction brings 8 less.
    plan = AdmissionPlan(found(48, 40), 20, 24, 120, Need(8, 12, 30))
    assert made.needs(plan) == Memory(20 + 40 + (150 + 8) + 7, 12 + 5)
    # Never more than the neediest lacks in all, whatever is locked.
    assert made.needs(plan._replace(found=found(48, 20))).kv == 20 + 20 + 160 + 7
    # Nothing is locked that was not free.
    assert made.needs(plan._replace(found=found(40, 40))).kv == 20 + 40 + 150 + 7
    # Its own end is far: on its way it cannot be retracted, and may have what a retraction of the others brings.
    assert made.needs(plan._replace(at_length=320)).kv == 20 + 40 + (300 - (110 - 8)) + 7
    # The next steps of all.
    assert made.needs(plan._replace(soon=200)).kv == 20 + 40 + (200 - 20 + 6) + 7
    made.free = made.needs(plan).plus(Memory(3, 2))
    assert made.covers(plan, Memory(3, 2))
    assert not made.covers(plan, Memory(4, 2)) and not made.covers(plan, Memory(3, 3))


USES = st.builds(
    lambda shared, own, more: Use(shared + own, shared, shared + own + more),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 60),
)
PLANS = st.builds(
    lambda held, evictable, delta, soon, end: AdmissionPlan(
        found(held, min(held, evictable)), delta, delta + soon, delta + soon + end
    ),
    *[st.integers(0, 60)] * 5,
)


@given(st.lists(USES, max_size=6), st.integers(-60, 200), st.integers(0, 200), st.lists(PLANS, max_size=4))
def test_who_decodes_is_looked_at_where_it_makes_a_difference(running, in_tree, ahead, plans):
    """One budget looks whenever it is asked, the other where the next steps of all may not be enough."""
    looks: list[int] = []
    seen, unseen = (budget(Memory(500), running, in_tree, ahead=ahead, coming=20) for _ in range(2))
    seen.lacks_at_most = 10**6
    uses = unseen.uses
    unseen.uses = lambda: looks.append(1) or uses()  # type: ignore[func-returns-value]
    for plan in plans:
        assert seen.needs(plan) == unseen.needs(plan)
        seen.admit(plan, 4)
        unseen.admit(plan, 4)
    assert not looks if ahead > 140 else len(looks) <= 1
    assert brings(seen) == brings(unseen)


@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_in_transfer_is_not_reserved_once_more(shares):
    world = World(size=1024, page_size=4, max_reqs=16, reserved=4)
    doc = tokens(1, 400)
    serve(world, doc + tokens(2, 4), max_new=300)
    queue(world, (doc if shares else tokens(7, 4)) + tokens(3, 4), max_new=8)
    world.step()
    # Free are 616 or 612; the one that runs lacks 300 and may have what the others leave.
    (other,) = queue(world, tokens(9, 200), max_new=8)
    world.step()
    assert other.wire.asked
    world.check()


@pytest.mark.parametrize("together", [True, False])
def test_a_prefix_locked_in_the_same_step_is_not_retractable(together):
    world = World(size=1024, page_size=4, max_reqs=16, reserved=4)
    doc = tokens(1, 400)
    serve(world, doc + tokens(2, 4), max_new=8)
    first = queue(world, doc + tokens(3, 4), max_new=8)
    if not together:
        world.step()
    # 940 at its end: with the document, which the first now holds too, it would be there.
    second = queue(world, tokens(9, 40), max_new=900)
    world.step()
    assert asked(first + second) == [True, False]


def test_who_lives_is_not_looked_at_for_every_admission(monkeypatch):
    """A step that admits many would take their number times that of the live ones."""

    def looks(count: int) -> int:
        world = World(size=1024, page_size=4, max_reqs=16, reserved=4)
        found, look = [], decode.DecodePreallocQueue.live
        monkeypatch.setattr(decode.DecodePreallocQueue, "live", lambda queue: found.append(1) or look(queue))
        queue(world, *(tokens(100 + i, 8) for i in range(count)), max_new=8)
        world.step()
        monkeypatch.undo()
        assert len(world.transfer.queue) == count
        return len(found)

    assert 0 < looks(8) == looks(2)


def test_a_request_that_has_ended_has_nothing_to_retract():
    """It is in the batch until the next one is made, and its KV has been given back."""
    world = World(size=1024, page_size=4, max_reqs=16, reserved=4)
    req = serve(world, tokens(1, 40), max_new=500).req
    for _ in range(400):
        world.decode()
    before = world.queue._budget()
    assert brings(before)[0] + before.free.kv == 1024
    release_kv_cache(req, world.tree)
    req.finished_reason = FINISH_LENGTH(400)
    after = world.queue._budget()
    assert (brings(after)[0], after.free.kv, after.ahead) == (0, 1024, 0)


def test_who_is_on_its_way_can_finish():
    """In transfer it cannot be retracted, and what it lacks to its end is left for it."""
    world = World(size=256, page_size=4, max_reqs=16, reserved=4)
    first = queue(world, tokens(1, 40), max_new=200)
    world.step()
    second = queue(world, tokens(2, 40), max_new=8)
    world.step()
    assert asked(first + second) == [True, False], "240 tokens at its end, and 256 in all"
    world.complete(first[0])
    world.step()
    world.step()
    assert not second[0].wire.asked
    for _ in range(200):
        world.decode()
    world.step()
    assert second[0].wire.asked
    world.check()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_retracted_request_waits_for_a_place_in_the_batch_without_kv(overlap):
    """With KV, which no retraction brings, it left who ran too little to its end: "Out of memory", status 500."""
    loop = Loop(overlap=overlap, size=64, page_size=1, reserved=0, max_reqs=2)
    prompt, made = tokens(1, 51), []
    # The last one's place in the batch is that of the second, when it has been retracted.
    comes = {1: (prompt[:39], 9), 3: ([*prompt[:38], *tokens(2, 13)], 11), 4: ([*prompt[:38], *tokens(2, 12)], 12)}

    def between() -> None:
        if loop.iterations in comes:
            one, max_new = comes[loop.iterations]
            made.append(loop.arrive(one, max_new=max_new))
            loop.handshake(made[-1])
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if len(loop.told) == 3 and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300, "they do not end"

    loop.run(between)
    assert [len(decode_req.req.output_ids) for decode_req in made] == [9, 11, 12]


def _brute_force(world: World) -> int:
    """Tokens that would be free or evictable when all that run are retracted, beyond what is."""
    page = world.page_size
    private = sum(-(-r.kv_allocated_len // page) * page - r.cache_protected_len for r in world.running)
    locks: dict[int, int] = {}
    for req in world.running:
        node = req.last_node
        while node is not world.tree.root_node:
            locks[node.id] = locks.get(node.id, 0) + 1
            node = node.parent
    return private + sum(len(n.key) for n in world._nodes() if n.lock_ref == locks.get(n.id))


def _step(world: World) -> list[Budget]:
    """One step, and the budgets that it made, the last one with all that the step has admitted."""
    queue, budgets = world.queue, []
    make = queue._budget
    queue._budget = lambda: budgets.append(make()) or budgets[-1]  # type: ignore[method-assign, func-returns-value]
    world.step()
    queue._budget = make  # type: ignore[method-assign]
    return budgets


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 5)), min_size=5, max_size=40))
def test_the_figures_are_those_of_the_worker(steps):
    """Whatever has happened: what a retraction brings is counted to the token, and kept up within a step."""
    world = World(size=160, page_size=4, reserved=2, max_reqs=32)
    for n, (what, prefix, own) in enumerate(steps):
        if what <= 2:
            queue(world, tokens(prefix + 1, 24) + tokens(20 + n, 4 * own), max_new=1 + own)
        elif what == 3 and world.transfer.queue:
            world.complete(world.transfer.queue[own % len(world.transfer.queue)])
        elif what == 4 and world.running:
            world.finish(world.running[own % len(world.running)])
        elif what == 5:
            world.decode()
        before = world.queue._budget()
        assert brings(before)[0] == _brute_force(world) and before.running.lacks() <= before.lacks_at_most
        running = set(map(id, world.running))
        budgets = _step(world)
        world.check()
        if budgets and running == set(map(id, world.running)):
            # The last one of the step was kept up through its admissions.
            after, now = budgets[-1], world.queue._budget()
            assert after.free == now.free and after.available <= world.allocator.available_size()
            assert after.ahead == now.ahead and after.coming >= now.coming
            (brought, lacks), (brought_now, lacks_now) = brings(after), brings(now)
            assert brought <= brought_now and lacks >= lacks_now
