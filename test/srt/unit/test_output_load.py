"""What a scheduler says of its load with each output: counted, not timed. It looks at all that waits to say it."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort
from sglang.srt.managers.io_struct import GetLoadReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_traps import tokens


class Waiting(list):
    """Requests that say how often somebody has gone through all of them."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def decode_scheduler(world: World, dp_size: int = 1) -> Any:
    """The real scheduler of a decode worker around ``world``; its messages go to ``sent``."""
    scheduler: Any = object.__new__(Scheduler)
    scheduler.spec_algorithm, scheduler.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.DECODE
    scheduler.dp_rank, scheduler.attn_tp_rank, scheduler.stream_interval, scheduler.is_generation = None, 0, 1, True
    scheduler.refused_rooms, scheduler.enable_hisparse = (), False
    scheduler.is_hybrid_swa = scheduler.is_hybrid_ssm = False
    scheduler.server_args = SimpleNamespace(
        enable_request_time_stats_logging=False, enable_metrics=False, dp_size=dp_size
    )
    scheduler.max_total_num_tokens, scheduler.tree_cache = world.size, world.tree
    scheduler.token_to_kv_pool_allocator = world.allocator
    scheduler.waiting_queue, scheduler.running_batch = [], world.scheduler.running_batch
    scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue = world.queue, world.transfer
    scheduler.sent = []
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=lambda message, *_: scheduler.sent.append(message))
    return scheduler


@pytest.mark.parametrize("dp_size, flag", [(1, True), (2, True), (1, False)])
def test_an_output_looks_at_all_that_waits_only_where_its_load_is_read(dp_size, flag):
    """By a DP controller. Without the flag it is the engine's; and who asks for the load is always told."""
    one = World(size=256, page_size=4)
    reqs = [one.arrive(tokens(start, 8)) for start in (1, 20, 40)]
    scheduler = decode_scheduler(one, dp_size)
    one.queue.queue = Waiting(one.queue.queue)
    if not flag:
        scheduler.tree_cache = SimpleNamespace(evictable_size=lambda: 0, protected_size=lambda: 0)
    prepare_abort(reqs[0].req, "its prefill is gone")
    reqs[0].req.sampling_params.stop_strs = reqs[0].req.sampling_params.stop_regex_strs = []
    scheduler.stream_output([reqs[0].req], False)
    is_read = dp_size > 1 or not flag
    (message,) = scheduler.sent
    assert message.rids == [reqs[0].req.rid] and (one.queue.queue.passes > 0) == is_read
    assert (message.load is not None) == is_read and (not is_read or message.load.num_waiting_reqs == 3)
    assert scheduler.get_load(GetLoadReqInput()).num_waiting_reqs == 3


def told_by(loop: PrefillLoop) -> list[Any]:
    """The messages that the one rank of a prefill will send to its detokenizer, of which the engine makes them."""
    (scheduler,) = loop.schedulers
    messages: list[Any] = []
    scheduler.dp_rank, scheduler.stream_interval = None, 1
    scheduler.server_args.dp_size = 2
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=lambda message, *_: messages.append(message))
    scheduler.stream_output = types.MethodType(Scheduler.stream_output, scheduler)
    assert isinstance(scheduler.tree_cache, RadixCache)
    return messages


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
            loop.wire.prefill[0].manager.rooms.lose_decode(rooms, "decode is gone")

    loop.during = during
    loop.run(8)
    (message,) = [message for message in messages if message.rids]
    assert sorted(message.rids) == [f"request-{room}" for room in rooms]
    assert all(isinstance(req.finished_reason, FINISH_ABORT) for req in reqs)
    assert all("decode is gone" in reason["message"] for reason in message.finished_reasons)
    loop.schedulers[0].assert_nothing_held()


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
    loop.wire.prefill[0].manager.rooms.lose_decode([7002], "decode is gone")
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
    loop.wire.prefill[0].manager.rooms.lose_decode(rooms, "decode is gone")
    loop.ranks.rank.number = 0
    _, failed = loop.schedulers[0].disagg_prefill_bootstrap_queue.pop_bootstrapped(True)
    assert len(failed) == 5 and [len(message.rids) for message in messages if message.rids] == [5]
