"""A client of prefill is answered once, when its prompt has been computed; its times are logged when it has ended."""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import pytest
from prefill_loop import PrefillLoop
from sglang.srt.managers.scheduler import Scheduler
from test_lost_on_prefill import ROOM


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_answered_once_and_logged_when_its_kv_has_been_sent(monkeypatch, caplog, overlap, logs):
    caplog.set_level("INFO")
    loop = PrefillLoop(monkeypatch, 1, overlap)
    (scheduler,) = loop.schedulers
    scheduler.stream_output = MethodType(Scheduler.stream_output, scheduler)
    scheduler.get_load, scheduler.stream_interval, scheduler.dp_rank = (lambda *args: None), 1, 0
    scheduler.server_args.enable_request_time_stats_logging = logs
    outputs: list[tuple[list[str], list[dict]]] = []
    scheduler.send_to_detokenizer = SimpleNamespace(
        send_output=lambda output: outputs.append((output.rids, output.finished_reasons))
    )
    (req,) = loop.arrive(20, ROOM)
    loop.wire.wire.held = True
    loop.run(6)

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if "Req Time Stats" in record.getMessage()]

    answer = [([req.rid], [{"type": "length", "length": 0}])]
    assert outputs == answer and not logged() and not req.finished()
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(4)
    assert outputs == answer and len(logged()) == logs
    assert not any("forward_duration=-" in line for line in logged())
    scheduler.assert_nothing_held()
