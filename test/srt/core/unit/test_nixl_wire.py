"""The NIXL backend trusts nothing that comes over the wire: real managers of both roles, real sockets, real threads.

Only NIXL's library is a stand-in: transfers are done when the test says so, and notifications travel in this process.
"""

from __future__ import annotations

import itertools
import logging
import operator
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from engine_classes import engine_class
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.delta_receiver import ReceiverState
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.nixl.conn import (
    NixlKVManager,
    NixlKVReceiver,
    NixlKVSender,
    TransferStatus,
)
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until
from wire_ends import Ends, first_pages, keep_threads_out

BARE_RECEIVER = conn.__pd_radix__["originals"]["NixlKVReceiver"]
ADDR = "10.0.0.9:8998"
PAGE, ITEM, STATE_ITEM = 4, 64, 96
GOOD, BAD = 101, 102


# ---- stand-ins ----


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


class Rank:
    """One TP rank of one worker, or of one of its pipeline stages: its agent and its manager."""

    def __init__(
        self, world: World, mode: DisaggregationMode, rank: int, tp: int, stage: int = 0, cp_rank: int = 0, cp: int = 1
    ) -> None:
        stages = world.stages if mode == DisaggregationMode.PREFILL else [range(sum(map(len, world.stages)))]
        self.rank, self.tp, self.stage, self.layers = rank, tp, stage, stages[stage]
        self.cp_rank, self.cp = cp_rank, cp
        base = 1 << 20
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, stage, 0, 0
        args.kv_data_ptrs = [kv_address(kind, layer) for kind in (0, 1) for layer in self.layers]
        args.kv_data_lens = [base] * len(args.kv_data_ptrs)
        args.kv_item_lens = [ITEM // tp] * len(args.kv_data_ptrs)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [3 * base], [640], [64]
        args.state_data_ptrs = args.state_data_lens = args.state_item_lens = []
        args.state_type, args.prefill_start_layer, args.page_size = "none", self.layers.start, PAGE
        if world.states is not None:
            args.state_type, args.state_data_ptrs = world.state_type, [4 * base, 5 * base]
            # Of a window keys and values, which are alike.
            other = STATE_ITEM * (2 if world.state_type == "mamba" else 1)
            args.state_data_lens, args.state_item_lens = [base, base], [STATE_ITEM, other]
        args.kv_head_num = 4 // tp
        server_args = SimpleNamespace(
            host="127.0.0.1",
            disaggregation_bootstrap_port=1,
            disaggregation_mode=mode.value,
            dist_init_addr=None,
            enable_dp_attention=False,
            dp_size=1,
            pp_size=len(stages),
            load_balance_method="follow_bootstrap_room",
            kv_cache_dtype="auto",
            served_model_name="m",
            enable_metrics=False,
            enable_hisparse=False,
            disaggregation_decode_enable_radix_cache=True,
        )
        world.current = self
        before = set(threading.enumerate())
        self.manager = NixlKVManager(args, mode, server_args, False)
        self.manager.num_layers = sum(map(len, world.stages))
        self.threads = set(threading.enumerate()) - before

    @property
    def agent(self) -> Agent:
        return self.manager.agent

    def told(self, text: str) -> list[str]:
        """What this rank has sent as notifications of its own that contain ``text``."""
        return [message.decode() for _, message in self.agent.sent if text in message.decode()]


class World:
    """A prefill and a decode worker, and a socket to each prefill rank for messages of the test's own making."""

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
    ):
        """states: for a model with states, the slot of the request on prefill and on decode. windows: for one with
        sliding windows, the pages of its window; or of another ``state_type``.

        stages: layers of each pipeline stage of prefill. prefill_cp: its context-parallel ranks.
        """
        self.state_type = "mamba" if windows is None else state_type
        self.states = windows if states is None else ([states[0]], [states[1]])
        self.stages = [range(sum(stages[:i]), sum(stages[: i + 1])) for i in range(len(stages))]
        keep_threads_out(monkeypatch)
        self.wire, self.current = Wire(), None
        self._names = itertools.count()
        library = ModuleType("nixl._api")
        library.nixl_agent = lambda name, config: Agent(self.wire, name)
        library.nixl_agent_config = lambda **options: None
        monkeypatch.setitem(sys.modules, "nixl._api", library)
        for name, value in (("size", 1), ("rank", 0)):
            monkeypatch.setattr(common, f"get_attention_dp_{name}", lambda value=value: value)
        monkeypatch.setattr(common, "get_attention_cp_size", lambda: self.current.cp)
        monkeypatch.setattr(common, "get_attention_cp_rank", lambda: self.current.cp_rank)
        monkeypatch.setattr(common, "get_attention_tp_size", lambda: self.current.tp)
        monkeypatch.setattr(common, "get_attention_tp_rank", lambda: self.current.rank)
        monkeypatch.setattr(common, "get_pp_group", lambda: None)
        monkeypatch.setattr(common, "get_local_ip_auto", lambda: "127.0.0.1")
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
        self.prefill = [Rank(self, DisaggregationMode.PREFILL, r, prefill_tp, s, c, prefill_cp) for s, c, r in places]
        self.decode = [Rank(self, DisaggregationMode.DECODE, r, decode_tp) for r in range(decode_tp)]
        for rank in self.decode:
            info = common.PrefillServerInfo(prefill_tp, prefill_cp, 1, len(stages), PAGE, "auto", True)
            rank.manager._resolve_rank_mapping(info)
            rank.manager.prefill_info_table[ADDR] = info
            rank.manager.prefills.capabilities[ADDR] = Capabilities(version=1)
        self.sockets = []
        for rank in self.prefill:
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.connect(f"tcp://127.0.0.1:{rank.manager.rank_port}")
            self.sockets.append(socket)

    def request(self, room: int, prompt_len: int = 26, prefix_len: int | None = 8) -> Request:
        return Request(self, room, prompt_len, prefix_len)

    def push(self, *messages: list[bytes], rank: int = 0) -> None:
        """Send prefill messages and wait until they have been read, which takes a living thread."""
        for frames in messages:
            self.sockets[rank].send_multipart(frames)
        # ZeroMQ keeps the order of one socket; a message that cannot be read, for a room of its own, marks the end.
        marker = 900_000_000 + next(self._names)
        manager = self.prefill[rank].manager
        self.sockets[rank].send_multipart(message(marker, "nobody", prefix=b"marker"))
        until(lambda: marker in manager.rooms.refused, "the thread that reads messages goes on")
        del manager.rooms.refused[marker]

    def assert_healthy(self, room: int = GOOD) -> None:
        """Another request is served from start to end."""
        request = self.request(room).bootstrap()
        request.send()
        request.wait_senders(KVPoll.Success)
        request.wait_receivers(KVPoll.Success)


class Request(Ends):
    """One request, by what the two schedulers do with it."""

    def __init__(self, world: World, room: int, prompt_len: int, prefix_len: int | None) -> None:
        self.world, self.room, self.prompt_len, self.prefix_len = world, room, prompt_len, prefix_len
        self.num_pages = pages(prompt_len, PAGE)
        self.first_page = (prefix_len or 0) // PAGE
        self.senders: list[NixlKVSender] = []
        self.receivers: list[NixlKVReceiver] = []

    def start_prefill(self) -> Request:
        for rank in self.world.prefill:
            sender = NixlKVSender(rank.manager, ADDR, self.room, [rank.rank], rank.stage)
            sender.prompt_len = self.prompt_len
            self.senders.append(sender)
        return self

    def start_decode(self) -> Request:
        for rank in self.world.decode:
            receiver = NixlKVReceiver(rank.manager, ADDR, self.room)
            receiver.init(0)
            assert receiver.poll() == KVPoll.WaitingForInput and receiver.peer_takes_prefix
            self.receivers.append(receiver)
            # The registration has a socket of its own, so messages of the test's might overtake it.
            for peer in {info["rank_port"] for info in receiver.bootstrap_infos}:
                manager = next(r.manager for r in self.world.prefill if r.manager.rank_port == peer)
                name = rank.agent.name
                until(lambda m=manager, n=name: n in m.agent.known, "decode's registration is read")
        return self

    def ask(self, **changes: Any) -> Request:
        """Send decode's request for KV, with ``changes`` in what send_metadata is given."""
        for receiver in self.receivers:
            given = {"decode_prefix_len": self.prefix_len, **changes}
            indices = given.pop("kv_indices", np.arange(32 + self.first_page, 32 + self.num_pages, dtype=np.int32))
            states = given.pop("states", self.world.states and self.world.states[1])
            receiver.send_metadata(indices, 1, states, **given)
        return self

    def frames(self, decode_rank: int = 0) -> list[bytes]:
        """The message that decode would send for this request to the first prefill rank."""
        return sent_frames(self.receivers[decode_rank], lambda: self.ask_of(decode_rank))[0]

    def ask_of(self, decode_rank: int) -> None:
        indices = np.arange(32 + self.first_page, 32 + self.num_pages, dtype=np.int32)
        self.receivers[decode_rank].send_metadata(indices, 1, None, decode_prefix_len=self.prefix_len)

    def bootstrap(self) -> Request:
        self.start_prefill().start_decode().ask()
        self.wait_senders(KVPoll.WaitingForInput)
        for sender in self.senders:
            sender.init(self.num_pages, 1)
        return self

    def assert_fails(self, reason: str, decode_too: bool = True) -> None:
        """Prefill fails the request with an error that says ``reason``, and decode hears of it."""
        self.wait_senders(KVPoll.Failed)
        for sender in self.senders:
            with pytest.raises(Exception, match=reason):
                sender.failure_exception()
        if decode_too:
            self.wait_receivers(KVPoll.Failed)
            for receiver in self.receivers:
                with pytest.raises(Exception, match=f"prefill reported.*{reason}"):
                    receiver.failure_exception()


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


def sent_frames(receiver: NixlKVReceiver, send: Callable[[], None]) -> list[list[bytes]]:
    """The messages that ``send`` makes ``receiver`` send, caught on the way to the socket."""
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=lambda frames: sent.append(list(frames)))
    receiver._connect_to_bootstrap_server = lambda info: (socket, threading.Lock())
    send()
    del receiver._connect_to_bootstrap_server
    return sent


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# ---- what decode sends ----


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


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("states", [None, [3, 4]])
@pytest.mark.parametrize("indices", [[5, 6, 9], []])
def test_flag_off_the_message_is_the_engines_byte_for_byte(dummy, states, indices):
    receiver, pages_asked = bare(dummy), np.array(indices, np.int32)
    engines = sent_frames(receiver, lambda: BARE_RECEIVER.send_metadata(receiver, pages_asked, 3, states))
    ours = sent_frames(receiver, lambda: receiver.send_metadata(pages_asked, 3, states))
    assert len(engines) == 2 and ours == engines and len(ours[0]) == 9


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("states", [None, [3, 4]])
@pytest.mark.parametrize("indices", [[5, 6, 9], []])
def test_flag_on_the_message_is_the_engines_with_two_frames_more(dummy, states, indices):
    receiver, pages_asked = bare(dummy), np.array(indices, np.int32)
    engines = sent_frames(receiver, lambda: BARE_RECEIVER.send_metadata(receiver, pages_asked, 3, states))
    ours = sent_frames(receiver, lambda: receiver.send_metadata(pages_asked, 3, states, decode_prefix_len=128))
    assert ours == [frames + [b"128", b"1" if dummy else b"0"] for frames in engines]
    assert len(ours[0]) == 11


def test_the_registration_is_the_engines_byte_for_byte():
    receiver = bare()
    engines = sent_frames(receiver, lambda: BARE_RECEIVER._register_kv_args(receiver))
    assert sent_frames(receiver, receiver._register_kv_args) == engines and len(engines) == 2


def test_a_prefill_without_the_patch_gets_the_engines_message(world):
    """Whether a prefix may be named is a property of the peer and not of this worker."""
    world.decode[0].manager.prefills.capabilities.clear()
    receiver = NixlKVReceiver(world.decode[0].manager, ADDR, BAD)
    assert not receiver.peer_takes_prefix


# ---- requests that cannot be true: they fail, on both sides and alone ----


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"-4", "-4 is negative"),
        (b"6", "6 is not a multiple of the page size 4"),
        (b"28", "28 is beyond the prompt of 26 tokens"),
        (b"99999999999999999996", "beyond the prompt"),
        (b"4", "leaves 6 pages .* but decode allocated 5"),
        (b"0", "leaves 7 pages .* but decode allocated 5"),
        (b"x", "decode_prefix_len is not a number: b'x'"),
        (b"8.0", "decode_prefix_len is not a number"),
        (b"", "decode_prefix_len is not a number"),
        ("٨".encode(), "decode_prefix_len is not a number"),
        (b"\xff", "decode_prefix_len is not a number"),
    ],
)
def test_a_prefix_that_cannot_be_fails_its_request_alone(world, frame, reason):
    other = world.request(GOOD).bootstrap()
    request = world.request(BAD).start_prefill().start_decode()
    frames = request.frames()
    world.push([*frames[:9], frame, frames[10]])
    request.assert_fails(reason)
    other.send()
    other.wait_senders(KVPoll.Success)
    other.wait_receivers(KVPoll.Success)
    world.assert_healthy(GOOD + 100)


@pytest.mark.parametrize("fails", [False, True])
def test_handles_are_given_back_when_their_writes_have_ended(world, fails):
    """Of one that is under way NIXL would try to call the bytes back. With a lock: another thread uses the agent."""
    world.wire.held = True
    request = world.request(BAD).bootstrap().send(4)
    if fails:
        request.senders[0].fail("lost")
    for transfer in world.wire.transfers:
        assert request.senders[0].poll() == KVPoll.WaitingForInput and not transfer.released
        transfer.finish()
    request.wait_senders(KVPoll.Failed if fails else KVPoll.Success)
    assert world.wire.transfers and all(transfer.released for transfer in world.wire.transfers)
    assert request.senders[0].poll() == (KVPoll.Failed if fails else KVPoll.Success)


def test_a_prompt_that_decode_computes_itself_leaves_nothing_behind(world):
    """Prefill is asked for nothing and drops the request; the next one of its room is served."""
    request = world.request(GOOD).start_prefill().start_decode()
    for receiver in request.receivers:
        receiver.conclude_state = KVPoll.Success
        receiver.end()
    for sender in request.senders:
        sender.drop()
    again = world.request(GOOD).bootstrap()
    again.send()
    again.wait_senders(KVPoll.Success)
    again.wait_receivers(KVPoll.Success)
    world.assert_healthy(GOOD + 100)


@pytest.mark.parametrize("field", ["pages", "agent", "aux", "port", "count", "dummy", "too many"])
def test_a_field_that_cannot_be_read_fails_its_request_alone(world, field):
    request = world.request(BAD).start_prefill().start_decode()
    frames = request.frames()
    at = {"port": 3, "agent": 4, "pages": 5, "aux": 6, "count": 7, "dummy": 10}
    if field == "too many":
        frames.append(b"0")
    else:
        frames[at[field]] = {"pages": b"12345", "agent": b"\xff\xfe", "dummy": b"yes"}.get(field, b"None")
    world.push(frames)
    # With an agent name that cannot be read there is nobody to tell.
    request.assert_fails("refused decode's request", decode_too=field != "agent")
    world.assert_healthy()


@pytest.mark.parametrize("length", [0, 2, 5, 8, 10])
def test_a_truncated_message_fails_at_most_its_request(world, length):
    """ZeroMQ delivers all frames or none, so only a broken peer sends fewer; it must not hang or half-serve."""
    request = world.request(BAD).start_prefill().start_decode()
    world.push(request.frames()[:length] or [b""])
    if length < 2:
        assert [sender.poll() for sender in request.senders] == [KVPoll.Bootstrapping]
    else:
        for sender in request.senders:
            if sender.poll() == KVPoll.WaitingForInput:
                sender.init(request.num_pages, 1)
                sender.send(np.arange(request.num_pages, dtype=np.int32))
        # There is nobody to tell without a name, nor a decode worker without the flag, whose wire stays the engine's.
        request.assert_fails("refused decode's request|transfer over NIXL failed: .", 4 < length < 8 or length == 10)
    world.assert_healthy()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({9: b"12", 5: 4}, "ranks disagree: prefixes .8, 12"),
        # With as many pages each.
        ({9: b"12"}, "ranks disagree: prefixes .8, 12"),
        ({5: 4}, "ranks disagree: .* pages .4, 5"),
        ({9: None}, "ranks disagree: prefixes .0, 8"),
    ],
)
def test_decode_ranks_that_contradict_each_other_fail_the_request(monkeypatch, changed, reason):
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    first, second = request.frames(0), request.frames(1)
    assert first[4] != second[4] and first[7] == second[7] == b"2"
    for at, value in changed.items():
        if value is None:
            del second[at:]
        else:
            second[at] = value if isinstance(value, bytes) else second[at][: 4 * value]
    world.push(first, second)
    if 9 in changed and changed[9] is None:
        # A rank without the flag is not told: its wire is the engine's.
        request.receivers.pop()
    request.assert_fails(reason)
    world.assert_healthy()


@pytest.mark.parametrize("second_says", [b"1", b"3", b"-1"])
def test_decode_ranks_that_count_each_other_differently_do_not_wait_for_ever(monkeypatch, second_says):
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    first, second = request.frames(0), request.frames(1)
    second[7] = second_says
    world.push(first, second)
    request.assert_fails("decode")
    world.assert_healthy()


def test_an_agent_that_has_not_registered_fails_the_request_it_names(world):
    request = world.request(BAD).start_prefill()
    world.push(message(BAD, "a stranger"))
    request.assert_fails("agent 'a stranger' has not registered", decode_too=False)
    world.assert_healthy()


def test_a_refusal_that_comes_before_its_request_waits_for_it(world):
    world.push(message(BAD, "a stranger"))
    world.assert_healthy()
    world.request(BAD).start_prefill().assert_fails("has not registered", decode_too=False)


# ---- messages in the wrong order or twice ----


def test_a_repeated_request_changes_nothing(world, caplog):
    request = world.request(BAD).bootstrap()
    frames = request.frames()
    with caplog.at_level(logging.ERROR):
        world.push(frames, [*frames[:9], b"0", b"1"])
    assert f"room {BAD}" in caplog.text and "repeated" in caplog.text
    assert [sender.poll() for sender in request.senders] == [KVPoll.WaitingForInput]
    request.send()
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    kv = [t for t in world.wire.transfers if b"_kv_" in t.notification]
    assert len(kv) == 1
    # Five pages of the delta, two layers, in one run: to where the first message said.
    assert kv[0].targets[:, 0].tolist() == [(1 << 20) + 34 * ITEM, (2 << 20) + 34 * ITEM]
    assert set(kv[0].targets[:, 1].tolist()) == {5 * ITEM}


@pytest.mark.parametrize("prefix_len", [None, 8])
def test_a_room_that_ended_well_may_be_used_again(world, prefix_len):
    """Decode's request may come before prefill's own; ignored, it would wait for its time-out."""
    for _ in range(2):
        request = world.request(BAD, prefix_len=prefix_len).start_decode().ask()
        until(lambda: BAD in world.prefill[0].manager.transfer_infos, "the message is read")
        request.start_prefill().wait_senders(KVPoll.WaitingForInput)
        request.senders[0].init(request.num_pages, 1)
        request.send()
        request.wait_senders(KVPoll.Success)
        request.wait_receivers(KVPoll.Success)


def test_a_failure_is_told_once_for_each_request_of_a_room(world):
    """Decode gives up what has failed. A second word, in answer to that, ended the next request of the room."""
    first = world.request(7).bootstrap()
    (receiver,), (sender,) = first.receivers, first.senders
    receiver.fenced = True
    sender.abort()
    first.wait_senders(KVPoll.Failed)
    first.wait_receivers(KVPoll.Failed)
    receiver.cancel()
    assert receiver.writers_done()
    # After its word to give the room up, which prefill has read with that.
    world.request(8).start_decode().ask()
    until(lambda: 8 in world.prefill[0].manager.transfer_infos, "the next message is read")
    assert len(world.prefill[0].told("7_fail")) == 1
    world.wire.held = True
    second = world.request(7).bootstrap()
    second.send()
    # Its pages are being written to.
    assert second.receivers[0].poll() == KVPoll.WaitingForInput
    for transfer in world.wire.transfers:
        transfer.finish()
    second.wait_receivers(KVPoll.Success)


def test_an_answer_that_nobody_waited_for_is_not_of_the_next_request_of_its_room(world):
    """Given up before prefill was asked, and answered all the same. Nobody read that until the next request did."""
    first = world.request(7).start_prefill().start_decode()
    (receiver,) = first.receivers
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    first.wait_senders(KVPoll.Failed)
    assert len(world.prefill[0].told("7_fail")) == 1 and not world.decode[0].manager.transfer_statuses
    second = world.request(7).bootstrap()
    second.send()
    second.wait_receivers(KVPoll.Success)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_request_that_cannot_be_used_is_answered_once(world, is_here):
    """Whether prefill has a request of that room or not when decode gives it up."""
    request = world.request(7).start_decode()
    frames = request.frames()
    request.receivers[0].fenced = True
    world.push([*frames[:9], b"x", frames[10]])
    request.wait_receivers(KVPoll.Failed)
    if is_here:
        request.start_prefill()
    request.receivers[0].cancel()
    assert request.receivers[0].writers_done()
    world.request(8).start_decode().ask()
    until(lambda: 8 in world.prefill[0].manager.transfer_infos, "the next message is read")
    for sender in request.senders:
        assert sender.poll() == KVPoll.Failed
    assert len(world.prefill[0].told("7_fail")) == 1


def test_a_word_that_could_not_be_sent_is_said_when_decode_gives_up(world):
    request = world.request(7).bootstrap()
    agent = world.prefill[0].manager.agent
    send_notif = agent.send_notif

    def lost(peer: str, notification: bytes) -> None:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    agent.send_notif = lost
    request.senders[0].abort()
    request.wait_senders(KVPoll.Failed)
    agent.send_notif = send_notif
    (receiver,) = request.receivers
    receiver.fenced = True
    receiver.fail("it has waited for too long")
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    until(receiver.writers_done, "prefill's answer")


def test_a_sender_that_has_sent_does_not_end_the_next_request_of_its_room(world):
    """Decode, and with it the client, may have the answer before prefill looks whether all is written."""
    first = world.request(7).bootstrap()
    first.send()
    first.wait_receivers(KVPoll.Success)
    first.receivers[0].clear()
    second = world.request(7).start_prefill().start_decode().ask()
    until(lambda: 7 in world.prefill[0].manager.transfer_infos, "decode's request")
    first.wait_senders(KVPoll.Success)
    second.wait_senders(KVPoll.WaitingForInput)
    second.senders[0].init(second.num_pages, 1)
    second.send()
    second.wait_receivers(KVPoll.Success)


def test_a_request_for_a_room_that_failed_before_is_answered(world):
    """Decode would wait for its time-out otherwise."""
    request = world.request(BAD).start_prefill()
    for sender in request.senders:
        sender.abort()
    request.wait_senders(KVPoll.Failed)
    request.start_decode().ask()
    request.wait_receivers(KVPoll.Failed)
    assert BAD not in world.prefill[0].manager.transfer_infos


def test_what_has_all_been_written_is_not_failed_for_being_late(world):
    """The poll that finds it late finds it done, too."""
    request = world.request(GOOD).bootstrap().send()
    (sender,) = request.senders
    sender.state.due_at = 0.0
    sender.fail_if_overdue()
    assert not sender.has_failed()
    request.wait_receivers(KVPoll.Success)


def test_an_abort_after_decode_asked_is_told(world):
    request = world.request(BAD).start_prefill().start_decode().ask()
    until(lambda: BAD in world.prefill[0].manager.transfer_infos, "the message is read")
    for sender in request.senders:
        sender.abort()
    request.assert_fails("Abort")


# ---- when NIXL fails ----


def test_a_peer_that_is_gone_fails_its_request_and_not_the_worker(world, monkeypatch):
    """NIXL says so by an exception of every later question about the write, and not by a state."""
    world.wire.held = True
    request, other = world.request(BAD).bootstrap().send(), world.request(GOOD).bootstrap()
    lost = set(map(id, world.wire.transfers))

    def ask(agent: Agent, transfer: Transfer) -> str:
        if id(transfer) in lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return transfer.state

    monkeypatch.setattr(Agent, "check_xfer_state", ask)
    request.assert_fails("NIXL reports an error", decode_too=False)
    world.wire.held = False
    other.send()
    other.wait_senders(KVPoll.Success)


def test_a_lost_prefill_is_named_to_each_of_its_requests(world):
    lost, done = world.request(BAD).bootstrap(), world.request(GOOD).bootstrap()
    done.send()
    done.wait_receivers(KVPoll.Success)
    manager = world.decode[0].manager
    manager._handle_node_failure(lost.receivers[0].bootstrap_addr)
    lost.wait_receivers(KVPoll.Failed)
    with pytest.raises(RuntimeError, match="Losing connection with prefill instance"):
        lost.receivers[0].failure_exception()
    assert not manager.failure_records


@pytest.mark.parametrize("read", [True, False])
def test_what_has_all_come_outlives_its_prefill(world, read):
    """Whether or not another request's poll has read what was told of it before prefill was found to be gone."""
    request = world.request(GOOD).bootstrap()
    request.send()
    request.wait_senders(KVPoll.Success)
    manager, receiver = world.decode[0].manager, request.receivers[0]
    if read:
        manager.update_transfer_status()
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert receiver.poll() == KVPoll.Success
    receiver.clear()
    assert not manager.failure_records and not manager.transfer_statuses


def test_a_decode_rank_without_the_flag_is_asked_where_it_asked_last(world):
    """As by the engine: a gateway that tries a room again, whose first request decode had aborted."""
    first, again = (world.request(GOOD, 26, None).start_decode() for _ in range(2))
    first.ask(kv_indices=np.arange(40, 47, dtype=np.int32), decode_prefix_len=None)
    again.ask(kv_indices=np.arange(60, 67, dtype=np.int32), decode_prefix_len=None)
    until(lambda: first_pages(world.prefill[0].manager, GOOD) == [60], "both messages are read")
    again.start_prefill().wait_senders(KVPoll.WaitingForInput)


def test_a_failed_request_is_over_only_when_nothing_of_it_is_being_written(monkeypatch):
    """One decode rank is being written when the write to the next cannot be posted: its pages are not free yet."""
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    world.wire.held = True
    request = world.request(BAD).bootstrap()
    prefill = world.prefill[0]
    second = list(prefill.manager.transfer_infos[BAD])[1]
    prefill.agent.known.discard(second)
    request.send()
    under_way = list(world.wire.transfers)
    assert under_way and not any(second == transfer.peer for transfer in under_way)
    for _ in range(3):
        assert [sender.poll() for sender in request.senders] != [KVPoll.Failed]
        assert not prefill.told("_fail_")
    for transfer in under_way:
        transfer.finish()
    request.wait_senders(KVPoll.Failed)
    assert prefill.told(f"{BAD}_fail_")


def test_a_failure_on_one_prefill_rank_is_answered_by_all(monkeypatch):
    """The scheduler drops the request on all ranks; decode keeps its pages until each has said that it is done."""
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    for receiver in request.receivers:
        receiver.fenced = True
    frames = request.frames(0)
    world.push([*frames[:9], b"-4", b"0"], rank=0)
    request.ask_of(1)
    until(lambda: BAD in world.prefill[1].manager.transfer_infos, "the message is read")
    # What the schedulers do: polls are reduced by MIN, and every rank fails the request.
    until(lambda: min(sender.poll() for sender in request.senders) == KVPoll.Failed, "prefill fails the request")
    for sender in request.senders:
        with pytest.raises(Exception):  # noqa: B017
            sender.failure_exception()
    until(lambda: min(receiver.poll() for receiver in request.receivers) == KVPoll.Failed, "decode fails the request")
    for receiver in request.receivers:
        receiver.cancel()
    for receiver in request.receivers:
        until(receiver.writers_done, "every prefill rank has said that it writes no more")
    for rank in world.prefill:
        assert BAD not in rank.manager.transfer_infos and BAD not in rank.manager.rooms.live


def test_a_request_that_waits_for_its_turn_answers_when_decode_gives_it_up(world):
    """Its sender is not polled until its prompt has been computed, which with a long queue can take minutes."""
    request = world.request(BAD).bootstrap()
    (receiver,), prefill = request.receivers, world.prefill[0].manager
    receiver.fenced = True
    receiver.cancel()
    assert receiver.poll() == KVPoll.Failed

    def settled() -> bool:
        prefill.settle()
        receiver.kv_mgr.update_transfer_status()
        return receiver.writers_done()

    until(settled, "decode is answered")
    request.send()
    request.wait_senders(KVPoll.Failed)
    assert not world.wire.transfers
    prefill.settle()
    request.senders[0].abort()
    assert request.senders[0].poll() == KVPoll.Failed
    rooms = prefill.rooms
    assert not rooms.given_up and not rooms.live and not rooms.refused and not prefill.failure_records


def test_an_idle_prefill_answers_when_the_last_write_of_a_dropped_request_has_ended(world):
    """The engine has let go of the request, and no other comes whose poll could look after it."""
    world.wire.held = True
    request = world.request(BAD).bootstrap()
    for receiver in request.receivers:
        receiver.fenced = True
    request.send()
    prefill = world.prefill[0]
    scheduler = SchedulerDisaggregationPrefillMixin()
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=prefill.manager)
    scheduler.disagg_prefill_inflight_queue = []
    step = scheduler.process_disagg_prefill_inflight_queue

    # As when another prefill rank failed.
    with pytest.raises(RuntimeError):
        request.senders[0].failure_exception()
    step()
    assert not prefill.told("_fail_")
    for transfer in world.wire.transfers:
        transfer.finish()
    step()
    assert prefill.told(f"{BAD}_fail_") and not prefill.manager.rooms.given_up


@pytest.mark.parametrize(("held", "posted"), [(8, True), (8, False), (24, True)])
def test_a_request_that_comes_again_while_the_first_is_sent_fails_alone(world, posted, held):
    """As a gateway sends it whose connection was closed. Told of a failure, decode gave pages away under the writes."""
    first, again = world.request(7, 24, held), world.request(7, 24, held)
    first.bootstrap()
    (receiver,), (prefill,) = first.receivers, world.prefill
    world.wire.held = True
    if not posted:
        again.start_prefill()
    # Of a full hit, the metadata.
    first.senders[0].send(np.arange(first.first_page, first.num_pages, dtype=np.int32), None)
    if posted:
        again.start_prefill()
    again.wait_senders(KVPoll.Failed)
    with pytest.raises(RuntimeError, match="is still being served; each request needs a room of its own"):
        again.senders[0].failure_exception()
    prefill.manager.settle()
    assert not prefill.told("7_fail") and receiver.poll() == KVPoll.WaitingForInput
    for transfer in world.wire.transfers:
        transfer.finish()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)
    assert not prefill.manager.request_status and not prefill.manager.failure_records
    assert not prefill.manager.rooms.live and not prefill.manager.rooms.writing
    world.wire.held = False
    world.assert_healthy()


@pytest.mark.parametrize("end", [lambda sender: sender.abort(), lambda sender: sender.fail("of another rank")])
def test_the_end_of_a_request_that_came_again_is_not_that_of_the_first(world, end):
    first, again = world.request(7), world.request(7)
    first.bootstrap()
    again.start_prefill()
    end(again.senders[0])
    again.wait_senders(KVPoll.Failed)
    with pytest.raises(RuntimeError):
        again.senders[0].failure_exception()
    first.send()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)


def test_of_two_requests_of_a_room_that_wait_the_first_keeps_it(world):
    first, other = world.request(7).start_prefill(), world.request(7).start_prefill()
    other.wait_senders(KVPoll.Failed)
    with pytest.raises(RuntimeError, match="a room of its own"):
        other.senders[0].failure_exception()
    first.start_decode().ask().wait_senders(KVPoll.WaitingForInput)
    first.senders[0].init(first.num_pages, 1)
    first.send()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)
    world.assert_healthy()


@pytest.mark.parametrize("tp", [1, 2])
def test_another_decode_worker_that_asks_for_a_room_fails_alone(world, tp):
    """Chunks begin where the first one's prefix ends; the other had pages that nobody had filled, and a success."""
    first = world.request(7).bootstrap()
    (one,) = world.decode
    world.decode = [Rank(world, DisaggregationMode.DECODE, rank, tp) for rank in range(tp)]
    for two in world.decode:
        for name in ("prefill_info_table", "prefills"):
            setattr(two.manager, name, getattr(one.manager, name))
        two.manager._resolve_rank_mapping(two.manager.prefill_info_table[ADDR])
    other = world.request(7, prefix_len=0).start_decode().ask()
    other.wait_receivers(KVPoll.Failed)
    with pytest.raises(Exception, match="another decode worker has asked for this room"):
        other.receivers[0].failure_exception()
    # Nor does one that nobody knows fail the first.
    world.push(message(7, "stranger"))
    first.send()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)
    assert {transfer.peer for transfer in world.wire.transfers} == {one.agent.name}


# ---- foreign messages ----


@pytest.mark.parametrize("frames", [[b""], [b"GET / HTTP/1.1\r\n"], [b"NixlMsgGuard"], [b"NixlMsgGuard", b"room"]])
def test_a_foreign_message_is_ignored_with_a_line_in_the_log(world, caplog, frames):
    request = world.request(BAD).start_prefill()
    manager = world.prefill[0].manager
    with caplog.at_level(logging.ERROR):
        world.push(frames)
    assert any("Ignored a message" in record.message for record in caplog.records)
    assert [sender.poll() for sender in request.senders] == [KVPoll.Bootstrapping]
    assert not manager.transfer_infos and not manager.rooms.refused and not manager.decode_kv_args_table
    world.assert_healthy()


@pytest.mark.parametrize("length", [2, 6, 12])
def test_a_truncated_registration_is_ignored(world, length):
    receiver = world.request(GOOD).start_decode().receivers[0]
    frames = sent_frames(receiver, receiver._register_kv_args)[0]
    assert len(frames) == 13
    frames[4] = b"another agent"
    world.push(frames[:length])
    assert "another agent" not in world.prefill[0].manager.decode_kv_args_table
    world.assert_healthy(BAD)


def test_a_registration_that_nixl_refuses_can_be_made_good(world):
    """Half a registration would let requests in that cannot be served, and keep the right one out."""
    receiver = world.request(GOOD).start_decode().receivers[0]
    frames = sent_frames(receiver, receiver._register_kv_args)[0]
    Agent(world.wire, "late")
    frames[4], frames[5] = b"late", b"garbage"
    manager = world.prefill[0].manager
    world.push(frames)
    assert "late" not in manager.decode_kv_args_table
    frames[5] = b"late"
    world.push(frames)
    assert "late" in manager.decode_kv_args_table and "late" in manager.agent.known


# ---- notifications ----


def status_of(*texts: str | tuple[str, str], expected: int = 1, state: bool = False) -> tuple[TransferStatus, Any]:
    """A decode manager's status of one room after these notifications, of agent "p" where a text names none."""
    manager = object.__new__(NixlKVManager)
    status = TransferStatus(expects_state=state)
    manager.transfer_statuses = {BAD: status}
    manager.required_prefill_response_num_table = {BAD: expected}
    manager.failure_records, manager.failure_lock = {}, threading.Lock()
    inbox: list[tuple[str, str]] = [text if isinstance(text, tuple) else ("p", text) for text in texts]
    for agent, text in inbox:
        manager.agent = SimpleNamespace(get_new_notifs=lambda a=agent, t=text: {a: [t.encode()]})
        manager.update_transfer_status()
    return status, manager


KV, AUX = f"{BAD}_kv_0_1_0", f"{BAD}_aux"


def test_no_chunk_may_be_missing():
    first, second, last = (f"{BAD}_kv_{n}_{int(n == 2)}_0" for n in range(3))
    for order in itertools.permutations([first, second, last, AUX]):
        assert status_of(*order)[0].is_done()
        for missing in order:
            assert not status_of(*(text for text in order if text != missing))[0].is_done()
            # And none makes up for another by coming twice.
            twice = [order[0] if text == missing else text for text in order]
            assert missing == order[0] or not status_of(*twice)[0].is_done()


def test_two_prefill_ranks_of_one_pipeline_stage_both_count():
    """The engine tells senders apart by their pipeline rank, which is 0 for both."""
    both = [("p0", KV), ("p0", AUX), ("p1", KV), ("p1", AUX)]
    for order in itertools.permutations(both):
        assert status_of(*order, expected=2)[0].is_done()
    for missing in both:
        assert not status_of(*(one for one in both if one != missing), expected=2)[0].is_done()
    bare_status = conn.__pd_radix__["originals"]["TransferStatus"](num_pp_ranks_expected=2)
    bare_status.received_aux = True
    bare_status.received_kvs_per_pp[0].add(0)
    bare_status.expected_kvs_per_pp[0] = 1
    assert not bare_status.is_done(), "the engine would wait for ever"


def test_notifications_may_come_while_the_watch_of_prefills_asks():
    """An error there left all other requests of a prefill that was lost to their time-out."""

    class Arriving(dict):
        def __getitem__(self, agent: str) -> set[int]:
            self.setdefault(f"{agent} and another", set())
            status.num_chunks[f"{agent} and another"] = 1
            return super().__getitem__(agent)

    status = TransferStatus(num_expected=2, num_chunks={"a": 1, "b": 2}, chunks=Arriving(a={0}, b={0}))
    assert not status.is_done() and not status.is_quiet()


def test_pieces_of_two_agents_do_not_make_one_transfer():
    assert not status_of(("p", KV), ("somebody else", AUX))[0].is_done()
    assert not status_of(("p", KV), ("p", AUX), ("q", KV), ("r", AUX), expected=2)[0].is_done()


def test_an_agent_that_says_too_little_does_not_hold_up_those_that_matter():
    assert status_of(("somebody else", f"{BAD}_kv_5_1_0"), ("p", KV), ("p", AUX))[0].is_done()


def test_a_failure_is_told_with_its_reason(world):
    request = world.request(BAD).start_prefill().start_decode().ask()
    world.prefill[0].agent.known.add(world.decode[0].agent.name)
    world.prefill[0].agent.send_notif(world.decode[0].agent.name, f"{BAD}_fail_a_reason with_bars".encode())
    request.wait_receivers(KVPoll.Failed)
    with pytest.raises(RuntimeError, match="prefill reported: a_reason with_bars"):
        request.receivers[0].failure_exception()


GARBLED = [
    b"",
    b"_",
    b"kv",
    b"x_kv_0_1_0",
    b"\xff_aux",
    b"%d" % BAD,
    b"%d_" % BAD,
    b"%d_nonsense" % BAD,
    b"%d_kv" % BAD,
    b"%d_kv_0" % BAD,
    b"%d_kv_0_1" % BAD,
    b"%d_kv_0_1_0_0" % BAD,
    b"%d_kv_a_1_0" % BAD,
    b"%d_kv_-1_1_0" % BAD,
    b"%d_kv_0_2_0" % BAD,
    b"%d_AUX" % BAD,
]


def test_a_garbled_notification_is_ignored_with_a_line_in_the_log(world, caplog):
    request = world.request(BAD).bootstrap()
    statuses = world.decode[0].manager.transfer_statuses
    before = repr(statuses[BAD])
    for text in GARBLED:
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            world.wire.deliver("somebody", world.decode[0].agent.name, text)
            assert request.receivers[0].poll() == KVPoll.WaitingForInput
        assert repr(statuses[BAD]) == before, text
        assert "Ignored a notification of prefill agent somebody" in caplog.text, text
    request.send()
    request.wait_receivers(KVPoll.Success)


def test_notifications_of_rooms_that_nobody_waits_for_leave_nothing_behind(world):
    request = world.request(BAD).bootstrap().send()
    request.wait_receivers(KVPoll.Success)
    manager, waiting = world.decode[0].manager, world.request(GOOD).bootstrap()
    for text in (KV, AUX, f"{BAD}_fail_late", f"{BAD}_state_0", "777_kv_0_1_0", "777_fail_never asked"):
        world.wire.deliver("p", world.decode[0].agent.name, text.encode())
    assert waiting.receivers[0].poll() == KVPoll.WaitingForInput
    assert set(manager.transfer_statuses) <= {GOOD} and not manager.failure_records
    waiting.send()
    waiting.wait_receivers(KVPoll.Success)


def test_a_reason_that_comes_while_another_is_told_is_not_kept(world, monkeypatch):
    manager = world.prefill[0].manager
    tell = manager.tell_failure

    def told(room, listeners, reason):
        manager.record_failure(room, "a message says so too")
        tell(room, listeners, reason)

    monkeypatch.setattr(manager, "tell_failure", told)
    request = world.request(230).start_prefill().start_decode()
    frames = request.frames()
    world.push([*frames[:9], b"-4", b"0"])
    request.assert_fails("negative")
    assert not manager.request_status and not manager.failure_records


def test_the_books_of_every_request_are_closed(world):
    for room in range(200, 210):
        world.assert_healthy(room)
    for room in range(210, 220):
        request = world.request(room).start_prefill().start_decode()
        frames = request.frames()
        world.push([*frames[:9], b"-4", b"0"])
        request.assert_fails("negative")
    prefill, decode = world.prefill[0].manager, world.decode[0].manager
    assert not prefill.transfer_infos and not prefill.rooms.refused and not prefill.rooms.live
    assert not prefill.request_status and not prefill.failure_records
    assert not decode.transfer_statuses and not decode.request_status
    assert not decode.required_prefill_response_num_table and not any(decode.addr_to_rooms_tracker.values())


# ---- whatever comes ----

_texts = st.one_of(
    st.sampled_from([b"", b"None", b"0", b"-1", b"1", b"\xff", b"%d" % BAD, b"%d" % GOOD, b"a stranger", b"cancel"]),
    st.binary(max_size=12),
)


@st.composite
def requests_for_kv(draw) -> list[bytes]:
    """A good message with some frames replaced, cut off, doubled or added."""
    frames = message(draw(st.sampled_from([BAD, 777])), draw(st.sampled_from(["registered", "a stranger"])))
    for at in draw(st.lists(st.integers(0, len(frames) - 1), max_size=3)):
        frames[at] = draw(_texts)
    frames = frames[: draw(st.integers(1, 11))] if draw(st.booleans()) else frames
    return frames + draw(st.lists(_texts, max_size=2))


_fuzz = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def test_whatever_message_comes_only_the_room_it_names_is_touched(world):
    """The thread that reads messages survives all of them, and a request for another room does not notice."""
    manager, other = world.prefill[0].manager, world.request(GOOD).bootstrap()
    books = ("transfer_infos", "request_status", "rooms.refused", "rooms.ended", "failure_records")

    def read(book: str) -> dict:
        return dict(operator.attrgetter(book)(manager))

    registered = manager.decode_kv_args_table[world.decode[0].agent.name]
    manager.decode_kv_args_table["registered"] = registered
    manager.agent.known.add("registered")
    Agent(world.wire, "registered")

    @_fuzz
    @given(requests_for_kv())
    def throw(frames):
        before = {book: read(book) for book in books}
        agents = dict(manager.decode_kv_args_table)
        try:
            manager._on_message(frames)
        except Exception as e:
            # The thread logs it and goes on; nothing may have changed.
            assert {book: read(book) for book in books} == before, e
            assert manager.decode_kv_args_table == agents
            return
        try:
            named = int(frames[1])
        except ValueError:
            named = None
        if named == GOOD:
            return
        for book in books:
            after = read(book)
            assert {room for room in {*before[book], *after} if before[book].get(room) != after.get(room)} <= {named}

    throw()
    # Messages that named it may have failed it; then it says why. Otherwise it goes on.
    if other.senders[0].poll() == KVPoll.WaitingForInput:
        other.send()
        other.wait_receivers(KVPoll.Success)
    world.assert_healthy(555)


def test_whatever_notification_comes_only_the_room_it_names_is_touched(world):
    manager = world.decode[0].manager
    waiting = [world.request(room).bootstrap() for room in (GOOD, BAD)]
    parts = st.one_of(
        st.sampled_from(["", "kv", "aux", "state", "fail", "0", "1", "-1", str(BAD), "777", "x", "9" * 30]),
        st.text(max_size=4),
    )
    texts = st.one_of(st.binary(max_size=20), st.lists(parts, max_size=7).map(lambda p: "_".join(p).encode()))

    @_fuzz
    @given(st.lists(texts, max_size=4))
    def throw(notifications):
        good = repr(manager.transfer_statuses[GOOD])
        manager.agent.inbox["p"] = list(notifications)
        manager.update_transfer_status()
        if not any(text.split(b"_")[0].strip() == b"%d" % GOOD for text in notifications):
            assert repr(manager.transfer_statuses[GOOD]) == good
        assert set(manager.transfer_statuses) <= {GOOD, BAD}
        assert set(manager.failure_records) <= {BAD}

    throw()
    waiting[0].send()
    waiting[0].wait_receivers(KVPoll.Success)
