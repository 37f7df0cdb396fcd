"""The Mooncake backend between real managers of both roles: real bootstrap server, real sockets, real threads.

Only Mooncake's library is a stand-in: it copies between two places of this process.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch
import zmq
from engine_classes import engine_class
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.delta_receiver import ReceiverState
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.disaggregation.decode_radix.hooks import Events
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRoom
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
    TransferInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until
from wire_ends import Ends, first_pages, keep_threads_out

from sglang_pd_radix.tools.cluster import free_ports

ENGINE_RECEIVER = engine_class(MooncakeKVReceiver)
ADDR = "10.0.0.9:8998"
LAYERS, HEADS, HEAD_BYTES, NUM_PAGES, NUM_AUX = 2, 4, 8, 64, 8


class Library:
    """Stands for one process's Mooncake engine. ``gate`` holds every write while it is cleared."""

    ports = iter(range(20000, 60000))

    def __init__(self) -> None:
        self.session_id = f"127.0.0.1:{next(self.ports)}"
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.result: int | Exception = 0
        self.written = self.descriptors = 0

    def get_session_id(self) -> str:
        return self.session_id

    def batch_register(self, pointers: list[int], lengths: list[int]) -> int:
        return 0

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        self.writing.set()
        assert self.gate.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        self.descriptors += len(sources)
        for source, target, length in zip(sources, targets, lengths, strict=True):
            ctypes.memmove(target, source, length)
            self.written += length
        return self.result


class Counters(Events):
    def __init__(self) -> None:
        self.sent_bytes = self.saved_bytes = self.runs = self.state_bytes = self.lost_peers = 0

    def lost_peer(self) -> None:
        self.lost_peers += 1

    def sent(self, kv_args, their_item_len, sent_pages, saved_pages, runs=0, states=0) -> None:
        page_bytes = min(their_item_len, kv_args.kv_item_lens[0]) * len(kv_args.kv_item_lens)
        self.runs += runs
        self.sent_bytes += sent_pages * page_bytes
        self.saved_bytes += saved_pages * page_bytes
        self.state_bytes += states and states * sum(kv_args.state_item_lens)


class Rank:
    """One rank of one worker: its pools, its library and its manager.

    rank, tp: among those of its DP rank and pipeline stage.
    """

    def __init__(
        self,
        world: World,
        mode: DisaggregationMode,
        rank: int,
        tp: int,
        dp_rank: int = 0,
        dp: int = 1,
        stage: int = 0,
        cp_rank: int = 0,
        cp: int = 1,
    ) -> None:
        stages = world.stages if mode == DisaggregationMode.PREFILL else [range(world.layers)]
        layers = stages[stage]
        self.library, self.rank, self.tp, self.dp_rank, self.dp = Library(), rank, tp, dp_rank, dp
        self.stage, self.cp_rank, self.cp = stage, cp_rank, cp
        heads = HEADS if world.mla else HEADS // tp
        item = world.page_size * heads * HEAD_BYTES
        # Of the model's buffers, K of all layers and then V, those that are here.
        self.buffers = [kind * world.layers + layer for kind in range(1 if world.mla else 2) for layer in layers]
        buffers = len(self.buffers)
        self.kv = [np.zeros((NUM_PAGES, world.page_size, heads, HEAD_BYTES), np.uint8) for _ in range(buffers)]
        self.aux = np.zeros((NUM_AUX, 64), np.uint8)
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, stage, 0, 0
        args.kv_data_ptrs = [pool.ctypes.data for pool in self.kv]
        args.kv_data_lens = [pool.nbytes for pool in self.kv]
        args.kv_item_lens = [item] * buffers
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [self.aux.ctypes.data], [self.aux.nbytes], [64]
        args.state_data_ptrs = args.state_data_lens = args.state_item_lens = []
        args.state_type, args.prefill_start_layer, args.page_size = "none", layers.start, world.page_size
        # Two kinds of state, of different size, in slots.
        self.states = [np.zeros((8, size), np.uint8) for size in (24, 40)]
        if world.states is not None:
            args.state_type, args.state_data_ptrs = world.state_type, [pool.ctypes.data for pool in self.states]
            args.state_data_lens = [pool.nbytes for pool in self.states]
            args.state_item_lens = [pool.shape[1] for pool in self.states]
        args.kv_head_num, args.total_kv_head_num = heads, HEADS
        server_args = SimpleNamespace(
            host="127.0.0.1",
            disaggregation_bootstrap_port=world.port,
            disaggregation_mode=mode.value,
            dist_init_addr=None,
            enable_dp_attention=dp > 1,
            dp_size=dp,
            pp_size=len(stages),
            load_balance_method="follow_bootstrap_room",
            kv_cache_dtype="auto",
            served_model_name="m",
            enable_metrics=False,
            enable_hisparse=False,
            chunked_prefill_size=32,
            disaggregation_decode_enable_radix_cache=True,
        )
        made: list[MooncakeKVManager] = []
        world.current = self

        def make() -> None:
            made.append(MooncakeKVManager(args, mode, server_args, world.mla))

        # The engine's threads take over that their maker is a daemon; they never end.
        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        maker.join()
        self.manager = made[0]
        self.manager.events = Counters()
        self.manager.num_layers = world.layers
        if world.staging and not world.mla:
            # As the queues of both workers do it, where a tensor's first dimension is the slot.
            slots = [torch.from_numpy(pool).view(-1, heads, HEAD_BYTES) for pool in self.kv]
            self.manager.set_kv_buffer_tensors(slots[: len(layers)], slots[len(layers) :], world.page_size)


class World:
    """A prefill and a decode worker."""

    def __init__(
        self,
        monkeypatch,
        page_size: int = 4,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        mla: bool = False,
        staging: bool = False,
        prefill_dp: int = 1,
        decode_dp: int = 1,
        states: tuple[int, int] | None = None,
        stages: tuple[int, ...] = (LAYERS,),
        prefill_cp: int = 1,
        windows: tuple[list[int], list[int]] | None = None,
        state_type: str = "swa",
    ):
        """states: for a model with states, the slot of the request on prefill and on decode. windows: for one with
        sliding windows, the pages of its window; or of another ``state_type``.

        stages: layers of each pipeline stage of prefill. prefill_cp: its context-parallel ranks.
        """
        self.state_type = "mamba" if windows is None else state_type
        self.states = windows if states is None else ([states[0]], [states[1]])
        self.layers = sum(stages)
        self.stages = [range(sum(stages[:i]), sum(stages[: i + 1])) for i in range(len(stages))]
        self.page_size, self.mla, self.staging = page_size, mla, staging
        monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", str(int(staging)))
        for side in ("BUFFER_SIZE", "POOL_SIZE"):
            monkeypatch.setenv(f"SGLANG_DISAGG_STAGING_{side}_MB", "1")
        keep_threads_out(monkeypatch)
        self.current: Rank | None = None
        monkeypatch.setattr(common, "get_attention_cp_size", lambda: self.current.cp)
        monkeypatch.setattr(common, "get_attention_cp_rank", lambda: self.current.cp_rank)
        monkeypatch.setattr(common, "get_attention_dp_size", lambda: self.current.dp)
        monkeypatch.setattr(common, "get_attention_dp_rank", lambda: self.current.dp_rank)
        monkeypatch.setattr(common, "get_attention_tp_size", lambda: self.current.tp)
        monkeypatch.setattr(common, "get_attention_tp_rank", lambda: self.current.rank)
        monkeypatch.setattr(common, "get_pp_group", lambda: None)
        monkeypatch.setattr(common, "get_local_ip_auto", lambda: "127.0.0.1")
        monkeypatch.setattr(conn, "get_mooncake_transfer_engine", lambda: self.current.library)
        (self.port,) = free_ports(1)
        self.addr = f"127.0.0.1:{self.port}"
        self.server = MooncakeKVBootstrapServer("127.0.0.1", self.port)
        until(lambda: self._up(), "the bootstrap server answers")
        self.prefill = self._ranks(DisaggregationMode.PREFILL, prefill_tp, prefill_dp, len(stages), prefill_cp)
        self.decode = self._ranks(DisaggregationMode.DECODE, decode_tp, decode_dp)
        for rank in self.decode:
            until(lambda m=rank.manager: m.try_ensure_parallel_info(self.addr), "prefill's first answer")
        self.fill_prefill()

    def _ranks(self, mode: DisaggregationMode, tp: int, dp: int, stages: int = 1, cp: int = 1) -> list[Rank]:
        places = itertools.product(range(dp), range(stages), range(cp), range(tp))
        return [Rank(self, mode, rank, tp, d, dp, stage, cp_rank, cp) for d, stage, cp_rank, rank in places]

    def _up(self) -> bool:
        try:
            return requests.get(f"http://{self.addr}/health", timeout=1).status_code == 200
        except requests.RequestException:
            return False

    def close(self) -> None:
        """End the bootstrap server, without complaints about the task that it leaves behind."""
        loop = self.server._loop
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        self.server.close()

    def fill_prefill(self) -> None:
        """Every head of every slot gets bytes of its own, and equal heads on all ranks."""
        shape = (2 * self.layers, NUM_PAGES, self.page_size, HEADS, HEAD_BYTES)
        self.truth = np.random.default_rng(0).integers(1, 255, shape).astype(np.uint8)
        for rank in self.prefill:
            for buffer, pool in zip(rank.buffers, rank.kv, strict=True):
                pool[:] = self.truth[buffer][:, :, self.heads_of(rank)]
            rank.aux[:] = 7

    def heads_of(self, rank: Rank) -> slice:
        mine = HEADS if self.mla else HEADS // rank.tp
        return slice(0, HEADS) if self.mla else slice(rank.rank * mine, (rank.rank + 1) * mine)

    def request(self, room: int, prompt_len: int, prefix_len: int | None, aux: int = 0) -> Request:
        return Request(self, room, prompt_len, prefix_len, aux)

    def assert_books_closed(self, *rooms: int) -> None:
        for rank in self.prefill:
            # As every step of its scheduler does.
            rank.manager.settle()
            until(lambda rank=rank: not rank.manager.transfer_infos, "prefill forgets what decode asked for")
            assert not rank.manager.request_status and not rank.manager.failure_records
            rooms = rank.manager.rooms
            assert not rooms.live and not rooms.refused and not rank.manager.cancels
            until(lambda rank=rank: not rank.manager.queued, "its queues are empty")
            assert not rooms.given_up
        for rank in self.decode:
            manager = rank.manager
            assert not manager.request_status and not manager.failure_records
            assert not manager.required_prefill_response_num_table and not manager.prefill_response_tracker
            assert not any(manager.addr_to_rooms_tracker.values()) and not manager.awaited_rooms


class Request(Ends):
    """One request, by what the two schedulers do with it.

    Prefill uses pages 0, 1, ..., decode as many from ``base`` on. It is served by one DP rank of each.
    """

    base = 32
    prefill_dp = decode_dp = 0

    def __init__(self, world: World, room: int, prompt_len: int, prefix_len: int | None, aux: int) -> None:
        self.world, self.room, self.prompt_len, self.prefix_len, self.aux = world, room, prompt_len, prefix_len, aux
        self.num_pages = pages(prompt_len, world.page_size)
        self.first_page = (prefix_len or 0) // world.page_size
        self.senders: list[MooncakeKVSender] = []
        self.receivers: list[MooncakeKVReceiver] = []

    @property
    def decode_pages(self) -> np.ndarray:
        return np.arange(self.base, self.base + self.num_pages, dtype=np.int32)[::-1].copy()

    def start_prefill(self) -> Request:
        for rank in [rank for rank in self.world.prefill if rank.dp_rank == self.prefill_dp]:
            sender = MooncakeKVSender(rank.manager, self.world.addr, self.room, [rank.rank], rank.stage)
            sender.prompt_len = self.prompt_len
            self.senders.append(sender)
        return self

    def start_decode(self, fenced: bool = False) -> Request:
        for rank in [rank for rank in self.world.decode if rank.dp_rank == self.decode_dp]:
            receiver = MooncakeKVReceiver(rank.manager, self.world.addr, self.room)
            receiver.init(self.prefill_dp)
            receiver.fenced = fenced
            assert receiver.poll() == KVPoll.WaitingForInput and receiver.peer_takes_prefix
            self.receivers.append(receiver)
        return self

    def ask(self, **changes: Any) -> Request:
        for receiver in self.receivers:
            message = {"decode_prefix_len": self.prefix_len, **changes}
            indices = message.pop("kv_indices", self.decode_pages[self.first_page :])
            states = message.pop("states", self.world.states and self.world.states[1])
            receiver.send_metadata(indices, self.aux, states, **message)
        return self

    def bootstrap(self, fenced: bool = False) -> Request:
        self.start_prefill().start_decode(fenced).ask()
        self.wait_senders(KVPoll.WaitingForInput)
        for sender in self.senders:
            sender.init(self.num_pages, self.aux)
        return self

    def finish(self) -> None:
        self.wait_senders(KVPoll.Success)
        self.wait_receivers(KVPoll.Success)
        for end in (*self.senders, *self.receivers):
            end.clear()

    def fail(self) -> tuple[str, str]:
        """Both ends fail; returns the reasons of the first sender and the first receiver."""
        self.wait_senders(KVPoll.Failed)
        self.wait_receivers(KVPoll.Failed)
        return reasons(self.senders)[0], reasons(self.receivers)[0]

    def assert_landed(self) -> None:
        """Decode has the delta, all of it and nothing else, and the metadata."""
        assert_landed(self)


def assert_landed(*requests_: Request) -> None:
    """Decode has the deltas of these, all of them and nothing else, and the metadata."""
    world = requests_[0].world
    for rank in world.decode:
        here = [one for one in requests_ if one.decode_dp == rank.dp_rank]
        for layer, pool in enumerate(rank.kv):
            expected = np.zeros_like(pool)
            for one in here:
                targets = one.decode_pages[one.first_page :]
                expected[targets] = world.truth[layer][one.first_page : one.num_pages][:, :, world.heads_of(rank)]
            assert (pool == expected).all()
        for one in here:
            assert (rank.aux[one.aux] == 7).all()


def reasons(ends: list) -> list[str]:
    found = []
    for end in ends:
        with pytest.raises(Exception) as caught:
            end.failure_exception()
        found.append(str(caught.value))
    return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


def push(rank: Rank) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{rank.manager.rank_port}")
    return socket


# ---- the message ----


def frames_of(receiver: MooncakeKVReceiver, send: Callable[[], None]) -> list[list[bytes]]:
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=lambda frames: sent.append(list(frames)))
    receiver._connect_to_bootstrap_server = lambda info: (socket, threading.Lock())
    send()
    return sent


def bare_receiver(dummy: bool = False) -> MooncakeKVReceiver:
    receiver = object.__new__(MooncakeKVReceiver)
    receiver.state = ReceiverState()
    receiver.kv_mgr = SimpleNamespace(
        local_ip="10.0.0.1",
        rank_port=77,
        enable_staging=False,
        staging=None,
        prefills=SimpleNamespace(of=lambda addr: Capabilities(version=1)),
        awaited_rooms={},
    )
    receiver.bootstrap_room, receiver.session_id, receiver.required_dst_info_num = 2**62, "10.0.0.1:15000", 1
    receiver.bootstrap_addr = ""
    receiver.bootstrap_infos = [{"rank_ip": "10.0.0.2", "rank_port": 5, "is_dummy": dummy}]
    return receiver


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("states", [None, [3, 4]])
def test_a_message_without_a_prefix_is_the_engines_and_one_with_it_only_appends(dummy: bool, states: list | None):
    indices = np.array([5, 6, 9], np.int32)
    receiver = bare_receiver(dummy)
    engines = frames_of(receiver, lambda: ENGINE_RECEIVER.send_metadata(receiver, indices, 3, states))
    short = frames_of(receiver, lambda: receiver.send_metadata(indices, 3, states))
    long = frames_of(receiver, lambda: receiver.send_metadata(indices, 3, states, decode_prefix_len=128))
    assert short == engines and len(short[0]) == 8
    assert long == [engines[0] + [b"128", b"1" if dummy else b"0"]]
    assert not TransferInfo.from_zmq(short[0]).names_prefix
    info = TransferInfo.from_zmq(long[0])
    assert (info.decode_prefix_len, info.is_dummy) == (128, dummy)
    assert info.dst_kv_indices.tolist() == ([] if dummy else [5, 6, 9])


GOOD = [b"1", b"127.0.0.1", b"9", b"127.0.0.1:15000", b"\0\0\0\0", b"0", b"", b"1", b"4", b"0"]


@pytest.mark.parametrize(
    ("frame", "value"),
    [(4, b"\0\0\0"), (5, b"x"), (7, b"x"), (8, b"four"), (9, b"2"), (9, b""), (9, b"1"), (2, b"p")],
)
def test_a_message_that_cannot_be_right_is_refused(frame: int, value: bytes) -> None:
    assert TransferInfo.from_zmq(GOOD).decode_prefix_len == 4
    with pytest.raises(ValueError):
        TransferInfo.from_zmq([*GOOD[:frame], value, *GOOD[frame + 1 :]])
    with pytest.raises(ValueError):
        TransferInfo.from_zmq(GOOD[:9])
    for more in ([b""], [b"1"], [b"1", b""]):
        with pytest.raises(ValueError):
            TransferInfo.from_zmq([*GOOD, *more])


# ---- transfers ----


@pytest.mark.parametrize(
    ("prompt_len", "prefix_len", "chunks"),
    [
        (10, None, []),
        (10, 0, []),
        (10, 4, []),
        (10, 8, []),
        (12, 12, []),
        (30, 8, [3, 5]),
        (30, None, [2, 4]),
        (1, 0, []),
    ],
)
def test_decode_gets_the_delta_and_nothing_else(world: World, prompt_len: int, prefix_len: int | None, chunks: list):
    request = world.request(1, prompt_len, prefix_len).bootstrap().send(*chunks)
    request.finish()
    request.assert_landed()
    world.assert_books_closed()
    counters, item = world.prefill[0].manager.events, world.page_size * HEADS * HEAD_BYTES * 2 * LAYERS
    assert counters.sent_bytes == (request.num_pages - request.first_page) * item
    assert counters.saved_bytes == request.first_page * item
    assert world.prefill[0].library.written == counters.sent_bytes + 64
    # One more for the metadata.
    assert world.prefill[0].library.descriptors == counters.runs * 2 * LAYERS + 1


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "mla"),
    [(2, 2, False), (1, 2, False), (2, 1, False), (4, 2, False), (1, 4, False), (2, 1, True), (1, 2, True)],
)
@pytest.mark.parametrize(("page_size", "prefix_len"), [(4, 4), (1, 5)])
def test_tensor_parallel_sizes(monkeypatch, prefill_tp, decode_tp, mla, page_size, prefix_len) -> None:
    world = World(monkeypatch, page_size, prefill_tp, decode_tp, mla)
    request = world.request(1, 12, prefix_len).bootstrap()
    assert {sender.decode_prefix_len for sender in request.senders} == {prefix_len or 0}
    request.send(*([6] if page_size == 1 else [2] if request.first_page < 2 else []))
    request.finish()
    request.assert_landed()
    world.assert_books_closed()
    token = HEADS * HEAD_BYTES * (LAYERS if mla else 2 * LAYERS) * (decode_tp if mla else 1)
    assert sum(r.manager.events.sent_bytes for r in world.prefill) == (12 - (prefix_len or 0)) * token
    assert sum(r.manager.events.saved_bytes for r in world.prefill) == (prefix_len or 0) * token
    world.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "mla"),
    [((2, 2), (1, 2), False), ((1, 2), (2, 2), False), ((2, 1), (1, 2), True), ((1, 3), (2, 1), False)],
)
def test_dp_ranks(monkeypatch, prefill, decode, mla) -> None:
    """Sizes are (TP, DP) of each attention-DP rank. Any DP rank of decode is served by any of prefill, all at once.

    Each gets its own deltas and nothing else, and one that fails costs the others nothing.
    """
    (prefill_tp, prefill_dp), (decode_tp, decode_dp) = prefill, decode
    world = World(monkeypatch, 4, prefill_tp, decode_tp, mla, prefill_dp=prefill_dp, decode_dp=decode_dp)
    served = []
    for source, target in itertools.product(range(prefill_dp), range(decode_dp)):
        request = world.request(10 + len(served), 30, 4 * len(served), aux=len(served))
        request.prefill_dp, request.decode_dp = source, target
        # Of 32 pages that each rank has for them.
        request.base = 32 + 8 * source
        served.append(request.bootstrap())
    lost = world.request(99, 30, 0, aux=7)
    lost.prefill_dp, lost.decode_dp, lost.base = prefill_dp - 1, decode_dp - 1, 56
    lost.bootstrap()
    for sender in lost.senders:
        sender.abort()
    for request in served:
        request.send(3)
    for request in served:
        request.finish()
    lost.fail()
    for end in (*lost.senders, *lost.receivers):
        end.clear()
    assert_landed(*served)
    world.assert_books_closed()
    world.close()


def test_a_reason_that_comes_to_decode_while_another_is_told_is_not_kept(world: World, monkeypatch) -> None:
    """Before it has asked for anything, so that it waits for no writer either."""
    manager = world.decode[0].manager
    tell = manager.take_reason

    def told(room: int, *default: str) -> str:
        reason = tell(room, *default)
        manager.fail_room(room, "and another one")
        return reason

    monkeypatch.setattr(manager, "take_reason", told)
    request = world.request(1, 10, 4).start_decode()
    request.receivers[0].fail("out of luck")
    assert reasons(request.receivers)[0].endswith("out of luck")
    world.assert_books_closed()


def test_a_request_that_ends_while_its_transfer_thread_looks_after_it_has_not_failed(world: World) -> None:
    manager = world.prefill[0].manager
    request = world.request(1, 10, 4).bootstrap()
    looking, ended = threading.Event(), threading.Event()

    class Statuses(dict):
        def __contains__(self, room: object) -> bool:
            found = dict.__contains__(self, room)
            if threading.get_ident() in manager.queued.writers and self.get(room) == KVPoll.Success:
                looking.set()
                assert ended.wait(30)
            return found

    manager.request_status = Statuses(manager.request_status)
    request.send()
    assert looking.wait(30)
    request.finish()
    ended.set()
    until(lambda: not manager.queued, "the thread is done with it")
    world.assert_books_closed()


def test_the_bootstrap_server_says_so(world: World) -> None:
    answer = requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()
    assert [answer.pop(named) for named in ("waiting_timeout", "bootstrap_timeout")] == [300, 300]
    # Of extras there may be more.
    assert answer.items() >= {"version": 1, "state": 1, "prompts": 2}.items()


# ---- failures ----


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"decode_prefix_len": 6}, "not a multiple of the page size"),
        ({"decode_prefix_len": -4}, "negative"),
        ({"decode_prefix_len": 16}, "beyond the prompt of 10 tokens"),
        ({"decode_prefix_len": 8}, "leaves 1 pages"),
    ],
)
def test_a_wrong_prefix_fails_its_request_on_both_sides(world: World, changes: dict, why: str) -> None:
    bad = world.request(1, 10, 4).start_prefill().start_decode().ask(**changes)
    on_prefill, on_decode = bad.fail()
    assert why in on_prefill and "prefill reported: " in on_decode and why in on_decode
    good = world.request(2, 10, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


def test_a_message_that_cannot_be_read_fails_its_room_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    bad = world.request(1, 10, 4).start_prefill().start_decode()
    # As if decode had asked.
    world.decode[0].manager.awaited_rooms[1] = AwaitedRoom({0})
    prefill = push(world.prefill[0])
    address = [b"127.0.0.1", b"%d" % world.decode[0].manager.rank_port]
    for frames in (
        [b""],
        [b"what is this"],
        [b"None"],
        [b"None", *[b"x"] * 20],
        [b"WATERMARK", b"1"],
        [b"STAGING_RSP"],
        [b"1", *address, b"session", b"\0\0\0", b"0", b"", b"1", b"4", b"0"],
        [b"1", *address, bad.receivers[0].session_id.encode(), b"", b"0", b"", b"0", b"4", b"0"],
    ):
        prefill.send_multipart(frames)
    on_prefill, on_decode = bad.fail()
    assert "refused decode's request" in on_prefill and "refused decode's request" in on_decode
    good = world.request(2, 10, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


def test_a_request_of_an_unknown_session_is_refused_before_its_prompt_arrives(world: World) -> None:
    bad = world.request(1, 10, 4).start_decode()
    until(lambda: bool(world.prefill[0].manager.decode_kv_args_table), "decode has registered")
    known = dict(world.prefill[0].manager.decode_kv_args_table)
    world.prefill[0].manager.decode_kv_args_table.clear()
    bad.ask()
    bad.wait_receivers(KVPoll.Failed)
    assert "has not registered its memory" in reasons(bad.receivers)[0]
    bad.start_prefill().wait_senders(KVPoll.Failed)
    assert "has not registered its memory" in reasons(bad.senders)[0]
    world.prefill[0].manager.decode_kv_args_table.update(known)
    world.request(2, 10, 4).bootstrap().send().finish()
    world.assert_books_closed()


@pytest.mark.parametrize("when", ["before decode asks", "bootstrapped", "sent in part"])
def test_an_abort_on_prefill_reaches_decode(world: World, when: str) -> None:
    request = world.request(1, 20, 4)
    if when == "before decode asks":
        request.start_prefill().start_decode()
    else:
        request.bootstrap()
    if when == "sent in part":
        request.senders[0].send(np.arange(request.first_page, 3, dtype=np.int32))
    request.senders[0].abort()
    request.wait_senders(KVPoll.Failed)
    if when == "before decode asks":
        request.ask()
    request.wait_receivers(KVPoll.Failed)
    assert "borted" in reasons(request.receivers)[0] and "borted" in reasons(request.senders)[0]
    world.assert_books_closed()
    # The room's number is free again.
    world.request(1, 8, 4).bootstrap().send().finish()


def test_an_abort_on_prefill_sends_nothing_to_a_decode_without_the_flag(world: World) -> None:
    request = world.request(1, 20, None).bootstrap()
    request.senders[0].abort()
    request.wait_senders(KVPoll.Failed)
    time.sleep(0.05)
    assert request.receivers[0].poll() == KVPoll.WaitingForInput


def test_decode_hears_of_a_failure_only_when_nothing_is_written_any_more(world: World) -> None:
    library = world.prefill[0].library
    request = world.request(1, 24, 4).bootstrap()
    library.gate.clear()
    library.writing.clear()
    sender = request.senders[0]
    sender.send(np.arange(1, 3, dtype=np.int32))
    assert library.writing.wait(30)
    sender.send(np.arange(3, 5, dtype=np.int32))
    sender.abort()
    time.sleep(0.1)
    assert sender.poll() == KVPoll.WaitingForInput and request.receivers[0].poll() == KVPoll.WaitingForInput
    library.gate.set()
    request.fail()
    # What was queued behind it was not sent.
    targets = request.decode_pages
    assert all(pool[targets[1:3]].any() and not pool[targets[3:]].any() for pool in world.decode[0].kv)
    world.assert_books_closed()


def test_an_error_in_a_transfer_thread_fails_its_request_only(world: World) -> None:
    world.prefill[0].library.result = RuntimeError("no such luck")
    bad = world.request(1, 10, 4).bootstrap().send()
    on_prefill, on_decode = bad.fail()
    assert "no such luck" in on_prefill and "no such luck" in on_decode
    world.prefill[0].library.result = 0
    good = world.request(2, 10, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


def test_a_chunk_that_failed_is_not_made_good_by_the_last_one(world: World) -> None:
    library, write = world.prefill[0].library, world.prefill[0].library.batch_transfer_sync

    def fail_once(*args) -> int:
        library.batch_transfer_sync = write
        raise RuntimeError("no such luck")

    library.batch_transfer_sync = fail_once
    on_prefill, on_decode = world.request(1, 24, 4).bootstrap().send(3).fail()
    assert "no such luck" in on_prefill and "no such luck" in on_decode
    world.assert_books_closed()


def test_a_rank_where_nothing_went_wrong_tells_its_decode_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(1, 10, 4).bootstrap()
    request.senders[0].fail("out of luck")
    reasons(request.senders)
    request.wait_receivers(KVPoll.Failed)
    assert "out of luck" in reasons(request.receivers[:1])[0]
    assert "another rank" in reasons(request.receivers[1:])[0]
    world.assert_books_closed()
    world.close()


@pytest.mark.parametrize("result", [0, -1, RuntimeError("no such luck")])
@pytest.mark.parametrize("begun", [False, True])
def test_the_end_of_a_write_is_not_that_of_the_next_request_of_its_room(monkeypatch, caplog, begun, result) -> None:
    """One rank still writes when the request has failed on another. begun: the next one is here before that ends."""
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    first, again = world.request(1, 24, 8).bootstrap(fenced=True), world.request(1, 24, 8)
    library, manager = world.prefill[0].library, world.prefill[0].manager
    library.gate.clear()
    library.writing.clear()
    first.senders[0].send(np.arange(2, 6, dtype=np.int32))
    assert library.writing.wait(30)
    first.senders[1].fail("out of luck")
    reasons(first.senders)
    if begun:
        again.start_prefill()
    library.result = result
    library.gate.set()
    until(lambda: not manager.queued, "the write has ended")
    first.wait_receivers(KVPoll.Failed) if result else first.receivers[1].abort()
    reasons(first.receivers)
    wait_quiet(first)
    # Behind the last word about the first one.
    manager.connect_unwaiting("127.0.0.1", world.decode[0].manager.rank_port).send_multipart([b"what is this"])
    until(lambda: "Ignored a message" in caplog.text, "decode has read it")
    if not begun:
        world.assert_books_closed()
        again.start_prefill()
    assert [sender.poll() for sender in again.senders] == [KVPoll.Bootstrapping] * 2
    assert not manager.failure_records
    if result == 0:
        again.start_decode().ask().wait_senders(KVPoll.WaitingForInput)
        for sender in again.senders:
            sender.init(again.num_pages, again.aux)
        again.send().finish()
        again.assert_landed()
        world.assert_books_closed()
    world.close()


def test_a_chunk_of_a_room_that_fails_meanwhile_is_not_counted_as_queued(world: World, monkeypatch) -> None:
    """A write of an earlier chunk fails in its own thread while the scheduler adds the next one."""
    manager = world.prefill[0].manager
    request = world.request(1, 24, 8).bootstrap()
    check = manager.check_status
    failing: list[threading.Thread] = []

    def check_later(room: int) -> KVPoll:
        if threading.current_thread() is threading.main_thread() and not failing:
            failing.append(threading.Thread(target=manager.fail_room, args=(1, "an earlier chunk failed")))
            failing[0].start()
            failing[0].join(0.2)
        return check(room)

    monkeypatch.setattr(manager, "check_status", check_later)
    request.senders[0].send(np.arange(2, 4, dtype=np.int32))
    request.wait_senders(KVPoll.Failed)
    assert failing and "an earlier chunk failed" in reasons(request.senders)[0]
    until(lambda: not any(manager.rooms_held().values()), "nothing is left", manager.rooms_held)
    request.wait_receivers(KVPoll.Failed)
    reasons(request.receivers)


def overhear(rank: Rank) -> list[list[bytes]]:
    """What comes to a rank from here on."""
    inbox, heard = rank.manager.server_socket, []
    check = inbox.check

    def overheard(frames: list[bytes]) -> bool:
        try:
            return check(frames)
        finally:
            heard.append(frames)

    inbox.check = overheard
    return heard


@pytest.mark.parametrize("how", ["failed elsewhere", "given up meanwhile", "not written"])
def test_each_decode_rank_is_told_once_of_the_end(world: World, how: str, monkeypatch) -> None:
    """A second word would end the next request of the room, and let its pages go while they are written to."""
    (prefill,), (decode,) = world.prefill, world.decode
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    heard, asked = overhear(decode), overhear(prefill)
    if how == "not written":
        prefill.library.result = -1
        request.send().wait_senders(KVPoll.Failed)
    else:
        prefill.library.gate.clear()
        prefill.library.writing.clear()
        request.send()
        assert prefill.library.writing.wait(30)
        # Of which its own ranks may hear sooner than the transfer thread.
        reasons(request.senders)
        if how == "given up meanwhile":
            give_up(request)
            until(lambda: any(frames[4:] == [b"cancel"] for frames in asked), "prefill hears of it")
        prefill.library.gate.set()
    until(lambda: not prefill.manager.queued, "nothing is written any more")
    request.wait_receivers(KVPoll.Failed)
    wait_quiet(request)
    prefill.manager.connect_unwaiting("127.0.0.1", decode.manager.rank_port).send_multipart([b"what is this"])
    until(lambda: heard[-1:] == [[b"what is this"]], "all has come")
    assert [frames[:3] for frames in heard[:-1]] == [[b"1", b"%d" % KVPoll.Failed, b"0"]] and len(heard[0]) == 4
    # After a write that has failed the engine waits for decode to register anew.
    decode.manager.connection_pool.clear()
    again = world.request(1, 24, 4)
    prefill.library.result = 0
    again.bootstrap().send().finish()
    again.assert_landed()
    world.assert_books_closed()


def lost_write(world: World, room: int, prefix: int | None = 4) -> str:
    """What the client of a request hears whose KV cannot be written, or is not."""
    request = world.request(room, 24, prefix).bootstrap()
    request.send()
    until(lambda: request.senders[0].poll() == KVPoll.Failed, "the first rank has failed")
    (why,) = reasons(request.senders[:1])
    request.wait_receivers(KVPoll.Failed)
    reasons(request.receivers)
    until(lambda: all(one.poll() in (KVPoll.Failed, KVPoll.Success) for one in request.senders[1:]), "so have others")
    for one in request.senders[1:]:
        one.clear() if one.poll() == KVPoll.Success else reasons([one])
    return why


def test_a_decode_without_the_flag_is_left_to_the_engine(world: World, monkeypatch) -> None:
    (prefill,) = world.prefill
    prefill.library.result = -1
    assert "Failed to send kv chunk" in lost_write(world, 1, None)
    prefill.library.result = 0
    assert "is not alive" in lost_write(world, 2, None)
    # It is restarted at the same address.
    world.decode[0].manager.connection_pool.clear()
    world.request(3, 24, None).bootstrap().send().finish()
    world.assert_books_closed()


def test_a_word_that_could_not_be_said_is_said_later(world: World, monkeypatch) -> None:
    """All has been written, and then prefill has no descriptor left for a socket to decode."""
    (prefill,) = world.prefill
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    connect = MooncakeKVManager._connect

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(MooncakeKVManager, "_connect", fail)
    request.send()
    until(lambda: not prefill.manager.queued, "the last chunk is done")
    monkeypatch.setattr(MooncakeKVManager, "_connect", connect)
    on_prefill, on_decode = request.fail()
    assert "Too many open files" in on_prefill and "Too many open files" in on_decode
    wait_quiet(request)
    world.assert_books_closed()


def test_a_failure_that_could_not_be_told_is_told_when_decode_gives_up(world: World, monkeypatch) -> None:
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    taken = []

    def refuse(manager: MooncakeKVManager, *args: Any) -> None:
        taken.append(args)
        raise OSError("Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(MooncakeKVManager, "connect_unwaiting", refuse)
        request.senders[0].fail("out of luck")
        request.wait_senders(KVPoll.Failed)
    assert taken and request.receivers[0].poll() == KVPoll.WaitingForInput
    give_up(request)
    wait_quiet(request)
    world.assert_books_closed()


def test_a_worker_without_the_flag_hears_of_success_whoever_was_there_before(world: World) -> None:
    """Its predecessor at this address, which had the flag, had a request of the same room."""
    world.request(1, 24, 4).bootstrap().send().finish()
    until(lambda: not world.prefill[0].manager.queued, "the last chunk is done")
    again = world.request(1, 24, None).bootstrap().send()
    again.finish()
    again.assert_landed()
    world.assert_books_closed()


def test_nothing_queued_is_written_for_what_decode_must_have_given_up(world: World) -> None:
    """This worker stood still, and its transfer thread goes on before its scheduler has looked."""
    (prefill,), (decode,) = world.prefill, world.decode
    ahead, request = world.request(2, 8, 0, aux=1), world.request(1, 24, 4).bootstrap(fenced=True)
    ahead.base = 56
    ahead.bootstrap()
    prefill.library.gate.clear()
    prefill.library.writing.clear()
    ahead.send()
    assert prefill.library.writing.wait(30)
    request.send(3)
    request.senders[0].state.due_at = time.monotonic()
    prefill.library.gate.set()
    until(lambda: not prefill.manager.queued, "the queue is empty")
    assert not any(pool[request.decode_pages].any() for pool in decode.kv)
    on_prefill, on_decode = request.fail()
    assert "for which it waits" in on_prefill and "for which it waits" in on_decode
    wait_quiet(request)
    ahead.finish()
    world.assert_books_closed()


def test_decode_survives_messages_that_mean_nothing_to_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    request = world.request(1, 10, 4).bootstrap()
    decode = push(world.decode[0])
    with caplog.at_level(logging.WARNING):
        for frames in (
            # A prefill with staging buffers asks for each chunk, and then sends without.
            [b"STAGING_REQ", b"1", b"0", b"2", b"127.0.0.1:1"],
            [b"STAGING_REQ", b"1", b"1", b"2", b"127.0.0.1:1"],
            [b""],
            [b"x", b"4", b"0"],
            [b"1", b"4"],
            [b"1", b"four", b"0"],
            [b"99", b"0", b"0"],
            [b"99", b"4", b"0"],
            [b"99", b"0", b"0", b"why"],
            [b"AUX_DATA"],
            [b"AUX_DATA", b"99", b"0", b"0", b"\0\0\0\4", b"late"],
            [b"CHUNK_READY", b"1"],
        ):
            decode.send_multipart(frames)
        until(lambda: caplog.text.count("Ignored a message") >= 5, "the messages are read", lambda: caplog.text)
    request.send().finish()
    request.assert_landed()
    world.assert_books_closed()


def metadata_frames(buffer: int, index: int, data: bytes, num_bytes: int | None = None) -> list[bytes]:
    size = struct.pack(">I", len(data) if num_bytes is None else num_bytes)
    return [b"AUX_DATA", b"1", b"%d" % buffer, b"%d" % index, size, data]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (metadata_frames(0, 1, b"x" * 64), "is for metadata buffer 1, which this request does not have"),
        (metadata_frames(0, -1, b"x" * 64), "which this request does not have"),
        (metadata_frames(1, 0, b"x" * 64), "this worker has parts 0 to 0"),
        (metadata_frames(-1, 0, b"x" * 64), "this worker has parts 0 to 0"),
        (metadata_frames(0, 0, b"x" * 65), "of at most 64 bytes"),
        (metadata_frames(0, 0, b"x" * 64, 63), "says that it has another length"),
        (metadata_frames(0, 0, b"x" * 64)[:5], "has 6 frames, this one of room 1 has 5"),
        ([*metadata_frames(0, 0, b"x" * 64)[:3], b"x", b"", b""], "metadata buffer is not a number"),
    ],
)
def test_metadata_that_cannot_be_right_fails_its_room_only(world: World, frames: list[bytes], why: str) -> None:
    """The engine writes it to where it says, which ends the process or overwrites what is another request's."""
    bad, good = world.request(1, 10, 4).bootstrap(fenced=True), world.request(2, 10, 4, aux=1)
    good.base = 48
    good.bootstrap()
    push(world.decode[0]).send_multipart(frames)
    bad.wait_receivers(KVPoll.Failed)
    assert not world.decode[0].aux.any()
    reason = reasons(bad.receivers)[0]
    assert "prefill's metadata cannot be used: " in reason and why in reason
    bad.receivers[0].cancel()
    bad.wait_senders(KVPoll.Failed)
    reasons(bad.senders)
    wait_quiet(bad)
    good.send().finish()
    good.assert_landed()
    world.assert_books_closed()


def test_metadata_comes_in_messages_where_it_is_not_written(world: World, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
    request = world.request(1, 10, 4, aux=3).bootstrap().send()
    request.finish()
    request.assert_landed()
    world.assert_books_closed()


def test_metadata_goes_to_the_engine_as_it_is_without_the_flag(world: World, monkeypatch) -> None:
    """Prefill with a draft model and decode without it: an item is longer than that of decode."""
    manager, taken = world.decode[0].manager, []
    world.request(1, 10, 4).bootstrap()
    monkeypatch.setattr(manager.server_args, "disaggregation_decode_enable_radix_cache", False)
    monkeypatch.setattr(manager, "_handle_aux_data", taken.append)
    frames = metadata_frames(0, 0, b"x" * 65)
    push(world.decode[0]).send_multipart(frames)
    until(lambda: taken == [frames], "the message is handed on")
    assert manager.request_status[1] != KVPoll.Failed


@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_what_comes_late_is_not_of_a_request_that_has_not_asked_yet(world: World, caplog, status: KVPoll) -> None:
    """Its room has been used before, and decode has been told twice of that."""
    request = world.request(1, 10, 4).start_prefill().start_decode()
    decode = push(world.decode[0])
    decode.send_multipart([b"1", b"%d" % status, b"0", b"late"])
    decode.send_multipart([b"what is this"])
    until(lambda: "Ignored a message" in caplog.text, "both are read")
    assert request.receivers[0].poll() == KVPoll.WaitingForInput
    request.ask().wait_senders(KVPoll.WaitingForInput)
    request.senders[0].init(request.num_pages, request.aux)
    request.send().finish()
    request.assert_landed()
    world.assert_books_closed()


def test_a_room_that_has_failed_stays_so_when_it_is_asked_for_again(world: World) -> None:
    request = world.request(1, 26, None).start_prefill().start_decode()
    pages = [np.arange(first, first + 7, dtype=np.int32) for first in (20, 40)]
    request.ask(kv_indices=pages[0], decode_prefix_len=None).wait_senders(KVPoll.WaitingForInput)
    manager = world.prefill[0].manager
    manager.fail_room(1, "a write has failed")
    # The engine takes the higher of two states.
    manager.request_status[1] = KVPoll.Failed
    request.ask(kv_indices=pages[1], decode_prefix_len=None)
    until(lambda: first_pages(manager, 1) == [40], "the second message is read")
    assert manager.request_status[1] == KVPoll.Failed


# ---- decode gives a request up ----


def give_up(request: Request) -> None:
    """What decode's queue does with a failed transfer before it keeps the pages in quarantine."""
    for receiver in request.receivers:
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
        reasons([receiver])
        receiver.cancel()


def wait_quiet(request: Request) -> None:
    for receiver in request.receivers:
        until(receiver.writers_done, "no writer is left")


def test_pages_of_an_aborted_request_are_kept_until_its_write_is_done(world: World) -> None:
    library = world.prefill[0].library
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    library.gate.clear()
    library.writing.clear()
    request.senders[0].send(np.arange(1, 3, dtype=np.int32))
    assert library.writing.wait(30)
    give_up(request)
    until(lambda: request.senders[0].poll() is not None and request.senders[0].has_failed(), "prefill hears of it")
    time.sleep(0.05)
    assert not request.receivers[0].writers_done() and request.senders[0].poll() == KVPoll.WaitingForInput
    library.gate.set()
    request.wait_senders(KVPoll.Failed)
    assert "decode gave the request up" in reasons(request.senders)[0]
    wait_quiet(request)
    world.assert_books_closed()


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "mla"), [(1, 2, False), (2, 1, False), (2, 1, True)])
@pytest.mark.parametrize("when", ["asked", "bootstrapped", "sent", "prompt to come", "failed"])
def test_every_rank_answers_when_decode_gives_up(monkeypatch, prefill_tp, decode_tp, mla, when) -> None:
    world = World(monkeypatch, prefill_tp=prefill_tp, decode_tp=decode_tp, mla=mla)
    request = world.request(1, 24, 4)
    if when in ("asked", "prompt to come"):
        request.start_decode(fenced=True).ask()
        if when == "asked":
            request.start_prefill()
    else:
        request.bootstrap(fenced=True)
    if when == "sent":
        request.send()
        request.wait_senders(KVPoll.Success)
        for sender in request.senders:
            sender.clear()
    if when == "failed":
        request.senders[0].fail("out of luck")
        request.wait_senders(KVPoll.Failed) if prefill_tp == 1 else reasons(request.senders)
    give_up(request)
    if when == "prompt to come":
        wait_quiet(request)
        request.start_prefill()
    if when != "sent" and not (when == "failed" and prefill_tp > 1):
        # A dummy rank hears of it from the other ranks, when prefill reduces their polls.
        writers = [s for s in request.senders if not (mla and prefill_tp > 1 and s.kv_mgr.attn_tp_rank)]
        for sender in writers:
            until(lambda sender=sender: sender.poll() == KVPoll.Failed, "the sender fails", sender.poll)
        reasons(request.senders)
    if when != "prompt to come":
        wait_quiet(request)
    world.assert_books_closed()
    world.close()


def test_the_failure_of_a_dummy_rank_does_not_count_for_the_rank_that_writes(monkeypatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=1, mla=True)
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    reasons(request.senders[1:])
    time.sleep(0.05)
    assert request.receivers[0].poll() == KVPoll.WaitingForInput
    give_up(request)
    time.sleep(0.05)
    assert not request.receivers[0].writers_done()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    world.close()


def test_a_rank_that_gives_up_late_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(1, 24, 4).start_decode(fenced=True).ask()
    first, second = request.receivers
    for receiver in request.receivers:
        receiver.abort()
    first.cancel()
    until(first.writers_done, "the first rank is answered")
    # Now the prompt comes to prefill, which has forgotten that the second rank asked.
    request.start_prefill()
    second.cancel()
    time.sleep(0.05)
    request.wait_senders(KVPoll.Failed)
    until(second.writers_done, "the second rank is answered")
    world.close()


def test_queued_chunks_are_not_sent_for_a_new_request_of_the_room(world: World) -> None:
    """A client that tries again under the same number, while the queue still has some of its first try."""
    library = world.prefill[0].library
    first, other = world.request(1, 24, 4).bootstrap(fenced=True), world.request(2, 24, 4, aux=1).bootstrap()
    other.base += 8
    library.gate.clear()
    library.writing.clear()
    other.send()
    assert library.writing.wait(30)
    first.send(3)
    give_up(first)
    first.wait_senders(KVPoll.Failed)
    wait_quiet(first)
    again = world.request(1, 24, 4).start_prefill().start_decode().ask()
    on_prefill, on_decode = again.fail()
    assert "chunks of an earlier request" in on_prefill and "chunks of an earlier request" in on_decode
    library.gate.set()
    other.wait_senders(KVPoll.Success)
    reasons(first.senders)
    for end in (*other.senders, *other.receivers):
        end.clear()
    world.assert_books_closed()
    world.request(1, 24, 4).bootstrap().send().wait_senders(KVPoll.Success)


def test_nothing_is_sent_for_a_request_that_decode_gave_up(world: World) -> None:
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    give_up(request)
    until(lambda: bool(world.prefill[0].manager.rooms.refused), "prefill hears of it")
    request.send()
    time.sleep(0.05)
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    assert world.prefill[0].library.written == 0


def test_a_rank_that_has_everything_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    first, second = request.receivers
    request.senders[0].send(np.arange(1, 6, dtype=np.int32))
    until(lambda: first.poll() == KVPoll.Success, "the first rank has its part")
    request.senders[1].fail("out of luck")
    until(lambda: second.poll() == KVPoll.Failed, "the second rank hears of the failure")
    for receiver in request.receivers:
        reasons([receiver])
        receiver.cancel()
        assert receiver.writers_done()
    request.senders[0].poll()
    reasons(request.senders)
    world.assert_books_closed()
    world.close()


def test_a_failed_write_waits_for_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_THREAD_POOL_SIZE", "16")
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    library, request = world.prefill[0].library, world.request(1, 24, 4).bootstrap(fenced=True)
    copy, calls = library.batch_transfer_sync, []

    def first_fails(*args) -> int:
        calls.append(args)
        return copy(*args) if len(calls) > 1 else -1 if library.writing.wait(30) else 0

    library.batch_transfer_sync = first_fails
    library.gate.clear()
    library.writing.clear()
    request.send()
    assert library.writing.wait(30)
    sender = request.senders[0]
    until(lambda: sender.kv_mgr.request_status.get(1) == KVPoll.Failed, "the write has failed")
    assert sender.poll() == KVPoll.WaitingForInput
    library.gate.set()
    request.wait_senders(KVPoll.Failed)
    world.close()


def test_a_prefill_that_never_answers_is_not_waited_for_for_ever(world: World) -> None:
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    give_up(request)
    assert not request.receivers[0].writers_done()
    request.receivers[0].state.given_up_at -= 301
    assert request.receivers[0].writers_done()


def test_a_request_of_a_room_that_has_ended_well_is_given_up_as_any_other(world: World) -> None:
    """Before its prompt has come to prefill, which remembers the end of the last request of the room."""
    world.request(1, 24, 8).bootstrap().send().finish()
    until(lambda: not world.prefill[0].manager.queued, "the last chunk is done")
    again = world.request(1, 24, 8).start_decode(fenced=True).ask()
    give_up(again)
    wait_quiet(again)
    again.start_prefill().wait_senders(KVPoll.Failed)
    assert "decode gave the request up" in reasons(again.senders)[0]
    world.assert_books_closed()


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_comes_again_while_the_first_is_sent_fails_alone(world: World, aborted: bool) -> None:
    """As a gateway sends it whose connection was closed."""
    first, again = world.request(7, 26, 8), world.request(7, 26, 8)
    first.bootstrap()
    again.start_prefill()
    gate = world.prefill[0].library.gate
    gate.clear()
    first.send()
    if aborted:
        again.senders[0].abort()
    again.wait_senders(KVPoll.Failed)
    with pytest.raises(Exception, match="belongs to a request that is still being served; each request needs"):
        again.senders[0].failure_exception()
    gate.set()
    first.finish()
    first.assert_landed()
    world.assert_books_closed(7)


def test_a_failure_of_the_first_is_not_undone_by_a_second_request_of_its_room(world: World) -> None:
    """The engine takes the higher of two statuses, and a new request begins above a failure."""
    first, again = world.request(7, 26, 8), world.request(7, 26, 8)
    first.bootstrap()
    world.prefill[0].manager.fail_room(7, "the link is down")
    again.start_prefill()
    first.wait_senders(KVPoll.Failed)
    assert "the link is down" in reasons(first.senders)[0]


def test_a_second_request_that_decode_computes_does_not_end_the_first(world: World) -> None:
    first, again = world.request(7, 26, 8), world.request(7, 26, 8)
    first.bootstrap().send()
    first.wait_receivers(KVPoll.Success)
    again.start_prefill().senders[0].drop()
    first.finish()
    first.assert_landed()
    world.assert_books_closed(7)


@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_a_message_that_is_read_while_its_room_ends_leaves_nothing_behind(world: World, status: KVPoll) -> None:
    request = world.request(1, 24, 8).bootstrap(fenced=True)
    (receiver,), manager = request.receivers, world.decode[0].manager
    read, ended = threading.Event(), threading.Event()

    class Awaited(dict):
        """The scheduler ends the request just when the thread that reads messages has found its room."""

        def __contains__(self, room: object) -> bool:
            found = dict.__contains__(self, room)
            if threading.current_thread() is not threading.main_thread() and not read.is_set():
                read.set()
                assert ended.wait(30)
            return found

    give_up(request)
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    manager.awaited_rooms, manager.request_status[1] = Awaited({1: AwaitedRoom({0})}), KVPoll.Failed
    push(world.decode[0]).send_multipart([b"1", b"%d" % status, b"0", b"said"])
    assert read.wait(30)
    receiver.end()
    ended.set()
    other = world.request(2, 8, 0)
    other.bootstrap().send().finish()
    assert not any(manager.rooms_held().values())
    world.assert_books_closed()


def test_a_failure_in_the_engines_words_does_not_say_that_nothing_is_written_any_more(world: World) -> None:
    """It is sent while other writes of the same chunk may go on; the patch set's own comes after them."""
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    push(world.decode[0]).send_multipart([b"1", b"%d" % KVPoll.Failed, b"0"])
    request.wait_receivers(KVPoll.Failed)
    (receiver,) = request.receivers
    reasons(request.receivers)
    receiver.state.given_up_at = time.monotonic()
    assert not receiver.writers_done()
    world.decode[0].manager.prefills.capabilities.clear()
    assert receiver.writers_done()
