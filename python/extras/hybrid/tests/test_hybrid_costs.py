"""A model with states costs a step without the flag nothing."""

from __future__ import annotations

from instrumented import Meter
from overlapped_loop import Loop, LoopEnds, Step
from test_step_costs import seen, told


def test_without_the_flag_a_model_with_states_does_not_wait_for_the_step():
    """The step in flight was waited for as a whole in each admission after an end; for drafts and windows as well."""
    loop, meter = Loop(flag=False, size=4096, page_size=16, max_reqs=32, states=64), Meter()
    loop.check = loop.scheduler.self_check_during_idle = lambda: None

    def between() -> None:
        if loop.iterations > 1:
            meter.end()
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.iterations == 24:
            raise LoopEnds
        # One ends in each step or so, and one arrives.
        loop.handshake(loop.arrive([1 + loop.iterations] * 40, max_new=4, peer_takes_prefix=False))
        meter.begin()

    with meter.instrument(Step):
        loop.run(between)
    assert len(loop.told) > 12
    assert not any(seen(meter.steps, "waits", "ours ")), told(meter.steps, "waits", "ours ")
