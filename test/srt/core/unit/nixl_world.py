"""Workers over NIXL: real managers of both roles, real sockets, real threads.

Only NIXL's library is a stand-in: transfers are done when the test says so, and notifications travel in this process.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_classes import engine_class
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.delta_receiver import ReceiverState
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver, NixlKVSender, TransferStatus
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until
from wire_ends import Ends, WireRank, WireWorld

ENGINE_RECEIVER = engine_class(NixlKVReceiver)
ADDR = "10.0.0.9:8998"
PAGE, ITEM, STATE_ITEM = 4, 64, 96
GOOD, BAD = 101, 102


class Transfer:
    def __init__(self, wire: Wire, sender: str, peer: str, notification: bytes, sources: Any, targets: Any) -> None:
        self.wire, self.sender, self.peer, self.notification, self.targets = wire, sender, peer, notification, targets
        self.sources = sources
        self.state, self.released, self.kind = "PROC", False, "WRITE"

    def finish(self) -> None:
        if self.state == "PROC":
            self.state = "DONE"
            if self.notification:
                self.wire.deliver(self.sender, self.peer, self.notification)


class Wire:
    """All NIXL agents of a test. ``held`` keeps transfers under way until they are finished by hand."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.held = False
        self.transfers: list[Transfer] = []
        self.lock = threading.Lock()

    def deliver(self, sender: str, peer: str, notification: bytes) -> None:
        with self.lock:
            self.agents[peer].inbox.setdefault(sender, []).append(notification)


class Agent:
    """What a manager uses of ``nixl_agent``."""

    def __init__(self, wire: Wire, name: str) -> None:
        self.wire, self.name = wire, name
        self.known: set[str] = set()
        self.inbox: dict[str, list[bytes]] = {}
        self.sent: list[tuple[str, bytes]] = []
        wire.agents[name] = self

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def register_memory(self, regions: Any, kind: str, *rest: Any) -> object:
        return object()

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        if metadata.decode() not in self.wire.agents:
            raise RuntimeError("no agent can be made of this metadata")
        self.known.add(metadata.decode())
        return metadata.decode()

    def get_xfer_descs(self, regions: Any, kind: str, *rest: Any) -> Any:
        return regions

    def initialize_xfer(self, kind: str, source: Any, target: Any, peer: str, notification: bytes) -> Transfer:
        if peer not in self.known:
            raise RuntimeError(f"agent {peer} is not known")
        made = Transfer(self.wire, self.name, peer, notification, source, target)
        made.kind = kind
        return made

    def transfer(self, transfer: Transfer) -> str:
        self.wire.transfers.append(transfer)
        if not self.wire.held:
            transfer.finish()
        return transfer.state

    def check_xfer_state(self, transfer: Transfer) -> str:
        assert not transfer.released
        return transfer.state

    def release_xfer_handle(self, transfer: Transfer) -> None:
        assert not transfer.released and transfer.state != "PROC"
        transfer.released = True

    def send_notif(self, peer: str, notification: bytes) -> None:
        if peer not in self.known:
            raise RuntimeError(f"agent {peer} is not known")
        self.sent.append((peer, notification))
        self.wire.deliver(self.name, peer, notification)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self.wire.lock:
            inbox, self.inbox = self.inbox, {}
        return inbox


def kv_address(kind: int, layer: int) -> int:
    """Where every rank has the keys (0) or values (1) of a layer."""
    return (1 + kind + 16 * layer) << 20


class Rank(WireRank):
    """One TP rank: its agent and its manager."""

    def give_memory(self, world: World, args: KVArgs) -> None:
        base = 1 << 20
        args.kv_data_ptrs = [kv_address(kind, layer) for kind in (0, 1) for layer in self.layers]
        args.kv_data_lens = [base] * len(args.kv_data_ptrs)
        args.kv_item_lens = [ITEM // self.tp] * len(args.kv_data_ptrs)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [3 * base], [640], [64]
        if world.states is not None:
            args.state_type, args.state_data_ptrs = world.state_type, [4 * base, 5 * base]
            # Of a window keys and values, which are alike.
            other = STATE_ITEM * (2 if world.state_type == "mamba" else 1)
            args.state_data_lens, args.state_item_lens = [base, base], [STATE_ITEM, other]
        args.kv_head_num = 4 // self.tp

    def make_manager(self, world: World, args: KVArgs, mode: DisaggregationMode, options: Any) -> None:
        before = set(threading.enumerate())
        self.manager = NixlKVManager(args, mode, options, False)
        self.threads = set(threading.enumerate()) - before

    @property
    def agent(self) -> Agent:
        return self.manager.agent

    def told(self, text: str) -> list[str]:
        """What this rank has sent as notifications of its own that contain ``text``."""
        return [message.decode() for _, message in self.agent.sent if text in message.decode()]


class Request(Ends):
    sender_type, receiver_type = NixlKVSender, NixlKVReceiver

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(world, *args)
        # Of an earlier one of its room.
        self._before = len(world.wire.transfers)

    def start_decode(self, fenced: bool = False) -> Request:
        super().start_decode(fenced)
        for rank, receiver in zip(self.world.decode, self.receivers, strict=True):
            # The registration has a socket of its own, so messages of the test's might overtake it.
            for peer in {info["rank_port"] for info in receiver.bootstrap_infos}:
                manager = next(r.manager for r in self.world.prefill if r.manager.rank_port == peer)
                name = rank.agent.name
                until(lambda m=manager, n=name: n in m.agent.known, "decode's registration is read")
        return self

    def written(self) -> list[int]:
        """Where items of KV have been written for this room, by their addresses."""
        item, found = ITEM // self.world.decode[0].tp, []
        for transfer in self.world.wire.transfers[self._before :]:
            if transfer.notification.startswith(b"%d_kv_" % self.room):
                for address, length, _ in np.asarray(transfer.targets).tolist():
                    found += range(address, address + length, item)
        return sorted(found)

    def assert_landed(self) -> None:
        item = ITEM // self.world.decode[0].tp
        places = itertools.product((0, 1), range(self.world.layers), self.decode_pages[self.first_page :].tolist())
        expected = sorted(kv_address(kind, layer) + item * page for kind, layer, page in places)
        assert self.written() == sorted(expected * len(self.world.decode))


class World(WireWorld):
    """prefill_cp: context-parallel ranks of prefill."""

    addr, request_type = ADDR, Request

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        states: tuple[int, int] | None = None,
        stages: tuple[int, ...] = (1,),
        prefill_cp: int = 1,
        windows: tuple[list[int], list[int]] | None = None,
        state_type: str = "swa",
        page_size: int = PAGE,
    ):
        self.page_size = page_size
        self.prepare(monkeypatch, stages, states, windows, state_type)
        self.wire, self._names = Wire(), itertools.count()
        library = ModuleType("nixl._api")
        library.nixl_agent = lambda name, config: Agent(self.wire, name)
        library.nixl_agent_config = lambda **options: None
        monkeypatch.setitem(sys.modules, "nixl._api", library)
        monkeypatch.setattr(NixlKVManager, "register_to_bootstrap", lambda manager: None)
        monkeypatch.setattr(
            engine_class(common.CommonKVReceiver),
            "_get_bootstrap_info_from_server",
            lambda receiver, dp, cp, tp, pp: {
                "rank_ip": "127.0.0.1",
                "rank_port": self.prefill[(pp * prefill_cp + cp) * prefill_tp + tp].manager.rank_port,
            },
        )
        places = itertools.product(range(len(stages)), range(prefill_cp), range(prefill_tp))
        self.prefill = [
            Rank(self, DisaggregationMode.PREFILL, rank, prefill_tp, stage=stage, cp_rank=cp_rank, cp=prefill_cp)
            for stage, cp_rank, rank in places
        ]
        self.decode = [Rank(self, DisaggregationMode.DECODE, rank, decode_tp) for rank in range(decode_tp)]
        for rank in self.decode:
            info = common.PrefillServerInfo(prefill_tp, prefill_cp, 1, len(stages), page_size, "auto", True)
            rank.manager._resolve_rank_mapping(info)
            rank.manager.prefill_info_table[ADDR] = info
            rank.manager.prefills.capabilities[ADDR] = Capabilities(version=1)

    def push(self, *messages: list[bytes], rank: int = 0) -> None:
        """Adds that they have been read, which takes a living thread."""
        # ZeroMQ keeps the order of one socket; a message that cannot be read, for a room of its own, marks the end.
        marker, manager = 900_000_000 + next(self._names), self.prefill[rank].manager
        super().push(*messages, message(marker, "nobody", prefix=b"marker"), rank=rank)
        until(lambda: marker in manager.rooms.refused, "the thread that reads messages goes on")
        del manager.rooms.refused[marker]

    def hold(self) -> None:
        """Keep what is written from here on under way."""
        self.wire.held = True

    def wait_for_write(self) -> None:
        assert self.wire.transfers

    def let_go(self) -> None:
        self.wire.held = False
        for transfer in self.wire.transfers:
            transfer.finish()

    def ends_told(self, room: int) -> Callable[[], int]:
        """How often decode has been told that a request of ``room`` has failed."""
        return lambda: len(self.prefill[0].told(f"{room}_fail"))

    @contextmanager
    def without_words(self) -> Iterator[None]:
        """Prefill can tell decode nothing meanwhile."""
        with pytest.MonkeyPatch.context() as patch:

            def lost(peer: str, notification: bytes) -> None:
                raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

            for rank in self.prefill:
                patch.setattr(rank.manager.agent, "send_notif", lost)
            yield


def message(
    room: int | bytes, agent: str, prefix: bytes = b"8", num_pages: int = 5, dummy: bytes = b"0"
) -> list[bytes]:
    """A request for KV as docs/protocol.md has it, written down here once more."""
    return [
        b"NixlMsgGuard",
        room if isinstance(room, bytes) else b"%d" % room,
        b"127.0.0.1",
        b"5555",
        agent.encode(),
        np.arange(34, 34 + num_pages, dtype="<i4").tobytes(),
        b"1",
        b"1",
        b"",
        prefix,
        dummy,
    ]


def bare(dummy: bool = False) -> NixlKVReceiver:
    receiver = object.__new__(NixlKVReceiver)
    receiver.state = ReceiverState()
    receiver.kv_mgr = SimpleNamespace(
        local_ip="10.0.0.1",
        rank_port=77,
        agent=SimpleNamespace(name="agent-of-decode", get_agent_metadata=lambda: b"metadata"),
        transfer_statuses={2**62: TransferStatus()},
        attn_tp_size=2,
        kv_args=SimpleNamespace(
            kv_data_ptrs=[1, 2], aux_data_ptrs=[3], state_data_ptrs=[], gpu_id=0, engine_rank=1, kv_item_lens=[64]
        ),
        prefills=SimpleNamespace(of=lambda addr: Capabilities(version=1)),
        update_transfer_status=lambda: None,
    )
    receiver.bootstrap_room, receiver.required_dst_info_num, receiver.required_prefill_response_num = 2**62, 2, 1
    receiver.bootstrap_addr = ""
    receiver.bootstrap_infos = [{"rank_ip": "10.0.0.2", "rank_port": 5, "is_dummy": dummy}] * 2
    return receiver
