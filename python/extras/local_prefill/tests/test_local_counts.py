"""Of prompts that decode computes itself: which tokens are told as computed, and which as held."""

from __future__ import annotations

from typing import Any

import pytest
from overlapped_loop import Loop
from test_prompts_computed_here import arrive, local_loop
from test_prompts_computed_here import played as play_through


class Counters:
    """Of a worker; what is told of each request: tokens of its prompt, held ones, computed ones."""

    def __init__(self):
        self.told: list[tuple[int, int, int]] = []

    def committed(self, prompt_len: int, prefix_len: int, computed: int = 0) -> None:
        self.told.append((prompt_len, prefix_len, computed))


class Told:
    """What a worker has told of its steps over prompts, and of each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.counters, self.steps = Counters(), list[Any]()
        monkeypatch.setattr("test_prompts_computed_here.local_loop", self._loop)

    def _loop(self, *args: Any, **sizes: Any) -> Loop:
        loop = local_loop(*args, **sizes)
        loop.transfer.local._events = self.counters
        loop.scheduler.report_prefill_stats = lambda prefill_stats=None, **more: self.steps.append(prefill_stats)
        return loop

    def check(self, loop: Loop) -> None:
        """All that has been computed, and nothing else, is told as computed; the rest of the prompts as held."""
        computed = sum(end - start for _, start, end in loop.extended)
        prompts = sum(prompt_len for prompt_len, *_ in self.counters.told)
        assert sum(step.log_input_tokens for step in self.steps) == computed
        assert sum(step.log_hit_tokens for step in self.steps) == prompts - computed
        assert [sum(figures) for figures in zip(*self.counters.told, strict=True)] == [
            prompts, prompts - computed, computed,
        ]  # fmt: skip
        # And each answer says the same of its own.
        reqs = [req for req in loop.told if req.computed_here]
        assert sorted((req.transfer_prefix_len, req.computed_here) for req in reqs) == sorted(
            (held, computed) for _, held, computed in self.counters.told
        )
        assert all(req.cached_tokens == req.transfer_prefix_len for req in reqs)


@pytest.fixture
def told(monkeypatch) -> Told:
    return Told(monkeypatch)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_another_has_brought_meanwhile_is_told_as_held(told, page_size, overlap):
    """Four alike, admitted together: what the first computes the others find."""

    def all_four(loop: Loop) -> None:
        loop.queue.policy.follow = False
        for _ in range(4):
            arrive([1] * 12, max_new=3)(loop)

    loop = play_through({1: all_four}, slice_tokens=40, page_size=page_size, overlap=overlap)
    assert [computed for *_, computed in told.counters.told] == [12, *[page_size] * 3]
    told.check(loop)


def test_what_a_transfer_has_brought_between_two_slices_is_told_as_held(told):
    def second(loop: Loop) -> None:
        arrive([1] * 8 + [2] * 11, max_new=3)(loop)

    def bring(loop: Loop) -> None:
        loop.transfer.local.policy = loop.transfer.local.policy._replace(most=0)
        loop.queue.policy.follow = False
        second(loop)

    loop = play_through({1: arrive([1] * 8, max_new=20), 5: second, 6: bring}, slice_tokens=2, page_size=1)
    assert 1 <= sum(end - start for rid, start, end in loop.extended if rid == "r2") < 11
    told.check(loop)
