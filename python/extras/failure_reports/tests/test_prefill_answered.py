"""A client of prefill is answered once, when its prompt has been computed; its times are logged when it has ended."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache

ROOM = 7001


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


def told_by(loop: PrefillLoop) -> list[Any]:
    """The messages that the one rank of a prefill will send to its detokenizer, of which the engine makes them."""
    (scheduler,) = loop.schedulers
    messages: list[Any] = []
    scheduler.dp_rank, scheduler.stream_interval = None, 1
    scheduler.server_args.dp_size = 2
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=lambda message, *_: messages.append(message))
    scheduler.stream_output = MethodType(Scheduler.stream_output, scheduler)
    assert isinstance(scheduler.tree_cache, RadixCache)
    return messages


def test_a_prefill_tells_nothing_of_what_fails_while_it_is_sent(monkeypatch):
    """Its clients were answered when their prompts had been computed. Decode reports the failure."""
    loop = PrefillLoop(monkeypatch, 1, False)
    messages, rooms = told_by(loop), [*range(7001, 7005)]
    loop.wire.wire.held = True
    reqs = [loop.arrive(12, room)[0] for room in rooms]
    loop.run(8)
    assert len(loop.schedulers[0].disagg_prefill_inflight_queue) == len(rooms)
    assert sorted(rid for message in messages for rid in message.rids) == [req.rid for req in reqs]
    messages.clear()
    for req in reqs:
        req.disagg_kv_sender.fail("NIXL reports an error of the transfer")
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(4)
    assert not any(message.rids for message in messages)
    assert all(req.disagg_kv_sender.poll() == KVPoll.Failed for req in reqs)
    loop.schedulers[0].assert_nothing_held()
