"""One test for each way in which decode-side reuse is known to have gone wrong: rows of a list of traps met by this
engine and its peers. A row that cannot be shown without servers, or is shown better elsewhere, says so in ELSEWHERE.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from decode_world import Receiver, World, aborted, kv_of
from engine_classes import args_of, engine_class
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_receiver import DeltaReceiver, ReceiverState
from sglang.srt.disaggregation.common.prefill_peers import UNKNOWN
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, TransferInfo, TransferStatus
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import decode_radix_cache, radix_cache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

ROWS = [*range(1, 22), 26, 27, 30, 31, 32, 33]

SAMPLES = "../../../python/extras/samples/tests/test_samples.py"
HYBRID = "../../../python/extras/hybrid/tests/test_hybrid_traps.py"
# Rows without a test of their own here: why, and the test (file::name) that has them if there is one.
ELSEWHERE = {
    20: "needs both ends of the wire: test_nixl_wire.py::test_an_abort_after_decode_asked_is_told",
    21: "needs the same: ../../../python/extras/staging/tests/test_staged_pieces.py::"
    "test_trap_21_pieces_land_where_they_belong_behind_a_prefix",
    30: f"is both tokenizer managers' affair: {SAMPLES}::test_prefill_that_is_told_later_gives_its_warmup_up, "
    f"{SAMPLES}::test_decode_asks_for_nothing_before_prefill_knows, "
    "extras/samples/tests/e2e/test_parallel_sampling.py::test_samples_are_as_requests_of_their_own_and_kv_comes_once",
    31: "is row 2, and what the engine's kit checks: e2e/test_kits.py::test_cache_hit",
    32: f"is of states: {HYBRID}::test_trap_32_requests_wait_for_a_state_slot",
    33: f"is of windows: {HYBRID}::test_trap_33_what_is_in_the_tree_has_no_window",
}

PAGE = 4


def tokens(start: int, n: int) -> list[int]:
    """A prompt that shares no prefix with one of another ``start``; a token fits a byte, for `kv_of`."""
    return [1 + (start * 31 + i * 7) % 250 for i in range(n)]


def serve(world: World, prompt: list[int], **options: Any) -> DecodeRequest:
    """Bring a request to where it runs."""
    decode_req = world.arrive(prompt, **options)
    world.handshake(decode_req)
    world.step()
    assert decode_req.kv_receiver.asked
    world.complete(decode_req)
    assert decode_req.req in world.step()
    world.check()
    return decode_req


def serve_to_end(world: World, prompt: list[int], **options: Any) -> Req:
    """A request from its arrival to its end; its prompt is in the tree then."""
    req = serve(world, prompt, **options).req
    world.finish(req)
    world.check()
    return req


def snapshot(world: World) -> list[tuple]:
    """All that a match changes of the tree: nodes, their keys, access times, locks and counts of hits."""
    return sorted(
        (node.id, tuple(node.key.token_ids), node.last_access_time, node.lock_ref, node.hit_count)
        for node in [*world._nodes(), world.tree.root_node]
    )


def prebuilt_batch(world: World, req: Req) -> ScheduleBatch:
    """The engine's own prebuilt batch of a request that waits."""
    args = world.scheduler.server_args
    args.enable_deterministic_inference = args.enable_custom_logit_processor = False
    batch = ScheduleBatch.init_new(
        [req],
        world.pool,
        world.allocator,
        world.tree,
        SimpleNamespace(vocab_size=256, is_encoder_decoder=False),
        False,
        world.scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    return batch


def to_prebuilt(world: World, prompt: list[int], prefill_hit: int = 0) -> tuple[Req, ScheduleBatch]:
    """Bring a request to the engine's prebuilt batch, instead of the stand-in for it in `World.step`."""
    decode_req = world.arrive(prompt)
    world.handshake(decode_req)
    world.step()
    world.complete(decode_req)
    world.meta.cached_tokens[decode_req.kv_receiver.aux_index, 0] = prefill_hit
    world.meta.cached_tokens[decode_req.kv_receiver.aux_index, 1] = prefill_hit
    (req,) = world.transfer.pop_transferred()
    req.init_next_round_input(world.tree)
    return req, prebuilt_batch(world, req)


# ---- core path ----


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_01_the_prebuilt_batch_has_the_slots_of_prefix_and_delta(page_size):
    """With a prefix of its own, decode read the slots of the prompt's start where those of the delta belong.

    The batch itself is never run, so its tokens and slots are left out.
    """
    world, prompt = World(page_size=page_size), tokens(1, 23)
    serve_to_end(world, prompt[:16])
    req, batch = to_prebuilt(world, prompt)
    assert req.decode_prefix_len == 16
    slots = world.pool.req_to_token[req.req_pool_idx, :23].tolist()
    assert len(set(slots)) == 23 and len(req.fill_ids) == 24
    assert batch.seq_lens.tolist() == [23] and batch.prefix_lens == [0] and batch.extend_lens == [1]
    for n, slot in enumerate(slots):
        assert int(world.kv.k_buffer[0][slot]) == kv_of(prompt[: n + 1], world.weights)


@pytest.mark.parametrize("prefill_hit", [20, 16, 8, 0])
def test_trap_02_prefills_hit_and_decodes_are_not_added(prefill_hit):
    """The answer said that more tokens came from a cache than the prompt has, or that decode had held none."""
    world, prompt = World(), tokens(1, 23)
    serve_to_end(world, prompt[:16])
    req, _ = to_prebuilt(world, prompt, prefill_hit=prefill_hit)
    assert req.cached_tokens == max(prefill_hit, 16) <= len(prompt)


@pytest.mark.parametrize("lost", ["nothing", "the tail", "everything"])
def test_trap_03_a_retracted_request_comes_back(lost):
    """Retraction forgot the node that the request held, resuming took one for granted, and the scheduler died."""
    world, prompt = World(size=96), tokens(1, 22)
    serve_to_end(world, prompt[:12])
    req = serve(world, prompt, max_new=12).req
    world.decode()
    world.decode()
    world.retract(req)
    assert req.last_node is None
    world.check()
    if lost == "the tail":
        world.tree.evict_shortfall(PAGE)
    elif lost == "everything":
        world.tree.evict(EvictParams(num_tokens=1000))
        assert world.tree.evictable_size() == 0
    held = {"nothing": 20, "the tail": 16, "everything": 0}[lost]
    assert req in world.step()
    assert req.decode_prefix_len == held and req.last_node is not None
    world.check()
    for _ in range(12):
        world.decode()
        world.check()
    assert not world.running and world.tree.protected_size() == 0


def test_a_retracted_request_waits_for_a_row_as_for_memory():
    world = World(size=96, max_reqs=2)
    first, second = (serve(world, tokens(n, 9), max_new=4).req for n in (1, 2))
    world.retract(second)
    rows, world.pool.free_slots = world.pool.free_slots, []
    for _ in range(3):
        assert world.step() == [] and world.queue.retracted_queue == [second] and second.finished_reason is None
    world.pool.free_slots = rows
    assert world.step() == [second] and world.running == [first, second]
    world.check()


def test_trap_04_a_dense_model_waits_for_no_state():
    """Every request of a model without state hung: the test for state was an empty list, and that announced some."""
    world, asked = World(), []
    decode_req = world.arrive(tokens(1, 9))
    send = decode_req.kv_receiver.send_metadata
    decode_req.kv_receiver.send_metadata = lambda pages, aux, states, **rest: (
        asked.append(states) or send(pages, aux, states, **rest)
    )
    world.handshake(decode_req)
    world.step()
    assert asked == [None]
    receiver = bare_receiver()
    receiver.send_metadata(np.array([1], np.int32), 0, asked[0], decode_prefix_len=0)
    status = receiver.kv_mgr.transfer_statuses[receiver.bootstrap_room]
    heard(status, "p", kv=True, aux=True)
    assert status.is_done()


def bare_receiver() -> NixlKVReceiver:
    """A receiver of NIXL whose messages go nowhere."""
    receiver = object.__new__(NixlKVReceiver)
    receiver.state = ReceiverState()
    receiver.kv_mgr = SimpleNamespace(
        local_ip="10.0.0.1",
        rank_port=77,
        agent=SimpleNamespace(name="decode"),
        transfer_statuses={7: TransferStatus()},
        request_status={7: KVPoll.WaitingForInput},
        required_prefill_response_num_table={},
        addr_to_rooms_tracker={"prefill": {7}},
        waiting_timeout=100,
        prefills=SimpleNamespace(of=lambda addr: UNKNOWN),
        failure_records={},
        rooms=Rooms(),
    )
    manager = receiver.kv_mgr
    manager.check_status = manager.request_status.__getitem__
    manager.update_transfer_status = lambda: None
    manager.check_transfer_done = lambda room: manager.transfer_statuses[room].is_done()
    receiver.bootstrap_room, receiver.bootstrap_addr, receiver.conclude_state = 7, "prefill", None
    receiver.required_dst_info_num = receiver.required_prefill_response_num = 1
    receiver.bootstrap_infos = [{"rank_ip": "10.0.0.2", "rank_port": 5, "is_dummy": False}]
    socket = SimpleNamespace(send_multipart=lambda frames: None)
    receiver._connect_to_bootstrap_server = lambda info: (socket, threading.Lock())
    return receiver


def heard(status: TransferStatus, agent: str, kv: bool = False, aux: bool = False, state: bool = False) -> None:
    if kv:
        status.chunks.setdefault(agent, set()).add(0)
        status.num_chunks[agent] = 1
    if aux:
        status.aux_from.add(agent)
    if state:
        status.state_from.add(agent)


@pytest.mark.parametrize("state_pool", [True, False])
def test_trap_05_models_whose_state_is_not_known_are_refused_at_the_start(monkeypatch, state_pool):
    """Another tree than the engine's for KV alone, or an ordinary one beside a pool that has state to send."""

    class MambaRadixCache(RadixCache):
        pass

    def engines(scheduler: Scheduler) -> None:
        scheduler.tree_cache = object.__new__(RadixCache if state_pool else MambaRadixCache)
        scheduler.tree_cache.disable = False

    class Pool:
        pass

    if state_pool:
        Pool.get_state_buf_infos = lambda self: None
    monkeypatch.setattr(engine_class(Scheduler), "init_cache_with_memory_pool", engines)
    scheduler = object.__new__(Scheduler)
    scheduler.server_args = args_of(disaggregation_decode_enable_radix_cache=True)
    runner = SimpleNamespace(mambaish_config=None, is_hybrid_swa=False, token_to_kv_pool=Pool())
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)
    named = r"state \(Pool\)" if state_pool else "MambaRadixCache "
    with pytest.raises(ValueError, match=f"{named}.*Start this decode worker without the flag"):
        scheduler.init_cache_with_memory_pool()
    scheduler.server_args.disaggregation_decode_enable_radix_cache = False
    scheduler.init_cache_with_memory_pool()


@pytest.mark.parametrize("agents", [["p"], ["p", "q"]])
def test_trap_06_a_transfer_is_done_when_every_part_of_every_sender_is_here(agents):
    """Silent corruption: the transfer was called done before all parts of the state had come."""
    parts = [(agent, part) for agent in agents for part in ("kv", "aux", "state")]
    for missing in [None, *parts]:
        status = TransferStatus(num_expected=len(agents), expects_state=True)
        for agent, part in parts:
            if (agent, part) != missing:
                heard(status, agent, **{part: True})
        assert status.is_done() == (missing is None), missing
    # Announced is not arrived.
    status = TransferStatus()
    heard(status, "p", kv=True, aux=True)
    status.num_chunks["p"] = 2
    assert not status.is_done()


def test_trap_07_a_dummy_rank_is_one_that_says_so():
    """Empty page lists meant a dummy rank until there were full hits, which have them too."""

    def info(pages: list[int], *more: bytes) -> TransferInfo:
        indices = np.array(pages, np.int32).tobytes()
        return TransferInfo.from_zmq([b"7", b"ip", b"1", b"agent", indices, b"0", b"1", b"", *more])

    assert not info([], b"8", b"0").is_dummy(), "a full hit"
    assert info([], b"8", b"1").is_dummy()
    assert not info([3], b"4", b"0").is_dummy()
    # As the engine has it, from a decode worker that names no prefix.
    assert info([]).is_dummy() and not info([3]).is_dummy()


class Prefill(SchedulerDisaggregationPrefillMixin):
    """A prefill scheduler as far as sending chunks goes; ``sent`` has (pages, last) as its sender got them."""

    pp_size = 1

    def __init__(self, prompt_len: int, prefix_len: int) -> None:
        self.sent: list[tuple[list[int], bool]] = []
        self.states: list[tuple[list[int], Any]] = []
        self.metadata_set = 0
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=PAGE, get_kvcache=lambda: None)
        table = torch.arange(0, 64, dtype=torch.int32).reshape(1, -1)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=self._set_buf)
        self.left = -(-prompt_len // PAGE) - prefix_len // PAGE
        self.req = SimpleNamespace(
            origin_input_ids=list(range(prompt_len)),
            fill_ids=[],
            start_send_idx=prefix_len,
            req_pool_idx=0,
            mamba_pool_idx=None,
            rid="r",
            bootstrap_room=7,
            disagg_kv_sender=SimpleNamespace(send=self._send),
        )

    def _set_buf(self, req: Any) -> None:
        self.metadata_set += 1

    def _send(self, pages: np.ndarray, states: Any) -> None:
        # So does the engine's sender tell the last chunk.
        self.left -= len(pages)
        self.sent.append((pages.tolist(), self.left == 0))
        self.states.append((pages.tolist(), None if states is None else [int(state) for state in states]))

    def prefill(self, chunk: int) -> None:
        prompt_len = len(self.req.origin_input_ids)
        for end in [*range(chunk, prompt_len, chunk), prompt_len]:
            self.req.fill_ids = list(range(end))
            self.send_kv_chunk(self.req, last_chunk=end == prompt_len)


@pytest.mark.parametrize("chunk", [3, 4, 8, 64])
@pytest.mark.parametrize("prompt_len", [1, 16, 22])
def test_trap_08_only_the_last_chunk_ends_a_transfer(chunk, prompt_len):
    """A chunk of no pages ended the transfer early: as many as were to come, none, had been sent."""
    for prefix_len in range(0, prompt_len + 1, PAGE):
        prefill = Prefill(prompt_len, prefix_len)
        prefill.prefill(chunk)
        pages_sent = [page for pages, _ in prefill.sent for page in pages]
        assert pages_sent == list(range(prefix_len // PAGE, -(-prompt_len // PAGE))), prefix_len
        assert [last for _, last in prefill.sent] == [False] * (len(prefill.sent) - 1) + [True], prefix_len
        assert prefill.metadata_set == 1
        assert all(pages for pages, last in prefill.sent if not last)


def test_trap_09_an_admitted_request_is_not_matched_again():
    """A longer match at the prebuilt batch moved the border of what the tree holds, and finish freed wrong slots."""
    # By prefix, the second would wait for the first.
    world, prompt = World(size=128, options={"disaggregation_decode_admission": "fcfs"}), tokens(1, 24)
    serve_to_end(world, prompt[:8])
    first = world.arrive(prompt)
    world.handshake(first)
    world.step()
    assert first.req.decode_prefix_len == 8
    # Meanwhile the same prompt comes into the tree by another request, which had a copy of its own.
    serve_to_end(world, prompt)
    world.complete(first)
    (req,) = world.transfer.pop_transferred()
    before = (req.last_node, req.cache_protected_len, snapshot(world))
    req.init_next_round_input(world.tree)
    assert (req.last_node, req.cache_protected_len, snapshot(world)) == before
    assert len(req.prefix_indices) == 0
    world.tree.cache_unfinished_req(req)
    world.running.append(req)
    world.check()
    world.decode()
    world.finish(req)
    world.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_10_a_blocked_head_leaves_the_tree_alone(page_size):
    """Each poll matched the head of the queue: what it would use stayed young, and nodes were split for nothing."""
    world, prompt = World(size=64, page_size=page_size), tokens(1, 40)
    serve_to_end(world, prompt[:24])
    running = serve(world, tokens(2, 24), max_new=8).req
    # It would match in the middle of the node.
    head = world.arrive(prompt[:18] + tokens(3, 30))
    world.handshake(head)
    asked: list[int] = []
    descend = world.tree.reader.descend
    world.tree.reader.descend = lambda *args: asked.append(1) or descend(*args)
    before = snapshot(world)
    for _ in range(100):
        world.step()
        assert snapshot(world) == before
    assert not head.kv_receiver.asked
    assert len(asked) <= 1, "the prompt was compared on every poll"
    world.finish(running)
    world.step()
    assert head.kv_receiver.asked and head.req.decode_prefix_len == 18 // page_size * page_size
    world.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_11_only_what_is_short_is_evicted(page_size):
    """One request emptied a full cache."""
    world = World(size=64, page_size=page_size)
    serve_to_end(world, tokens(1, 60))
    free, held = world.allocator.available_size(), world.tree.evictable_size()
    assert free + held == 64 and free < 16
    decode_req = world.arrive(tokens(2, 15))
    world.handshake(decode_req)
    world.step()
    assert decode_req.kv_receiver.asked
    needed = -(-15 // page_size) * page_size
    assert world.tree.evictable_size() == held - (needed - free)
    assert world.tree.peek(tokens(1, 60), None).length == held - (needed - free), "the start of the prompt is kept"
    world.check()


def test_trap_12_a_request_without_a_match_has_a_lock_to_release():
    """A lock was taken only where something matched, and released always: the count fell below zero."""
    world = World(size=128)
    for n, (end, length) in enumerate([("finish", 3), ("finish", 9), ("retract", 9), ("fail", 9)]):
        decode_req = world.arrive(tokens(10 + n, length))
        world.handshake(decode_req)
        world.step()
        assert decode_req.req.decode_prefix_len == 0 and decode_req.req.last_node is world.tree.root_node
        assert world.tree.locks_taken - world.tree.locks_released == 1
        if end == "fail":
            decode_req.kv_receiver.abort()
            decode_req.kv_receiver.quiet = True
            world.step()
            world.step()
            assert aborted(decode_req.req)
        else:
            world.complete(decode_req)
            world.step()
            world.check()
            getattr(world, end)(decode_req.req)
        assert world.tree.root_node.lock_ref == 1
        assert all(node.lock_ref == 0 for node in world._nodes()) and world.tree.protected_size() == 0
        world.check()
        world.queue.retracted_queue.clear()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_13_a_warm_up_leaves_nothing_in_the_tree(page_size):
    """Warm-up and health-check requests left KV in the tree that nobody ever computed."""
    world, prompt = World(page_size=page_size), tokens(1, 16)
    req = serve(world, prompt, warmup=True).req
    assert not list(world._nodes())
    world.decode()
    world.finish(req)
    assert not list(world._nodes()) and world.allocator.available_size() == world.size
    world.check()
    # Nor is it served from what others left.
    serve_to_end(world, prompt)
    warm_up = serve(world, prompt, warmup=True).req
    assert warm_up.decode_prefix_len == 0
    world.finish(warm_up)
    world.check()


def test_trap_14_requests_of_different_keys_share_nothing():
    """Two adapters, or two salts, were served from each other's KV: the key was not part of the match."""
    world, prompt = World(size=128), tokens(1, 16)
    for key in (None, "a", "b"):
        assert serve_to_end(world, prompt, extra_key=key).decode_prefix_len == 0
    for key in (None, "a", "b"):
        assert serve_to_end(world, prompt, extra_key=key).decode_prefix_len == 16
    assert len(list(world._nodes())) == 3


def idle_check(world: World) -> int:
    """Let the engine's idle scheduler look for leaks; how often it came to looking. Fails where it would report one."""
    looked: list[int] = []
    scheduler = object.__new__(Scheduler)

    def look() -> None:
        looked.append(1)
        tree = world.tree.evictable_size() + world.tree.protected_size()
        assert world.allocator.available_size() + tree == world.size, "the idle check reports a leak"

    scheduler.__dict__.update(
        enable_hisparse=False,
        disaggregation_mode=DisaggregationMode.DECODE,
        waiting_queue=world.waiting,
        disagg_decode_transfer_queue=world.transfer,
        disagg_decode_prealloc_queue=world.queue,
        server_args=SimpleNamespace(disaggregation_decode_enable_offload_kvcache=False),
        tree_cache=world.tree,
        recv_from_tokenizer=None,
        enable_kv_cache_events=False,
        check_memory=look,
        check_tree_cache=lambda: None,
        init_new_token_ratio=0,
        maybe_sleep_on_idle=lambda: None,
    )
    scheduler.self_check_during_idle()
    return len(looked)


def test_trap_15_nothing_is_called_lost_while_transfers_are_under_way():
    """The idle check reported a leak of pages that a transfer was being made to."""
    world = World(size=128)
    assert idle_check(world) == 1
    decode_req = world.arrive(tokens(1, 9))
    assert idle_check(world) == 0, "in the queue"
    world.handshake(decode_req)
    world.step()
    assert idle_check(world) == 0, "in transfer"
    decode_req.kv_receiver.abort()
    world.step()
    assert aborted(decode_req.req) and world.transfer.quarantine
    assert idle_check(world) == 0, "failed, and prefill may still write"
    decode_req.kv_receiver.quiet = True
    world.step()
    assert idle_check(world) == 1
    # A retracted request has its KV on the host and holds nothing.
    world.retract(serve(world, tokens(2, 9)).req)
    assert idle_check(world) == 1


# ---- TP ranks: two processes, each with a world of its own, in lock step ----


class LateReceiver(Receiver):
    """As the real ones do, it reports success only when the metadata is there."""

    once_metadata_landed = DeltaReceiver.once_metadata_landed

    @property
    def kv_mgr(self) -> SimpleNamespace:
        manager = super().kv_mgr
        manager.record_failure = lambda room, reason: None
        return manager

    def _is_overdue(self) -> bool:
        return False

    @property
    def bootstrap_room(self) -> int | None:
        return self.req.bootstrap_room

    def poll(self) -> int:
        return self.once_metadata_landed(self.state)


class Rank:
    """One rank's world and the decisions it took, step by step."""

    def __init__(self, rank: int, size: int = 128, group: Any = None, options: dict | None = None) -> None:
        world = World(size=size, group=group or dist.group.WORLD, options=options)
        self.rank, self.world, self.decisions = rank, world, []

    def arrive(self, prompt: list[int], **options: Any) -> DecodeRequest:
        decode_req = self.world.arrive(prompt, **options)
        decode_req.kv_receiver.__class__ = LateReceiver
        return decode_req

    def step(self) -> None:
        world = self.world
        before = [dr.req for dr in world.transfer.queue]
        ready = world.step()
        admitted = [dr.req for dr in world.transfer.queue if dr.req not in before]
        self.decisions.append(
            (
                [(req.rid, req.decode_prefix_len) for req in admitted],
                [req.rid for req in ready],
                [req.rid for req in world.streamed],
                world.allocator.available_size(),
                sorted(len(node.key) for node in world._nodes()),
            )
        )
        world.check()

    def run(self, plan: dict[int, list[Callable[[], Any]]], steps: int = 16) -> list[tuple]:
        """Do what ``plan`` has for a step before it."""
        for n in range(steps):
            for act in plan.get(n, []):
                act()
            self.step()
        return self.decisions


def lagging(rank: int, behind: int, polls_only: bool) -> list[tuple]:
    """Rank 1 learns of handshakes and of data some steps after rank 0, or the other way round."""
    me = Rank(rank)
    late = behind if rank == 1 else 0
    if behind < 0:
        late = -behind if rank == 0 else 0
    # They share too little for the second to wait for the first.
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(1, 8) + tokens(2, 14))

    def data(decode_req: DecodeRequest) -> None:
        me.world.complete(decode_req)

    def notified(decode_req: DecodeRequest) -> None:
        """Success is there before the metadata."""
        data(decode_req)
        me.world.meta.bootstrap_room[decode_req.kv_receiver.aux_index, 0] = 0

    def metadata(decode_req: DecodeRequest) -> None:
        me.world.meta.bootstrap_room[decode_req.kv_receiver.aux_index, 0] = decode_req.req.bootstrap_room

    plan: dict[int, list] = {}

    def at(n: int, act: Callable, decode_req: DecodeRequest) -> None:
        plan.setdefault(n, []).append(lambda: act(decode_req))

    at(1 + late, me.world.handshake, one)
    at(2, me.world.handshake, two)
    if polls_only:
        at(9 + late, data, one)
        at(9, data, two)
    else:
        at(9, notified, one)
        at(9 + late, metadata, one)
        at(9, data, two)
    return me.run(plan)


def lengths_differ(rank: int, before: int) -> list[tuple]:
    """For some steps rank 0 has a request more in its queue than rank 1."""
    me = Rank(rank)
    for n in range(before):
        me.world.handshake(me.arrive(tokens(n, 9)))

    def another() -> None:
        me.world.handshake(me.arrive(tokens(99, 9)))

    return me.run({0 if rank == 0 else 3: [another]}, steps=8)


def crowd(rank: int, size: int) -> list[tuple]:
    """So many requests at once that share nothing."""
    me = Rank(rank, size=256)
    for n in range(size):
        me.world.handshake(me.arrive(tokens(n, 9)))
    return me.run({}, steps=4)


def fails_on_one(rank: int, phase: str) -> list[tuple]:
    """One rank loses a request that the other rank has no complaints about."""
    me = Rank(rank)
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(2, 22))
    plan: dict[int, list] = {1: [lambda: me.world.handshake(two)], 5: [lambda: me.world.complete(two)]}

    def fail() -> None:
        if rank == 1:
            one.kv_receiver.abort()

    def quiet() -> None:
        one.kv_receiver.quiet = True

    def foreign_metadata() -> None:
        me.world.complete(one)
        if rank == 1:
            me.world.meta.bootstrap_room[one.kv_receiver.aux_index, 0] = 99

    if phase == "handshake":
        plan[3] = [fail]
    else:
        plan[1].append(lambda: me.world.handshake(one))
        plan[3] = [fail if phase == "transfer" else foreign_metadata]
        plan[6 + 2 * rank] = [quiet]
    decisions = me.run(plan)
    assert aborted(one.req) and not me.world.transfer.quarantine
    assert two.req in me.world.running
    return decisions


def dp_ranks(rank: int, neighbour: str) -> list[tuple]:
    """Two attention-DP ranks of one TP rank each. Rank 0 serves two requests, rank 1 none, or loses one."""
    own = [dist.new_group([each]) for each in range(2)][rank]
    me = Rank(rank, group=own)
    plan: dict[int, list] = {}
    if rank == 0:
        one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(1, 22) + tokens(2, 9))
        plan = {
            1: [lambda: me.world.handshake(one)],
            4: [lambda: me.world.complete(one), lambda: me.world.handshake(two)],
            7: [lambda: me.world.complete(two)],
        }
    elif neighbour != "nothing":
        lost = me.arrive(tokens(3, 30))
        plan = {9: [lambda: setattr(lost.kv_receiver, "quiet", True)], 3: [lost.kv_receiver.abort]}
        if neighbour != "handshake":
            plan[1] = [lambda: me.world.handshake(lost)]
        if neighbour == "raises":
            plan[3] = [lambda: setattr(lost.kv_receiver, "poll", lambda: 1 // 0)]
    for n in range(12):
        for act in plan.get(n, []):
            act()
        me.step()
        # What the engine has all ranks do once in each turn of its loop, whether they have requests or not.
        turns = torch.tensor([n, -n])
        dist.all_reduce(turns, op=dist.ReduceOp.MIN)
        assert turns.tolist() == [n, -n], "the ranks are in different turns"
    assert not me.world.queue.queue and not me.world.transfer.queue and not me.world.transfer.quarantine
    assert neighbour == "nothing" or rank == 0 or aborted(lost.req)
    return me.decisions


def raises_on_one(rank: int, method: str) -> list[tuple]:
    """On one rank something raises that concerns one request; the other rank has no complaints about it."""
    me = Rank(rank)
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(2, 22))

    def broken(*args: Any, **more: Any) -> None:
        raise ValueError("broken on this rank")

    def brake() -> None:
        if rank == 1:
            setattr(one.kv_receiver, method, broken)

    def quiet() -> None:
        one.kv_receiver.quiet = True

    plan = {
        0: [brake, lambda: me.world.handshake(one)],
        2: [lambda: me.world.handshake(two)],
        6 + 2 * rank: [quiet],
        12: [lambda: me.world.complete(two)],
    }
    decisions = me.run(plan, steps=16)
    assert aborted(one.req) and not me.world.transfer.quarantine
    assert two.req in me.world.running
    return decisions


def peer_capable_on_one(rank: int) -> list[tuple]:
    """One rank has learnt that the prefill takes a prefix, the other has not."""
    me = Rank(rank)
    serve_in_step(me, tokens(1, 16))
    request = me.arrive(tokens(1, 22), peer_takes_prefix=rank == 0)
    me.world.handshake(request)
    return me.run({}, steps=2)


def serve_in_step(me: Rank, prompt: list[int]) -> None:
    request = me.arrive(prompt)
    me.world.handshake(request)
    me.step()
    me.world.complete(request)
    me.step()
    me.world.finish(request.req)


def trees_differ(rank: int, size: int) -> list[tuple]:
    """The trees hold different prompts of equal length, as if the ranks had evicted in a different order."""
    me = Rank(rank, size=size)
    world = me.world
    serve_in_step(me, tokens(1 + rank, 40))
    me.decisions.clear()
    request = me.arrive(tokens(1, 44))
    world.handshake(request)
    return me.run({}, steps=8)


def sizes_differ(rank: int) -> list[tuple]:
    """One rank has lost a page of its tree that the other still holds."""
    me = Rank(rank)
    serve_in_step(me, tokens(1, 40))
    me.decisions.clear()
    if rank == 1:
        me.world.tree.evict_shortfall(PAGE)
    request = me.arrive(tokens(1, 44))
    me.world.handshake(request)
    return [(admitted, ready) for admitted, ready, *_ in me.run({}, steps=8)]


def evictions(rank: int) -> list[tuple]:
    """Many prompts through a small pool, on ranks whose clocks are far apart and run at different speeds."""
    real = radix_cache.time
    if rank == 1:
        ticks = itertools.count(10**9)
        clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3, perf_counter=real.perf_counter)
        radix_cache.time = decode_radix_cache.time = clock
    try:
        me = Rank(rank, size=96)
        for n in range(24):
            serve_in_step(me, tokens(n % 7, 12 + n % 5))
        return me.decisions
    finally:
        radix_cache.time = decode_radix_cache.time = real


def rids_of(decisions: list[tuple], at: int) -> list[str]:
    return [one[0] if at == 0 else one for decision in decisions for one in decision[at]]


@pytest.mark.parametrize("before", [1, 2])
def test_trap_16_ranks_with_queues_of_different_length_wait_for_each_other(pair, before):
    """Ranks reduced tensors of different size, as one had a request in its queue for a step longer, and hung.

    That one queue is empty and another is not cannot be here: a request enters the queues of all ranks in the step of
    its broadcast, whether its prefill is known yet or not, and leaves them by what the ranks have agreed on.
    """
    decisions = assert_same(pair.run(lengths_differ, before))
    assert sorted(rids_of(decisions, 0)) == [f"r{n}" for n in range(1, before + 2)]
    assert decisions[0][0] == [], "the step in which they differ is left out"


def test_trap_16_ranks_agree_on_more_requests_than_a_step_admits(pair):
    """A figure more than the agreement had places for: from 8 requests on, nobody was ever admitted again."""
    decisions = assert_same(pair.run(crowd, 12))
    assert rids_of(decisions, 0) == [f"r{n}" for n in range(1, 13)]


@pytest.mark.parametrize("phase", ["handshake", "transfer", "metadata"])
def test_trap_16_a_request_that_one_rank_loses_is_lost_on_all(pair, phase):
    """What one rank alone knows makes the queues differ for good if the others do not act upon it."""
    assert_same(pair.run(fails_on_one, phase))


@pytest.mark.parametrize("neighbour", ["handshake", "transfer", "raises"])
def test_what_a_dp_rank_loses_costs_the_other_nothing(pair, neighbour):
    """Nor does a rank without requests have to answer for anything but its turns."""
    alone, _ = pair.run(dp_ranks, "nothing")
    decisions, _ = pair.run(dp_ranks, neighbour)
    assert decisions == alone
    admitted = [taken for step in alone for taken in step[0]]
    # The second came when the first was committed, and took from it.
    assert [prefix for _, prefix in admitted] == [0, 20]
    assert sum(len(step[1]) for step in alone) == 2


@pytest.mark.parametrize("method", ["poll", "send_metadata"])
def test_trap_16_an_error_on_one_rank_fails_its_request_on_all(pair, method):
    """Handled where it came it would take that rank out of step for good."""
    decisions = pair.run(raises_on_one, method)
    assert [decision[1:3] for decision in decisions[0]] == [decision[1:3] for decision in decisions[1]]


@pytest.mark.parametrize("behind", [1, 4, -3])
def test_trap_17_a_request_is_committed_when_its_metadata_is_on_all_ranks(pair, behind):
    """Success on one rank only: the metadata had not come on the others, they kept the request, and all hung."""
    decisions = assert_same(pair.run(lagging, behind, False))
    assert sorted(rids_of(decisions, 1)) == ["r1", "r2"]
    when = {rid: n for n, decision in enumerate(decisions) for rid in decision[1]}
    assert when["r1"] == 9 + abs(behind) and when["r2"] == 9


def test_trap_17_no_rank_reports_success_before_the_metadata():
    """The same, of the real receiver."""
    receiver, landed = bare_receiver(), [0]
    receiver.metadata_room = lambda: landed[0]
    receiver.send_metadata(np.array([1], np.int32), 0, None, decode_prefix_len=0)
    heard(receiver.kv_mgr.transfer_statuses[7], "p", kv=True, aux=True)
    assert receiver.poll() == receiver.poll() == KVPoll.Transferring
    landed[0] = 7
    assert receiver.poll() == receiver.poll() == KVPoll.Success


def test_what_a_buffer_held_before_is_not_taken_for_another_requests():
    """The room of its last user: metadata that has not come yet would read as another's."""
    world = World(size=64, page_size=4)
    world.meta.bootstrap_room[:] = 99
    decode_req = world.arrive(tokens(1, 22))
    world.handshake(decode_req)
    world.step()
    receiver = decode_req.kv_receiver
    assert world.meta.bootstrap_room[receiver.aux_index, 0] == 0 == receiver.metadata_room()
    assert (world.meta.bootstrap_room == 99).any()


def test_metadata_of_another_room_fails_the_request():
    """Left by the late writer of a request that decode had to give up on: an error, and no wait for the time-out."""
    receiver, reasons = bare_receiver(), {}
    receiver.kv_mgr.record_failure = reasons.__setitem__
    receiver.metadata_room = lambda: 99
    receiver.send_metadata(np.array([1], np.int32), 0, None, decode_prefix_len=0)
    heard(receiver.kv_mgr.transfer_statuses[7], "p", kv=True, aux=True)
    assert receiver.poll() == KVPoll.Failed
    assert "room 99" in reasons[7]
    assert receiver.writers_done(), "all that was to come for this room has come"


@pytest.mark.parametrize("behind", [1, 4, -3])
def test_trap_18_a_rank_that_lags_holds_the_others_up_and_no_more(pair, behind):
    """A rank came back early, with nothing to do, from where the others were waiting for it."""
    decisions = assert_same(pair.run(lagging, behind, True))
    assert sorted(rids_of(decisions, 0)) == ["r1", "r2"] == sorted(rids_of(decisions, 1))
    when = {rid: n for n, decision in enumerate(decisions) for rid, _ in decision[0]}
    assert when == {"r1": 1 + abs(behind), "r2": 2}


@pytest.mark.parametrize("size", [128, 64])
def test_trap_19_ranks_whose_trees_differ_do_not_take_different_prefixes(pair, size):
    """Ranks had evicted different prompts and matched different lengths. In a small pool only one can admit then."""
    decisions = [[decision[:2] for decision in answer] for answer in pair.run(trees_differ, size)]
    assert_same(decisions)


def test_trap_19_ranks_whose_trees_differ_in_size_admit_nothing(pair):
    decisions = assert_same(pair.run(sizes_differ))
    assert not rids_of(decisions, 0)


def test_trap_19_a_prefix_is_named_only_if_all_ranks_may(pair):
    decisions = assert_same(pair.run(peer_capable_on_one))
    assert decisions[-1][0] or decisions[-2][0]
    assert all(length == 0 for decision in decisions[2:] for _, length in decision[0])


def test_trap_19_ranks_evict_alike_whatever_their_clocks_say(pair):
    """The order of eviction came from each rank's own clock."""
    decisions = assert_same(pair.run(evictions))
    assert len(rids_of(decisions, 1)) == 24


# ---- lifetime ----


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_26_kv_of_old_weights_does_not_survive_an_update(page_size):
    """Prefixes that were locked, or set aside, during a weight update were served from afterwards."""
    world, prompt = World(size=128, page_size=page_size), tokens(1, 22)
    req = serve(world, prompt, max_new=6).req
    assert not world.flush(), "a request that runs has its prefix locked"
    world.decode()
    world.retract(req)
    assert world.flush() and not list(world._nodes())
    # The new weights' KV of the same prompt, then the retracted request with what it brought from before.
    fresh = world.arrive(prompt)
    world.handshake(fresh)
    world.step()
    world.check()
    assert req in world.running and req.decode_prefix_len == 0
    for _ in range(8):
        if fresh.kv_receiver is not None and fresh.kv_receiver.asked:
            world.complete(fresh)
        world.step()
        world.decode()
        # Compares every slot in the tree with the KV of the weights of now.
        world.check()
    assert fresh.req.decode_prefix_len == 0 and not world.running
    assert world.tree.evictable_size() > 0


def test_trap_26_a_flush_with_a_request_whose_admission_has_failed():
    """It is in quarantine."""
    world = World(size=128)
    serve_to_end(world, tokens(1, 20))
    bad = world.arrive(tokens(2, 22))
    bad.kv_receiver.send_metadata = lambda *args, **more: 1 // 0
    world.handshake(bad)
    world.step()
    del bad.kv_receiver.send_metadata
    world.step()
    assert aborted(bad.req) and [dr.req for dr in world.transfer.quarantine] == [bad.req]
    assert world.flush()
    world.check()
    bad.kv_receiver.quiet = True
    world.step()
    assert world.idle() and world.allocator.available_size() == 128
    world.check()
    serve_to_end(world, tokens(1, 20))


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_27_a_promised_prefix_is_there_when_the_delta_lands(page_size):
    """Decode had named a prefix without locking it, and it was evicted before the rest of the prompt came."""
    world, prompt = World(size=96, page_size=page_size), tokens(1, 30)
    serve_to_end(world, prompt[:20])
    promised = world.arrive(prompt)
    world.handshake(promised)
    world.step()
    assert promised.kv_receiver.prefix_len == 20
    # Others want all there is.
    for n in range(4):
        other = world.arrive(tokens(5 + n, 24), max_new=2)
        world.handshake(other)
        world.step()
        world.tree.evict_shortfall(1000)
        world.tree.evict(EvictParams(num_tokens=1000))
        if other.kv_receiver.asked:
            world.complete(other)
            world.step()
            world.decode()
        world.check()
    world.complete(promised)
    world.step()
    world.check()
    slots = world.pool.req_to_token[promised.req.req_pool_idx, :30].tolist()
    world._check_kv(slots, prompt, world.weights)


# ---- the list ----


def test_a_second_live_request_of_one_room_is_refused():
    """In the engine one ends the other's books, and then the scheduler."""
    world = World()
    first = world.arrive(tokens(1, 9))
    second = Req("second", "", tokens(1, 9), SamplingParams(), bootstrap_host="10.0.0.1", bootstrap_room=1)

    def refused() -> bool:
        world.queue.add(second)
        return world.streamed[-1:] == [second] and "a room of its own" in second.finished_reason.message

    assert refused(), "while the first waits for memory"
    world.handshake(first)
    world.step()
    assert refused(), "while its KV is in transfer"
    first.kv_receiver.abort()
    world.step()
    assert world.transfer.quarantine == [first]
    assert refused(), "while its KV may still be written"
    assert [dr.req for dr in world.queue.queue] == []
    first.kv_receiver.quiet = True
    world.step()
    world.check()


def test_every_row_has_its_test():
    here = Path(__file__)
    tested = {int(row) for row in re.findall(r"^def test_trap_(\d\d)_", here.read_text(), re.MULTILINE)}
    assert tested | set(ELSEWHERE) == set(ROWS)
    assert not tested & set(ELSEWHERE)
    for row, why in ELSEWHERE.items():
        for file, name in re.findall(r"(\S+\.py)::(\w+)", why):
            path = here.parent / file
            # Without an extra there is no test of it either.
            assert not path.parent.is_dir() or f"def {name}(" in path.read_text(), f"row {row}: {file} has no {name}"


def test_failures_are_told_when_what_they_held_has_been_given_back():
    """A DP controller hears of a rank's load with its outputs, and those may be the last for long."""
    one = World(size=256, page_size=4)
    reqs = [one.arrive(tokens(start, 40)) for start in (1, 100, 200)]
    for decode_req in reqs:
        one.handshake(decode_req)
    one.step()
    told = []

    def stream_output(ended, *args, **kwargs) -> None:
        told.append((len(one.transfer.queue), one.allocator.available_size()))

    one.scheduler.stream_output = stream_output
    for decode_req in reqs:
        decode_req.kv_receiver.state = KVPoll.Failed
    # Nobody writes for the first any more; the others wait in quarantine.
    reqs[0].kv_receiver.quiet = True
    one.step()
    assert [queued for queued, _ in told] == [0, 0, 0]
