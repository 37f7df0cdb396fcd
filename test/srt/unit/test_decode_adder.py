"""One step of admission, in figures; and the phases that a request goes through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World, aborted
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_adder import Added, DecodeAdder
from sglang.srt.disaggregation.decode_admission import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_budget import AdmissionPlan, Budget, Memory, Uses
from sglang.srt.disaggregation.request_phase import Phase
from sglang.srt.mem_cache.decode_windows import NO_WINDOW, WindowNeed
from sglang.srt.mem_cache.prefix_reader import NOTHING
from test_followers import queue
from test_traps import tokens

# Nobody here asks the tree.
NO_TREE: Any = SimpleNamespace(watches=SimpleNamespace(on_the_way=0))


def plan(tokens: int) -> AdmissionPlan:
    return AdmissionPlan(NOTHING, tokens, tokens, tokens)


class Step:
    """A step with memory for 100 tokens; requests arrive in the order of their numbers."""

    def __init__(self, available: int = 100, room: int = 8, **more: Any):
        self.budgets = 0
        self.entries = [QueueEntry(n, 0, None, None) for n in range(4)]
        options = {"max_overtaken": 1, "waiting": lambda: self.entries, **more}
        self.policy = AdmissionPolicy(NO_TREE, True, options.pop("max_overtaken"))
        self.adder = DecodeAdder(self.policy, room, lambda: self._budget(available), 4, **options)

    def _budget(self, available: int) -> Budget:
        self.budgets += 1
        return Budget(Memory(100, 100), available, 0, lambda: Uses([], 0, []), 0)

    def add(self, number: int, tokens: int, window: WindowNeed = NO_WINDOW) -> Added:
        entry = self.entries[number]
        added = self.adder.add_one(entry, SimpleNamespace(rid=number), plan(tokens)._replace(window=window))
        if added in (Added.YES, Added.LAST):
            entry.admitted_at = 1.0
        return added


def test_requests_are_added_until_one_does_not_fit():
    step = Step()
    assert [step.add(0, 40), step.add(1, 40), step.add(2, 40)] == [Added.YES, Added.YES, Added.NO_MEMORY]
    assert step.budgets == 1, "kept up, not asked for again"
    assert step.adder.overtaken() == 0


def test_what_is_reserved_for_the_next_steps_is_kept_up():
    step = Step()
    assert step.add(0, 50) is Added.YES
    # 50 are left, and 4 of them are for the next steps of the first.
    assert step.add(1, 47) is Added.NO_MEMORY and step.add(1, 46) is Added.YES


def test_memory_is_kept_for_who_follows():
    step = Step()
    step.adder.wait(lambda: Memory(30))
    assert step.adder.promised == Memory(30)
    assert step.add(1, 71) is Added.NO_MEMORY and step.add(1, 70) is Added.YES


def test_no_more_than_half_of_what_is_free_is_kept_for_those_who_follow():
    """Their prefill may stand still, and that of the next be idle."""
    step = Step()
    for _ in range(80):
        step.adder.wait(lambda: Memory(30))
    assert step.add(1, 51) is Added.NO_MEMORY and step.add(1, 50) is Added.YES


def test_no_row_or_buffer_is_left():
    step = Step(room=1)
    assert [step.add(0, 1), step.add(1, 1)] == [Added.YES, Added.NO_ROOM]
    assert Step(room=0).add(0, 1) is Added.NO_ROOM


def test_nobody_is_overtaken_more_often_than_the_bound():
    step = Step(max_overtaken=1)
    assert [step.add(2, 1), step.add(3, 1)] == [Added.YES, Added.NOT_ITS_TURN]
    # The first two were passed by once.
    assert step.adder.overtaken() == 2
    assert [entry.overtaken for entry in step.entries] == [1, 1, 0, 0]


def test_an_eviction_beyond_what_nobody_waits_for_ends_the_step_of_several_ranks():
    assert Step(available=9, evictable=0).add(0, 10) is Added.LAST
    assert Step(available=10, evictable=0).add(0, 10) is Added.YES
    step = Step(available=9, evictable=11)
    assert [step.add(0, 10), step.add(1, 10), step.add(2, 1)] == [Added.YES, Added.YES, Added.LAST]
    assert Step(available=9).add(0, 10) is Added.YES


def test_windows_of_those_added_are_kept():
    """Of 100: what they take now, what each will grow by, and what the neediest takes to its end."""
    step = Step()
    assert [step.add(n, 1, window=WindowNeed(20, 24, 30)) for n in (0, 1)] == [Added.YES, Added.YES]
    # 60 are left, of which the first two will take 8, or one of them 10 when nobody else can be retracted.
    assert step.add(2, 1, window=WindowNeed(40, 40, 51)) is Added.NO_MEMORY
    assert step.add(2, 1, window=WindowNeed(40, 40, 50)) is Added.YES
    assert step.add(3, 1, window=WindowNeed(10, 10, 11)) is Added.NO_MEMORY
    assert step.add(3, 1, window=WindowNeed(10, 10, 10)) is Added.YES


# ---- phases ----


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Phase]]:
    """By request, the phases into which it has come."""
    seen: dict[str, list[Phase]] = {}
    advance = DecodeRequest.advance

    def note(decode_req: DecodeRequest, phase: Phase) -> None:
        assert phase is not decode_req.phase
        seen.setdefault(decode_req.req.rid, [decode_req.phase]).append(phase)
        advance(decode_req, phase)

    monkeypatch.setattr(DecodeRequest, "advance", note)
    return seen


ASKED = [Phase.HANDSHAKE, Phase.READY, Phase.ADMITTED, Phase.ASKED]


def test_the_phases_of_a_request(phases: dict[str, list[Phase]]):
    world = World()
    fine, fails, refused = queue(world, tokens(1, 9), tokens(2, 9), tokens(3, 9))
    refused.kv_receiver.abort()
    assert fine.phase is Phase.HANDSHAKE and fine.entry is None
    world.step()
    assert refused not in world.queue.queue and aborted(refused.req)
    world.complete(fine)
    fails.kv_receiver.abort()
    world.step()
    fails.kv_receiver.quiet = True
    world.step()
    assert phases == {
        fine.req.rid: [*ASKED, Phase.COMMITTED],
        fails.req.rid: [*ASKED, Phase.QUARANTINED, Phase.RELEASED],
        refused.req.rid: [Phase.HANDSHAKE, Phase.RELEASED],
    }
    world.check()


def test_an_admission_that_fails_asks_nobody(phases: dict[str, list[Phase]], monkeypatch: pytest.MonkeyPatch):
    world = World()
    (one,) = queue(world, tokens(1, 9))
    monkeypatch.setattr(world.meta_alloc, "alloc", lambda *args: 1 / 0)
    world.step()
    one.kv_receiver.quiet = True
    for _ in range(2):
        world.step()
    expected = [Phase.HANDSHAKE, Phase.READY, Phase.ADMITTED, Phase.QUARANTINED, Phase.RELEASED]
    assert phases == {one.req.rid: expected}
    world.check()


def test_prefill_is_asked_when_the_step_in_flight_is_over(phases: dict[str, list[Phase]]):
    """Every request takes the pages of the one before, which a step still writes to when it has ended."""
    loop = Loop(size=16, page_size=4, reserved=0)
    made: list[DecodeRequest] = []

    def between() -> None:
        if len(made) < 6 and not loop.queue.queue:
            made.append(loop.arrive([1, 2, 1, 2, 1 + len(made) % 2], max_new=4))
            loop.handshake(made[-1])
        for decode_req in loop.asked:
            if decode_req.kv_receiver.state != KVPoll.Success:
                loop.complete(decode_req)
        if len(made) == 6 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200

    loop.run(between)
    ways = [phases[decode_req.req.rid] for decode_req in made]
    deferred = [*ASKED[:-1], Phase.DEFERRED, Phase.ASKED, Phase.COMMITTED]
    assert all(way in (deferred, [*ASKED, Phase.COMMITTED]) for way in ways) and deferred in ways


def test_one_whose_pages_cannot_be_found_costs_nobody_else_its_answer(monkeypatch):
    """The pages of all who are admitted in a step come to the host in one copy."""
    world = World(size=512, page_size=4, max_reqs=16)
    requests = queue(world, *(tokens(n, 16) for n in range(1, 6)))
    deltas, wrong = world.queue.admission.deltas, requests[2]
    offers = deltas._offers
    monkeypatch.setattr(deltas, "_offers", lambda decode_req: 1 / (decode_req is not wrong) and offers(decode_req))
    for _ in range(3):
        world.step()
    assert [aborted(decode_req.req) for decode_req in requests] == [False, False, True, False, False]
    assert all(decode_req.wire.asked for decode_req in requests if decode_req is not wrong)
