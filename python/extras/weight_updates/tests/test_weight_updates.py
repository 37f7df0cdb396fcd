"""Weight updates of prefill and decode workers: all ranks do them in the same turn, in the order in which they came."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop
from overlapped_loop import LoopEnds as OverlappedLoopEnds
from prefill_loop import CHUNK, Args, LoopEnds, PrefillLoop, PrefillScheduler
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    AbortReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.utils import broadcast_pyobj
from sglang.utils import TypeBasedDispatcher
from test_flush_together import Rank

# What the tokenizer manager sends: its name, and whether it flushes.
MESSAGES: dict[str, Callable[[bool], Any]] = {
    "disk": lambda flush: UpdateWeightFromDiskReqInput(model_path="", flush_cache=flush),
    "distributed": lambda flush: UpdateWeightsFromDistributedReqInput([], [], [], flush_cache=flush),
    "tensor": lambda flush: UpdateWeightsFromTensorReqInput([], flush_cache=flush),
    "ipc": lambda flush: UpdateWeightsFromIPCReqInput({}, flush_cache=flush),
    "release": lambda flush: ReleaseMemoryOccupationReqInput(tags=["kv_cache"]),
    "resume": lambda flush: ResumeMemoryOccupationReqInput(tags=["kv_cache"]),
}
UPDATES = ["disk", "distributed", "tensor", "ipc"]


# ---- ranks of one stage ----

Script = dict[int, list[tuple[str, bool]]]


def with_dp_attention(rank: int, script: Script, busy: list[dict[int, int]], turns: int) -> list[tuple[int, str]]:
    """What a DP rank does when. script: the messages of each turn. busy: of each rank, what comes when, and its end.

    In each turn messages are sent to all ranks, and they meet before a step, as in the engine.
    """
    scheduler, sent = Rank(), []
    for scheduler.turn in range(turns):
        scheduler.busy_until = max(scheduler.busy_until, busy[rank].get(scheduler.turn, 0))
        messages = [MESSAGES[name](flush) for name, flush in script.get(scheduler.turn, [])] if rank == 0 else []
        messages = broadcast_pyobj(messages, rank, dist.group.WORLD, src=0)
        sent += messages
        scheduler.process_input_requests(messages)
        met = torch.zeros(2, dtype=torch.int64)
        dist.all_gather_into_tensor(met, torch.tensor([scheduler.turn]))
        assert met.tolist() == [scheduler.turn] * 2, "the ranks are in different collectives"
    assert scheduler.answered == sent and not scheduler.postponed_updates
    # Prefill and decode compare their weights anew after each.
    assert scheduler.changes == sum(name in UPDATES for _, name in scheduler.done)
    return scheduler.done


def test_memory_comes_back_after_it_was_taken(pair):
    script = {1: [("release", True), ("resume", True)], 2: [("tensor", False)]}
    done = assert_same(pair.run(with_dp_attention, script, [{}, {0: 4}], 6))
    assert done == [(4, "release"), (4, "resume"), (4, "tensor")]


def with_quarantine(rank: int, name: str) -> list[tuple[int, str]]:
    """What a rank does when, of which pages are in quarantine until turn 5, on rank 1 alone."""
    scheduler = Rank()
    scheduler.disagg_decode_transfer_queue = SimpleNamespace(quarantine=["failed"] if rank else [])
    for scheduler.turn in range(8):
        if scheduler.turn == 5:
            scheduler.disagg_decode_transfer_queue.quarantine.clear()
        scheduler.process_input_requests([MESSAGES[name](True)] if scheduler.turn == 1 else [])
    return scheduler.done


@pytest.mark.parametrize("name, turn", [("release", 5), ("disk", 1)])
def test_memory_that_a_prefill_may_still_write_to_is_not_taken_away(pair, name, turn):
    """An update flushes around it. Where memory is taken away, tables are read that have gone with it."""
    assert assert_same(pair.run(with_quarantine, name)) == [(turn, name)]


messages = st.lists(st.tuples(st.sampled_from(UPDATES), st.booleans()), min_size=1, max_size=3)
lives = st.dictionaries(st.integers(0, 14), st.integers(1, 18), max_size=3)


def test_ranks_update_alike_whatever_they_have_left(pair):
    @given(script=st.dictionaries(st.integers(0, 14), messages, max_size=4), busy=st.tuples(lives, lives))
    @settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
    def play(script, busy):
        done = assert_same(pair.run(with_dp_attention, script, list(busy), 20))
        came = [(turn, name, flush) for turn in sorted(script) for name, flush in script[turn]]
        assert [name for _, name in done] == [name for _, name, _ in came]
        # As soon as may be: at its turn, or when the one before it is done and, if it flushes, no rank has anything.
        now = 0
        for (turn, _, flush), (at, _) in zip(came, done, strict=True):
            now = max(now, turn)
            while flush and any(at_most(rank, now) > now for rank in busy):
                now += 1
            assert at == now

    def at_most(lives: dict[int, int], turn: int) -> int:
        return max((end for begin, end in lives.items() if begin <= turn), default=0)

    play()


# ---- pipeline stages ----


@dataclasses.dataclass
class Work:
    """A request that has been computed. ends: for each stage, the turn from which its transfer has ended.

    Stages agree on that. written: for each, the turn in which it has also ended what only it knows of, as writes to a
    hierarchical cache.
    """

    rid: str
    ends: tuple[int, int]
    written: tuple[int, int] = (0, 0)


@cache
def groups_of_stages() -> tuple[dist.ProcessGroup, list[dist.ProcessGroup]]:
    """That of all stages, and that of each one. Made by all ranks, once in a process."""
    return dist.new_group([0, 1]), [dist.new_group([stage]) for stage in range(2)]


class Stage(Rank):
    """A stage of a prefill, in the engine's own loop, that computes nothing: requests wait for their transfers."""

    def __init__(self, stage: int, script: dict[int, list[Any]], turns: int, depth: int):
        super().__init__(DisaggregationMode.PREFILL)
        all_stages, each = groups_of_stages()
        self.script, self.turns, self.turn = script, turns, -1
        self.pp_rank, self.pp_size, self.tp_size, self.attn_tp_size, self.attn_cp_size = stage, 2, 1, 1, 1
        self.attn_tp_rank = self.attn_cp_rank = self.attn_dp_rank = 0
        self.world_group = SimpleNamespace(cpu_group=all_stages)
        self.tp_cpu_group = self.attn_tp_cpu_group = self.attn_cp_cpu_group = each[stage]
        self.pp_group = SimpleNamespace(is_first_rank=stage == 0, is_last_rank=stage == 1)
        self.server_args = cast(Any, Args(pp_async_batch_depth=depth))
        set_global_server_args_for_scheduler(self.server_args)
        self.recv_skipper, self.input_blocker, self.max_recv_per_poll = None, None, -1
        self.recv_from_tokenizer = SimpleNamespace(recv_pyobj=self._receive) if stage == 0 else None
        self.recv_from_rpc = SimpleNamespace(recv_pyobj=self._receive_nothing) if stage == 0 else None
        self.disagg_prefill_inflight_queue: list[Any] = []
        self._request_dispatcher += TypeBasedDispatcher([(Work, self._take)])

    def _receive(self, flags: int) -> Any:
        if not self.script.get(self.turn):
            raise zmq.ZMQError
        return self.script[self.turn].pop(0)

    def _receive_nothing(self, flags: int) -> None:
        raise zmq.ZMQError

    def _take(self, work: Work) -> None:
        poll = lambda: KVPoll.Success if self.turn >= work.ends[self.pp_rank] else KVPoll.Transferring  # noqa: E731
        req = SimpleNamespace(rid=work.rid, disagg_kv_sender=SimpleNamespace(poll=poll))
        self.disagg_prefill_inflight_queue.append(req)
        self.busy_until = max(self.busy_until, work.written[self.pp_rank])

    def recv_requests(self) -> list:
        if self.turn + 1 == self.turns:
            raise LoopEnds
        self.turn += 1
        return super().recv_requests()

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return super().is_fully_idle() and not self.disagg_prefill_inflight_queue

    def self_check_during_idle(self) -> None:
        pass

    def process_prefill_chunk(self) -> None:
        pass

    def get_new_batch_prefill(self) -> None:
        pass

    def maybe_prepare_mlp_sync_batch(self, batch: None) -> None:
        pass

    def process_bootstrapped_queue(self, bootstrapped_rids: Any) -> Any:
        return bootstrapped_rids

    def process_disagg_prefill_inflight_queue(self, rids: list[str]) -> None:
        queue = self.disagg_prefill_inflight_queue
        self.disagg_prefill_inflight_queue = [req for req in queue if req.rid not in rids]


def pipeline(
    stage: int, updates: Script, work: dict[int, list[tuple[tuple[int, int], ...]]], turns: int, depth: int
) -> list[tuple[int, str]]:
    """What a stage does when. updates: the messages of each turn. work: what comes in each, as in `Work`."""
    script: dict[int, list[Any]] = {}
    for turn, ends in work.items():
        script[turn] = [Work(f"{turn}-{i}", *one) for i, one in enumerate(ends)]
    for turn, messages in updates.items():
        script.setdefault(turn, []).extend(MESSAGES[name](flush) for name, flush in messages)
    sent = [message for turn in sorted(script) for message in script[turn] if not isinstance(message, Work)]
    scheduler = Stage(stage, script, turns - stage, depth)
    try:
        scheduler.event_loop_pp_disagg_prefill()
    except LoopEnds:
        if stage == 1:
            # What the stage before it has sent in a turn more, in which it passes on what ends this stage's last turn.
            for _ in range(3):
                scheduler._pp_recv_pyobj_from_prev_stage()
        dist.barrier()
    assert not scheduler.postponed_updates and not scheduler.disagg_prefill_inflight_queue
    assert stage or scheduler.answered == sent
    return scheduler.done


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("ends, written", [((8, 5), (0, 0)), ((3, 3), (5, 12)), ((3, 3), (12, 5))])
def test_stages_update_when_the_last_of_them_is_idle(pair, ends, written, depth):
    """The first would answer, and new requests come, before the second is idle for a turn."""
    script: Script = {2: [("tensor", True)]}
    ((turn, name),) = assert_same(pair.run(pipeline, script, {1: [(ends, written)]}, 40, depth))
    over = max(*ends, *written)
    # No later than two votes, and the turns until all stages have heard that the request has ended.
    assert name == "tensor" and over <= turn <= over + 4 * (2 + depth)


def test_a_request_that_comes_while_stages_vote_is_waited_for(pair):
    for late in range(3, 9):
        work = {1: [((3, 3),)], late: [((20, 25),)]}
        done = assert_same(pair.run(pipeline, {2: [("disk", True), ("ipc", False), ("disk", True)]}, work, 50, 1))
        assert [name for _, name in done] == ["disk", "ipc", "disk"]
        # All before it, or all after it.
        assert len({turn < late or turn > 25 for turn, _ in done[:2]}) == 1


def test_stages_update_alike_whatever_is_under_way(pair):
    when = st.integers(0, 20)
    twice = st.tuples(when, when)
    of_turn = st.lists(st.tuples(twice, twice), max_size=2)

    @given(
        updates=st.dictionaries(when, messages, max_size=3),
        work=st.dictionaries(when, of_turn, max_size=4),
        depth=st.integers(0, 2),
    )
    @settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
    def play(updates, work, depth):
        done = assert_same(pair.run(pipeline, updates, work, 60, depth))
        assert [name for _, name in done] == [name for turn in sorted(updates) for name, _ in updates[turn]]

    play()


# ---- what is left, and what is not ----


@pytest.mark.parametrize("overlap", [True, False])
def test_prefill_does_not_wait_for_requests_that_it_has_not_begun(monkeypatch, overlap):
    """They wait for decode, which may be paused until prefill has its weights, and hold nothing that is flushed."""
    loop = PrefillLoop(monkeypatch, overlap=overlap)
    (scheduler,) = loop.schedulers
    # How many steps there had been at the update, and what it was answered at first.
    updated: list[int] = []
    answers: list[Any] = []

    def update(_: Any) -> tuple[bool, str]:
        updated.append(len(scheduler.steps))
        return True, ""

    def before(scheduler: PrefillScheduler) -> None:
        if not loop.reqs:
            loop.arrive(3 * CHUNK, 7)
            loop.arrive(3 * CHUNK, 8, asked=False)
        elif scheduler.steps and not answers:
            answers.append(scheduler.update_weights_from_disk(MESSAGES["disk"](True)))
        elif updated and loop.not_asked is not None:
            assert scheduler.tree_cache.evictable_size() == 0, "it has not been flushed"
            loop.ask(loop.not_asked)
            loop.not_asked = None

    scheduler.tp_worker = SimpleNamespace(update_weights_from_disk=update)
    loop.before = before
    loop.run(60)
    # The one that had begun goes to its end; the other is served after the update.
    assert answers == [None] and updated == [3]
    assert [req.rid for req, _ in scheduler.told] == ["request-7", "request-8"] and len(scheduler.steps) == 6
    scheduler.assert_nothing_held()


def test_prefill_does_not_wait_for_what_is_fetched_for_requests_that_it_has_not_begun(monkeypatch):
    """With a storage below its tree; such a fetch counts until its request is scheduled, or aborted."""
    loop = PrefillLoop(monkeypatch)
    (scheduler,) = loop.schedulers
    tree = scheduler.tree_cache
    scheduler.enable_hierarchical_cache = True
    tree.ongoing_write_through, tree.ongoing_load_back, tree.ongoing_backup = {}, {}, {}
    tree.check_hicache_events, tree.enable_storage = lambda: None, True
    tree.ongoing_prefetch = {"request-8": object()}
    tree.release_aborted_request = lambda rid: tree.ongoing_prefetch.pop(rid, None)
    scheduler.tp_worker = SimpleNamespace(update_weights_from_disk=lambda _: (True, ""))
    loop.arrive(CHUNK, 8, asked=False)
    assert scheduler.update_weights_from_disk(MESSAGES["disk"](True)) is not None
    assert not tree.ongoing_prefetch and len(scheduler.disagg_prefill_bootstrap_queue.queue) == 1


def test_memory_is_not_taken_from_requests_that_prefill_has_not_begun(monkeypatch):
    loop = PrefillLoop(monkeypatch)
    (scheduler,) = loop.schedulers
    loop.arrive(CHUNK, 8, asked=False)
    assert scheduler.release_memory_occupation(MESSAGES["release"](True)) is None
    assert scheduler.resume_memory_occupation(MESSAGES["resume"](True)) is None
    assert len(scheduler.postponed_updates) == 2


def test_an_update_waits_for_retracted_requests():
    """A pause sends them back; they hold no pages, and would go on with other weights than those of their KV."""
    loop = Loop(size=64, page_size=4)
    made: list[Any] = []
    asked_for: list[Any] = []

    def between() -> None:
        if not made:
            made.append(loop.arrive([1] * 9, max_new=6))
            loop.handshake(made[0])
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.running and not asked_for:
            loop.scheduler.pause_generation(SimpleNamespace(mode="retract"))
            assert loop.queue.retracted_queue and not loop.running
            asked_for.append(loop.ask_for_update())
            assert loop.weights == 1
        if loop.updated:
            raise OverlappedLoopEnds
        assert loop.iterations < 50, "the update does not come to an end"

    loop.run(between)
    assert loop.updated == asked_for and loop.told == [made[0].req]


@pytest.mark.parametrize("name", [*MESSAGES])
def test_an_aggregated_worker_is_the_engine(name, monkeypatch):
    """It does what it is told when it is told, and meets nobody: no group is known here."""
    scheduler = Rank(DisaggregationMode.NULL)
    scheduler.tp_cpu_group = None
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "all_reduce", None)
    scheduler.offload_tags = {"kv_cache"}
    scheduler.process_input_requests([MESSAGES[name](True), MESSAGES[name](True)][: 2 - (name == "resume")])
    assert [what for _, what in scheduler.done] == [name] * (2 - (name == "resume"))
    scheduler.busy_until = 9
    if name in UPDATES:
        scheduler.process_input_requests([MESSAGES[name](False)])
        with pytest.raises(AssertionError, match="flush failed"):
            scheduler.process_input_requests([MESSAGES[name](True)])


@pytest.mark.parametrize("left", ["running", "in transfer", "aborted"])
def test_a_weight_update_waits_for_what_clients_have_left_behind(left: str):
    """The tokenizer manager takes a client that has gone for one that was answered; the engine then ends."""
    loop = Loop(size=64, page_size=4)
    made: list[DecodeRequest] = []

    def between() -> None:
        if not made:
            made.append(loop.arrive([1] * 9, max_new=6))
            loop.handshake(made[0])
            return
        if loop.iterations == 40:
            raise OverlappedLoopEnds
        (decode_req,) = made
        if loop.asked and (left != "in transfer" or loop.iterations > 20):
            loop.complete(decode_req)
        there = loop.asked if left == "in transfer" else loop.running
        if there and loop.weights == 1 and not asked_for:
            if left == "aborted":
                loop.scheduler.abort_request(AbortReq(rid=decode_req.req.rid))
            asked_for.append(loop.ask_for_update())
            assert not loop.updated and loop.weights == 1

    asked_for: list[Any] = []
    loop.run(between)
    assert loop.updated == asked_for and loop.weights == 2 and loop.told == [made[0].req]
    # At once when there is nobody.
    loop.ask_for_update()
    assert len(loop.updated) == 2 and loop.weights == 3
