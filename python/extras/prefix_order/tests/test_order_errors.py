"""What raises while a request's place in the order is found fails that request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_every_state as every_state
from every_state_bench import Bench, arrived, bench, kind, retracted, shaken, short_of_memory

__all__ = ["bench", "kind"]

PARTS = {
    "what it waits for": lambda w: (w.queue.policy, "find_leader"),
    "its standing": lambda w: (w.queue.policy, "candidate"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("state", [short_of_memory, shaken, arrived, retracted])
def test_it_costs_nobody_else_its_answer(bench: Bench, state: Callable, part: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(every_state.PARTS, part, PARTS[part])
    every_state.test_an_error_of_the_worker_fails_the_request_in_which_it_came(bench, state, part)
