"""An abort is for one request, whatever others are called, where both workers of a pair go by that."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import nixl_world as nixl_wire
import numpy as np
import pytest
import zmq
from decode_world import aborted
from overlapped_loop import Loop, LoopEnds
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as schedulers
from sglang.srt.managers import scheduler_abort_mixin
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

READY = KVPoll.WaitingForInput, KVPoll.Transferring


@pytest.mark.parametrize("flag, capable, ended", [(False, False, "5 50"), (True, True, "5"), (True, False, "5 50")])
@pytest.mark.parametrize("in_transfer", [False, True])
def test_decode_spares_what_its_prefill_spares(flag: bool, capable: bool, ended: str, in_transfer: bool):
    """Without the flag, or beside a bare prefill, it is as in the engine."""
    loop = Loop(flag=flag, size=64, page_size=4, reserved=0, max_reqs=4)
    loop.scheduler.longest_rid = 2

    def between() -> None:
        if loop.iterations == 1:
            for rid in ("5", "50"):
                decode_req = loop.arrive([len(rid), 2, 1, 1, 2, 2, 1, 2], max_new=4)
                decode_req.req.rid, decode_req.kv_receiver.peer_takes_prefix = rid, capable
                if in_transfer:
                    loop.handshake(decode_req)
        if loop.iterations == 4:
            queue = loop.transfer.queue if in_transfer else loop.queue.queue
            assert [dr.req.rid for dr in queue] == ["5", "50"]
            loop.scheduler.abort_request(AbortReq(rid="5"))
            assert [dr.req.rid for dr in queue] == ["5", "50"]
        if loop.iterations == 8:
            raise LoopEnds

    loop.run(between)
    assert [req.rid for req in loop.told if aborted(req)] == ended.split()


def test_decode_spares_what_prefill_has_done_with():
    """Whatever that prefill goes by."""
    loop = Loop(size=64, page_size=4, reserved=0, max_reqs=4)
    loop.scheduler.longest_rid = 2

    def between() -> None:
        if loop.iterations == 1:
            for rid in ("5", "50"):
                decode_req = loop.arrive([len(rid), 2, 1, 1, 2, 2, 1, 2], max_new=6)
                decode_req.req.rid, decode_req.kv_receiver.peer_takes_prefix = rid, False
                loop.handshake(decode_req)
        if loop.iterations == 3:
            for decode_req in loop.asked:
                loop.complete(decode_req)
        if loop.iterations == 6:
            assert [req.rid for req in loop.running] == ["5", "50"]
            loop.scheduler.abort_request(AbortReq(rid="5"))
        if loop.iterations == 16:
            raise LoopEnds

    loop.run(between)
    assert {req.rid: aborted(req) for req in loop.told} == {"5": True, "50": False}


def asks(loop: PrefillLoop, room: int, flag: bool) -> None:
    """Decode's request for KV, of a worker with the flag or without; its pages begin with that of the room."""
    wire = loop.not_asked
    assert wire is not None
    if not flag:
        wire.prefix_len = None
    wire.start_decode()
    pages = np.arange(room, room + 10, dtype=np.int32)
    wire.ask(kv_indices=pages, decode_prefix_len=0 if flag else None)
    for sender in wire.senders:
        nixl_wire.until(lambda sender=sender: sender.poll() in READY, "asked", sender.poll)


def abort_first(loop: PrefillLoop) -> None:
    """Play 14 turns, in the first of which each rank is told to abort "request-5"."""
    turns = dict.fromkeys(range(len(loop.schedulers)), 0)

    def before(scheduler: Any) -> None:
        turns[scheduler.tp_rank] += 1
        scheduler.longest_rid = len("request-50")
        if turns[scheduler.tp_rank] == 1:
            scheduler.abort_request(AbortReq(rid="request-5"))

    loop.before = before
    loop.run(14)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("flag", [False, True])
def test_prefill_spares_what_a_decode_worker_with_the_flag_has_asked_for(monkeypatch, ranks: int, flag: bool):
    """One without the flag has given the pages of both away."""
    loop = PrefillLoop(monkeypatch, ranks)
    for room in (5, 50):
        loop.arrive(40, room, asked=False)
        asks(loop, room, flag)
    abort_first(loop)
    for scheduler in loop.schedulers:
        ended = {req.rid: req.finished_reason.to_json()["type"] == "abort" for req, _ in scheduler.told}
        assert ended["request-5"] and ended.get("request-50", False) is not flag
        assert not scheduler.waiting_queue and not scheduler.disagg_prefill_bootstrap_queue.queue


@pytest.mark.parametrize("heard", [False, True])
def test_prefill_spares_what_nobody_has_asked_for_where_a_decode_worker_with_the_flag_has_spoken(monkeypatch, heard):
    """To one rank of two: they do alike."""
    loop = PrefillLoop(monkeypatch, 2)
    for room in (5, 50):
        loop.arrive(40, room, asked=False)
    if heard:
        loop.schedulers[1].kv_manager().rooms.has_met_flag = True
    abort_first(loop)
    left = ["request-50"] if heard else []
    for scheduler in loop.schedulers:
        assert [req.rid for req in scheduler.disagg_prefill_bootstrap_queue.queue] == left


@pytest.mark.parametrize("heard", [False, True])
def test_pipeline_stages_spare_what_the_first_spares(monkeypatch, heard: bool):
    """They hear of decode at different times; the message goes from one to the next."""
    loop = PrefillLoop(monkeypatch, 1)
    for room in (5, 50):
        loop.arrive(40, room, asked=False)
    message, turns = AbortReq(rid="request-5"), 0

    def before(scheduler: Any) -> None:
        nonlocal turns
        turns += 1
        scheduler.longest_rid, scheduler.pp_size, scheduler.pp_rank = len("request-50"), 2, turns - 1
        if turns == 1:
            if heard:
                scheduler.kv_manager().rooms.has_met_flag = True
            spared = scheduler_abort_mixin._spared_by_prefill(scheduler, message)
            assert [req.rid for req in spared] == ["request-50"] * heard
            # The next stage has not heard of it, or has.
            scheduler.kv_manager().rooms = Rooms()
            scheduler.kv_manager().rooms.has_met_flag = True
        elif turns == 2:
            spared = scheduler_abort_mixin._spared_by_prefill(scheduler, message)
            assert [req.rid for req in spared] == ["request-50"] * heard
            spared = scheduler_abort_mixin._spared_by_prefill(scheduler, AbortReq(rid="request-5"))
            assert [req.rid for req in spared] == ["request-50"]
        scheduler.pp_size, scheduler.pp_rank = 1, 0

    loop.before = before
    loop.run(6)
    assert turns > 2


def test_each_dp_rank_of_a_later_stage_reads_what_its_own_first_stage_has_spared(monkeypatch):
    """The engine has its control messages from the first rank of the stage, whose requests are others."""
    sent: dict[Any, bytes] = {}

    def broadcast(said: Any, rank: int, group: Any, src: int) -> Any:
        if rank == src:
            sent[group] = pickle.dumps(said)
        return pickle.loads(sent[group])

    def from_stage_before(data: list, rank: int, group: Any, src: int, dst: int) -> Any:
        return pickle.loads(sent[src])

    monkeypatch.setattr(schedulers, "unwrap_shm_features", lambda received: received)
    monkeypatch.setattr(schedulers, "broadcast_pyobj", broadcast)
    monkeypatch.setattr(schedulers, "point_to_point_pyobj", from_stage_before)

    def receives(stage: int, dp: int, messages: list) -> list:
        def recv(flags: int) -> Any:
            if not messages:
                raise zmq.ZMQError
            return messages.pop(0)

        rank = cast(Any, object.__new__(Scheduler))
        rank.disaggregation_mode, rank.pp_rank, rank.pp_size = DisaggregationMode.PREFILL, stage, 2
        rank.attn_dp_rank, rank.tp_size, rank.attn_tp_size, rank.attn_cp_size = dp, 2, 1, 1
        rank.attn_tp_rank = rank.attn_cp_rank = 0
        rank.tp_group, rank.tp_cpu_group = SimpleNamespace(rank=dp, ranks=[0, 1]), ("stage", stage)
        rank.world_group = SimpleNamespace(cpu_group=None)
        rank.server_args = SimpleNamespace(enable_dp_attention=True, language_only=False)
        rank.recv_skipper = rank.input_blocker = None
        rank.max_recv_per_poll = -1
        rank.recv_from_tokenizer = None if stage else SimpleNamespace(recv_pyobj=recv)
        rank.recv_from_rpc = SimpleNamespace(recv_pyobj=recv)
        rank.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=None)
        return rank.recv_requests()

    work = object.__new__(TokenizedGenerateReqInput)
    of_first = {0: [work, PauseGenerationReqInput(mode="abort"), AbortReq(rid="5")], 1: [work]}
    order = ["TokenizedGenerateReqInput", "PauseGenerationReqInput", "AbortReq"]
    for stage in range(2):
        for dp in range(2):
            received = receives(stage, dp, of_first[dp])
            assert [type(one).__name__ for one in received] == order, "an abort stays behind what came with it"
            if stage == 0:
                received[-1].spared = {f"5{dp}"}
            assert received[-1].spared == {f"5{dp}"}
            sent[2 * stage + dp] = pickle.dumps(received)
