"""What a scheduler says of its load with each output: counted, not timed. It looks at all that waits to say it."""

from __future__ import annotations

import pytest
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from test_prefill_answered import told_by


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefill_tells_all_that_it_loses_in_one_step_at_once(monkeypatch, overlap):
    """Those that wait for their turn, and the one of which a part has been computed."""
    loop = PrefillLoop(monkeypatch, 1, overlap)
    messages, rooms = told_by(loop), [*range(7001, 7006)]
    reqs = [loop.arrive(100, room)[0] for room in rooms]
    reqs[2].return_logprob = True
    reqs[2].output_token_logprobs_val, reqs[2].output_token_logprobs_idx = [], []
    reqs[2].output_top_logprobs_val, reqs[2].output_top_logprobs_idx = [], []
    reqs[2].output_token_ids_logprobs_val, reqs[2].output_token_ids_logprobs_idx = [], []

    def during(scheduler) -> None:
        if len(scheduler.steps) == 2:
            for room in rooms:
                loop.wire.prefill[0].manager.rooms.give_up(room, "decode is gone")

    loop.during = during
    loop.run(8)
    (message,) = [message for message in messages if message.rids]
    assert sorted(message.rids) == [f"request-{room}" for room in rooms]
    assert all(isinstance(req.finished_reason, FINISH_ABORT) for req in reqs)
    assert all("decode is gone" in reason["message"] for reason in message.finished_reasons)
    loop.schedulers[0].assert_nothing_held()


def test_a_turn_of_a_prefill_asks_no_sender_that_goes_on(monkeypatch):
    """Thousands may wait, and one is lost: in each turn it is looked for."""
    loop = PrefillLoop(monkeypatch, 1, False)
    reqs = [loop.arrive(20, room)[0] for room in range(7001, 7007)]
    (scheduler,) = loop.schedulers
    scheduler.waiting_queue += reqs
    asked: list[int] = []
    for req in reqs:
        sender = req.disagg_kv_sender
        why = sender.failure_reason
        monkeypatch.setattr(
            sender, "failure_reason", lambda why=why, req=req: asked.append(req.bootstrap_room) or why()
        )
    assert scheduler.lost_requests() == {} and asked == []
    loop.wire.prefill[0].manager.rooms.give_up(7002, "decode is gone")
    reqs[3].disagg_kv_sender.state.due_at = 0.0
    reqs[4].disagg_kv_sender.fail("its own reason")
    lost = scheduler.lost_requests()
    assert sorted(lost) == asked == [7002, 7004, 7005]
    assert lost[7002] == "decode is gone" and "has been sent" in lost[7004] and lost[7005] == "its own reason"


def test_a_prefill_tells_all_that_fail_before_their_turn_at_once(monkeypatch):
    """Which the engine's queue finds: it tells them one by one."""
    loop = PrefillLoop(monkeypatch, 1, False)
    messages = told_by(loop)
    rooms = [*range(7001, 7006)]
    for room in rooms:
        loop.arrive(8, room, asked=False)
    for room in rooms:
        loop.wire.prefill[0].manager.rooms.give_up(room, "decode is gone")
    loop.ranks.rank.number = 0
    _, failed = loop.schedulers[0].disagg_prefill_bootstrap_queue.pop_bootstrapped(True)
    assert len(failed) == 5 and [len(message.rids) for message in messages if message.rids] == [5]


def test_what_decode_has_refused_is_counted_as_its_client_was_told(monkeypatch):
    """The answer turns the engine's 500 into decode's 400, and a metric counts failures that are not the client's."""
    ended: list[int] = []
    counts = hooks.Events()
    counts.ended = lambda reason: ended.append(reason.status_code)
    monkeypatch.setitem(hooks._makers, hooks.Events, [lambda args: counts])
    loop = PrefillLoop(monkeypatch, 1, False)
    told_by(loop)
    scheduler = loop.schedulers[0]
    loop.arrive(20, 5, asked=False)
    scheduler.handle_refused_request(refusal.RefusedReq(5, "n must be 1", by_decode=True))
    loop.ranks.rank.number = 0
    scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped()
    assert ended == [400]
