"""One step of admission, in figures; and the phases that a request goes through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from decode_world import World, aborted, queue
from sglang.srt.disaggregation.decode_radix.admission import Added, DecodeAdder
from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, Budget, Memory, Uses
from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
from sglang.srt.mem_cache.prefix_reader import NOTHING
from test_traps import tokens


def plan(tokens: int) -> AdmissionPlan:
    return AdmissionPlan(NOTHING, tokens, tokens, tokens)


class Step:
    """A step with memory for 100 tokens; requests arrive in the order of their numbers."""

    def __init__(self, available: int = 100, room: int = 8, **more: Any):
        self.budgets = 0
        self.entries: list[Any] = [QueueEntry(n, 0, None) for n in range(4)]
        self.adder = self.make(room, lambda: self._budget(available), 4, **more)

    def make(self, *args: Any, **more: Any) -> Any:
        return DecodeAdder(*args, **more)

    def _budget(self, available: int) -> Budget:
        self.budgets += 1
        return Budget(Memory(100, 100), available, 0, lambda: Uses([], 0, []), 0)

    def add(self, number: int, tokens: int) -> Added:
        entry = self.entries[number]
        added = self.adder.add_one(entry, SimpleNamespace(rid=number), plan(tokens))
        if added in (Added.YES, Added.LAST):
            entry.admitted_at = 1.0
        return added


def test_requests_are_added_until_one_does_not_fit():
    step = Step()
    assert [step.add(0, 40), step.add(1, 40), step.add(2, 40)] == [Added.YES, Added.YES, Added.NO_MEMORY]
    assert step.budgets == 1, "kept up, not asked for again"


def test_an_eviction_beyond_what_nobody_waits_for_ends_the_step_of_several_ranks():
    assert Step(available=9, evictable=0).add(0, 10) is Added.LAST
    assert Step(available=10, evictable=0).add(0, 10) is Added.YES
    step = Step(available=9, evictable=11)
    assert [step.add(0, 10), step.add(1, 10), step.add(2, 1)] == [Added.YES, Added.YES, Added.LAST]
    assert Step(available=9).add(0, 10) is Added.YES


def test_one_whose_pages_cannot_be_found_costs_nobody_else_its_answer(monkeypatch):
    """The pages of all who are admitted in a step come to the host in one copy."""
    world = World(size=512, page_size=4, max_reqs=16)
    requests = queue(world, *(tokens(n, 16) for n in range(1, 6)))
    deltas, wrong = world.queue.admission.deltas, requests[2]
    targets = deltas._targets
    monkeypatch.setattr(deltas, "_targets", lambda decode_req: 1 / (decode_req is not wrong) and targets(decode_req))
    for _ in range(3):
        world.step()
    assert [aborted(decode_req.req) for decode_req in requests] == [False, False, True, False, False]
    assert all(decode_req.wire.asked for decode_req in requests if decode_req is not wrong)
