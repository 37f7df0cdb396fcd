"""Workers over Mooncake: real managers of both roles, real bootstrap server, real sockets, real threads.

Only Mooncake's library is a stand-in: it copies between two places of this process.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch
from engine_classes import engine_class
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common.delta_receiver import ReceiverState
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until
from wire_ends import Counters, Ends, WireRank, WireWorld, reasons

from sglang_pd_radix.tools.cluster import free_ports

ENGINE_RECEIVER = engine_class(MooncakeKVReceiver)
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


class Rank(WireRank):
    """One rank: its pools, its library and its manager."""

    def give_memory(self, world: World, args: KVArgs) -> None:
        self.library = Library()
        heads = HEADS if world.mla else HEADS // self.tp
        # Of the model's buffers, K of all layers and then V, those that are here.
        self.buffers = [kind * world.layers + layer for kind in range(1 if world.mla else 2) for layer in self.layers]
        shape = (NUM_PAGES, world.page_size, heads, HEAD_BYTES)
        self.kv = [np.zeros(shape, np.uint8) for _ in self.buffers]
        self.aux = np.zeros((NUM_AUX, 64), np.uint8)
        args.kv_data_ptrs = [pool.ctypes.data for pool in self.kv]
        args.kv_data_lens = [pool.nbytes for pool in self.kv]
        args.kv_item_lens = [world.page_size * heads * HEAD_BYTES] * len(self.kv)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [self.aux.ctypes.data], [self.aux.nbytes], [64]
        # Two kinds of state, of different size, in slots.
        self.states = [np.zeros((8, size), np.uint8) for size in (24, 40)]
        if world.states is not None:
            args.state_type, args.state_data_ptrs = world.state_type, [pool.ctypes.data for pool in self.states]
            args.state_data_lens = [pool.nbytes for pool in self.states]
            args.state_item_lens = [pool.shape[1] for pool in self.states]
        args.kv_head_num, args.total_kv_head_num = heads, HEADS

    def make_manager(self, world: World, args: KVArgs, mode: DisaggregationMode, options: Any) -> None:
        made: list[MooncakeKVManager] = []

        def make() -> None:
            made.append(MooncakeKVManager(args, mode, options, world.mla))

        # The engine's threads take over that their maker is a daemon; they never end.
        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        maker.join()
        self.manager = made[0]
        self.manager.events = Counters()
        if world.staging and not world.mla:
            # As the queues of both workers do it, where a tensor's first dimension is the slot.
            slots = [torch.from_numpy(pool).view(-1, args.kv_head_num, HEAD_BYTES) for pool in self.kv]
            layers = len(self.layers)
            self.manager.set_kv_buffer_tensors(slots[:layers], slots[layers:], world.page_size)


class Request(Ends):
    sender_type, receiver_type = MooncakeKVSender, MooncakeKVReceiver

    @property
    def decode_pages(self) -> np.ndarray:
        return super().decode_pages[::-1].copy()

    def assert_landed(self) -> None:
        """And the metadata."""
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


class World(WireWorld):
    request_type: type = Request

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
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
        self.page_size, self.mla, self.staging = page_size, mla, staging
        self.prepare(monkeypatch, stages, states, windows, state_type)
        monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", str(int(staging)))
        for side in ("BUFFER_SIZE", "POOL_SIZE"):
            monkeypatch.setenv(f"SGLANG_DISAGG_STAGING_{side}_MB", "1")
        monkeypatch.setattr(conn, "get_mooncake_transfer_engine", lambda: self.current.library)
        (self.port,) = free_ports(1)
        self.addr = f"127.0.0.1:{self.port}"
        self.server = MooncakeKVBootstrapServer("127.0.0.1", self.port)
        until(self._up, "the bootstrap server answers")
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

    def count(self) -> list[Counters]:
        return [rank.manager.events for rank in self.prefill]

    def assert_books_closed(self, *rooms: int) -> None:
        super().assert_books_closed()
        for rank in self.prefill:
            rooms_of = rank.manager.rooms
            assert not rooms_of.refused and not rooms_of.given_up

    def hold(self) -> None:
        """Keep what is written from here on under way."""
        for rank in self.prefill:
            rank.library.gate.clear()
            rank.library.writing.clear()

    def wait_for_write(self) -> None:
        assert self.prefill[0].library.writing.wait(30)

    def let_go(self) -> None:
        for rank in self.prefill:
            rank.library.gate.set()

    def ends_told(self, room: int) -> Callable[[], int]:
        """How often decode has been told that a request of ``room`` has failed, from here on."""
        inbox, heard = self.decode[0].manager.server_socket, []
        check = inbox.check

        def overheard(frames: list[bytes]) -> bool:
            try:
                return check(frames)
            finally:
                heard.append(frames)

        inbox.check = overheard
        return lambda: sum(frames[:2] == [b"%d" % room, b"%d" % KVPoll.Failed] for frames in heard)

    @contextmanager
    def without_words(self) -> Iterator[None]:
        """Prefill can tell decode nothing meanwhile."""
        with pytest.MonkeyPatch.context() as patch:

            def lost(manager: MooncakeKVManager, *args: Any) -> None:
                raise OSError("Too many open files")

            patch.setattr(MooncakeKVManager, "connect_unwaiting", lost)
            yield


def bare(dummy: bool = False) -> MooncakeKVReceiver:
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
