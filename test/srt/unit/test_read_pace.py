"""Whether reading KV from decode is quicker than computing it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation import read_pace
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.read_pace import Pace, ReadPaces

LATE_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(read_pace.time, "monotonic", clock.monotonic)
    return clock


def paces(clock: Clock, read: float, computed: float = 5000.0, tokens: int = 1000) -> ReadPaces:
    """Where so many tokens a second were read, one after the other, and computed."""
    made = ReadPaces(LATE_S)
    for _ in range(4):
        made.computed(tokens, clock.now, clock.now + tokens / computed)
        made.read("decode", tokens, clock.now, clock.now + tokens / read)
        clock.now += max(tokens / computed, tokens / read)
    return made


def test_a_link_is_used_where_it_spares_time(clock: Clock) -> None:
    fast, fair, slow = (paces(clock, rate) for rate in (50000.0, 5200.0, 4800.0))
    assert not fast.is_slow("decode", 1000, 0) and not fair.is_slow("decode", 1000, 0)
    assert slow.is_slow("decode", 1000, 0) and not slow.is_slow("another", 1000, 0)
    # What is under way comes first.
    assert not fast.is_slow("decode", 1000, 8500) and fast.is_slow("decode", 1000, 9500)
    # Nobody waits for so long.
    assert not fair.is_slow("decode", 10300, 0) and fair.is_slow("decode", 10500, 0)


def test_where_nothing_is_known_all_are_read(clock: Clock) -> None:
    nothing = ReadPaces(LATE_S)
    assert not nothing.is_slow("decode", 1000, 9000)
    # Of steps that have few tokens it learns nothing.
    nothing.computed(read_pace.LEAST_STEP - 1, clock.now, clock.now)
    nothing.read("decode", 1000, clock.now, clock.now + 1)
    assert not nothing.is_slow("decode", 1900, 0) and nothing.is_slow("decode", 2100, 0)


def test_one_that_has_not_ended_tells_as_well(clock: Clock) -> None:
    late = ReadPaces(LATE_S)
    late.read("decode", 0, clock.now, clock.now + LATE_S)
    clock.now += LATE_S
    assert late.is_slow("decode", 1, 0)
    # It goes on, and ends.
    late.read("decode", 1000, clock.now - LATE_S, clock.now + 1)
    assert not late.is_slow("decode", 600, 0) and late.is_slow("decode", 700, 0)


def test_a_slow_one_is_tried_again_once_in_a_while(clock: Clock) -> None:
    slow = paces(clock, 100.0)
    clock.now += read_pace.FORGOTTEN_S - 1
    assert slow.is_slow("decode", 1000, 0)
    clock.now += 2
    assert not slow.is_slow("decode", 1000, 0) and slow.is_slow("decode", 1000, 1)
    slow.read("decode", 1000, clock.now, clock.now + 0.02)
    clock.now += 0.02
    assert not slow.is_slow("decode", 1000, 0)


def test_what_was_seen_counts_half_after_a_while(clock: Clock) -> None:
    """By the time since what was seen last; what ended before that counts as if it had ended with it."""
    pace = Pace()
    pace.note(1000, 0.0, 10.0)
    pace.note(1000, 10.0 + read_pace.HALF_LIFE_S - 1.0, 10.0 + read_pace.HALF_LIFE_S)
    # Half of the ten seconds and their tokens, and one.
    assert pace.seconds(1500) == pytest.approx(6.0)
    # It had ended before the last one, whose time it has shared.
    pace.note(1500, 0.0, 10.0)
    pace.note(0, 10.0, 10.0 + read_pace.HALF_LIFE_S)
    assert pace.seconds(3000) == pytest.approx(6.0)


def test_decode_ranks_that_are_gone_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_pace, "MOST_PEERS", 3)
    made = ReadPaces(LATE_S)
    for i in range(9):
        made.read(f"decode-{i}", 0, clock.now, clock.now + LATE_S)
        clock.now += 1
    assert [i for i in range(9) if made.is_slow(f"decode-{i}", 1, 0)] == [6, 7, 8]
    # And not one that is read from, as long as others come and go.
    made.read("decode-6", 0, clock.now, clock.now + LATE_S)
    made.read("decode-9", 0, clock.now, clock.now + LATE_S)
    assert [i for i in range(10) if made.is_slow(f"decode-{i}", 1, 0)] == [6, 8, 9]


def test_a_step_that_is_not_overlapped_is_waited_for() -> None:
    """What has been launched has not been computed: the engine reads the tokens only after that."""
    took = 0.2

    class Launched(torch.Tensor):
        def cpu(self) -> torch.Tensor:
            time.sleep(took)
            return torch.ones(1)

    made = ReadPaces(LATE_S)
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=SimpleNamespace(reads=SimpleNamespace(paces=made)))
    stats = SimpleNamespace(prefill_run_batch_start_time=time.perf_counter())
    batch = SimpleNamespace(reqs=[SimpleNamespace(is_chunked=0, time_stats=stats)], out_cache_loc=range(1000))
    result = SimpleNamespace(copy_done=None, next_token_ids=torch.ones(1).as_subclass(Launched))
    SchedulerDisaggregationPrefillMixin._note_step(scheduler, batch, result)  # type: ignore[arg-type]
    assert took <= made._computed.seconds(1000) < LATE_S


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 3)), min_size=1, max_size=8), st.floats(100, 1e6))
def test_reads_at_once_share_the_link(waves: list[tuple[int, float]], rate: float) -> None:
    """Whatever the order in which those of a wave end, and the pauses between waves."""
    pace, now = Pace(), 50.0
    for together, pause in waves:
        now += pause
        took = together * 1000 / rate
        for i in range(together):
            pace.note(1000, now, now + took * (i + 1) / together)
        now += took
    assert pace.seconds(1000) == pytest.approx(1000 / rate, rel=1e-6)
