"""A prefill and a decode worker on the wire, over either backend: their ranks, and both ends of a request.

What a backend adds is in `nixl_world` and `mooncake_world`. Only the transfer libraries are stand-ins.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common import delta_receiver, prefill_peers
from sglang.srt.disaggregation.decode_radix.hooks import Events
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.utils import DisaggregationMode
from typing_extensions import Self
from waiting import until

# Those of the workers that tests have made. Each closes them in the end.
MADE: list[Any] = []


def keep_threads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread watch peers, and have what a scheduler leaves to threads done before it looks for it."""
    # These threads outlive the test.
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "100000")
    # Of the extra that watches peers, where that runs.
    watch = sys.modules.get("sglang.srt.disaggregation.common.peer_sockets")
    if watch is not None:
        monkeypatch.setattr(watch.PeerSockets, "start", lambda sockets, check: MADE.append(sockets))
    threaded = prefill_peers.in_background

    def at_once(work: Callable[[], Any], name: str) -> Future:
        future = threaded(work, name)
        # The loop that makes the extras' calls never ends, and tests have prefills that do not answer.
        return future if name in ("peer-calls", "ask-prefill") else wait([future]) and future

    for module in (prefill_peers, delta_receiver):
        monkeypatch.setattr(module, "in_background", at_once)


def close_sockets(sockets: Any) -> None:
    """All that lead to peers."""
    for key, peer in list(sockets._peers.items()):
        sockets._drop(key, peer)


@contextmanager
def watching(sockets: Any, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """What a worker's thread does, for as long as this lasts."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            check()
            sockets.look(0.02)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def first_pages(manager: Any, room: int) -> list[int]:
    """The first page that each decode rank has asked a prefill to write for ``room``, as it has read last."""
    return [int(info.dst_kv_indices[0]) for info in manager.transfer_infos.get(room, {}).values()]


def push(rank: Any) -> zmq.Socket:
    """A socket to what a rank reads."""
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{rank.manager.rank_port}")
    return socket


def sent_frames(receiver: Any, send: Callable[[], None]) -> list[list[bytes]]:
    """The messages that ``send`` makes ``receiver`` send, caught on the way to the socket."""
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=lambda frames: sent.append(list(frames)))
    receiver._connect_to_bootstrap_server = lambda info: (socket, threading.Lock())
    send()
    del receiver._connect_to_bootstrap_server
    return sent


def reasons(ends: list) -> list[str]:
    """Why these have failed; with that they are over."""
    found = []
    for end in ends:
        with pytest.raises(Exception) as caught:
            end.failure_exception()
        found.append(str(caught.value))
    return found


def give_up(request: Any) -> None:
    """What decode's queue does with a failed transfer before it keeps the pages in quarantine."""
    for receiver in request.receivers:
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
        reasons([receiver])
        receiver.cancel()


def wait_quiet(request: Any) -> None:
    """Until decode knows that nothing is written for the request any more, which prefill says between its steps."""
    for receiver in request.receivers:
        until(lambda one=receiver: request.world.settle() or one.writers_done(), "no writer is left")


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


class WireRank:
    """One rank of one worker, or of one of its pipeline stages: its memory, its library and its manager.

    rank, tp: among those of its DP rank and pipeline stage.
    """

    manager: Any

    def __init__(
        self,
        world: Any,
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
        self.rank, self.tp, self.dp_rank, self.dp = rank, tp, dp_rank, dp
        self.stage, self.cp_rank, self.cp, self.layers = stage, cp_rank, cp, stages[stage]
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, stage, 0, 0
        args.state_data_ptrs = args.state_data_lens = args.state_item_lens = []
        args.state_type, args.prefill_start_layer, args.page_size = "none", self.layers.start, world.page_size
        self.give_memory(world, args)
        options = SimpleNamespace(
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
        world.current = self
        self.make_manager(world, args, mode, options)
        self.manager.num_layers = world.layers

    def give_memory(self, world: Any, args: KVArgs) -> None:
        raise NotImplementedError

    def make_manager(self, world: Any, args: KVArgs, mode: DisaggregationMode, options: Any) -> None:
        raise NotImplementedError


class WireWorld:
    """A prefill and a decode worker.

    states: for a model with states, the slot of the request on prefill and on decode. windows: for one with sliding
    windows, the pages of its window; or of another ``state_type``. stages: layers of each pipeline stage of prefill.
    """

    addr: str
    port = 1
    page_size = 4
    prefill: list[Any]
    decode: list[Any]
    request_type: type

    def prepare(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stages: tuple[int, ...],
        states: tuple[int, int] | None,
        windows: tuple[list[int], list[int]] | None,
        state_type: str,
    ) -> None:
        self.state_type = "mamba" if windows is None else state_type
        self.states: Any = windows if states is None else ([states[0]], [states[1]])
        self.layers = sum(stages)
        self.stages = [range(sum(stages[:i]), sum(stages[: i + 1])) for i in range(len(stages))]
        self.current: Any = None
        keep_threads_out(monkeypatch)
        for kind, place in (("cp", "cp_rank"), ("dp", "dp_rank"), ("tp", "rank")):
            monkeypatch.setattr(common, f"get_attention_{kind}_size", lambda kind=kind: getattr(self.current, kind))
            monkeypatch.setattr(common, f"get_attention_{kind}_rank", lambda place=place: getattr(self.current, place))
        monkeypatch.setattr(common, "get_pp_group", lambda: None)
        monkeypatch.setattr(common, "get_local_ip_auto", lambda: "127.0.0.1")

    def close(self) -> None:
        """End what does not end with the test."""

    def settle(self) -> None:
        """As every step of prefill's scheduler does."""
        for rank in self.prefill:
            rank.manager.settle()

    def request(self, room: int, prompt_len: int = 26, prefix_len: int | None = 8, aux: int = 0) -> Any:
        return self.request_type(self, room, prompt_len, prefix_len, aux)

    def push(self, *messages: list[bytes], rank: int = 0) -> None:
        """Send prefill these messages."""
        socket = push(self.prefill[rank])
        for frames in messages:
            socket.send_multipart(frames)

    def count(self) -> list[Counters]:
        """What each prefill rank counts from here on."""
        for rank in self.prefill:
            rank.manager.events = Counters()
        return [rank.manager.events for rank in self.prefill]

    def assert_books_closed(self, *rooms: int) -> None:
        """Nobody knows of a request any more."""
        for rank in self.prefill:
            rank.manager.settle()
            until(lambda m=rank.manager: not any(m.rooms_held().values()), "prefill is done", rank.manager.rooms_held)
        for rank in self.decode:
            assert not any(rank.manager.rooms_held().values()), rank.manager.rooms_held()

    def assert_healthy(self, room: int = 101) -> None:
        """Another request is served from start to end."""
        self.request(room).bootstrap().send().finish()


class Ends:
    """One request, by what the two schedulers do with it. Prefill uses pages 0, 1, ...; one DP rank of each serves it.

    base: the first of decode's pages.
    """

    sender_type: type
    receiver_type: type
    base = 32
    prefill_dp = decode_dp = 0

    def __init__(self, world: Any, room: int, prompt_len: int, prefix_len: int | None, aux: int = 0) -> None:
        self.world, self.room, self.prompt_len, self.prefix_len, self.aux = world, room, prompt_len, prefix_len, aux
        self.num_pages = pages(prompt_len, world.page_size)
        self.first_page = (prefix_len or 0) // world.page_size
        self.senders: list[Any] = []
        self.receivers: list[Any] = []

    @property
    def decode_pages(self) -> np.ndarray:
        return np.arange(self.base, self.base + self.num_pages, dtype=np.int32)

    def start_prefill(self) -> Self:
        for rank in [rank for rank in self.world.prefill if rank.dp_rank == self.prefill_dp]:
            sender = self.sender_type(rank.manager, self.world.addr, self.room, [rank.rank], rank.stage)
            sender.prompt_len = self.prompt_len
            self.senders.append(sender)
        return self

    def start_decode(self, fenced: bool = False) -> Self:
        for rank in [rank for rank in self.world.decode if rank.dp_rank == self.decode_dp]:
            receiver = self.receiver_type(rank.manager, self.world.addr, self.room)
            receiver.init(self.prefill_dp)
            receiver.fenced = fenced
            assert receiver.poll() == KVPoll.WaitingForInput and receiver.peer_takes_prefix
            self.receivers.append(receiver)
        return self

    def ask(self, **changes: Any) -> Self:
        """Send decode's request for KV, with ``changes`` in what send_metadata is given."""
        for rank in range(len(self.receivers)):
            self.ask_of(rank, **changes)
        return self

    def ask_of(self, rank: int, **changes: Any) -> None:
        given = {"decode_prefix_len": self.prefix_len, **changes}
        indices = given.pop("kv_indices", self.decode_pages[self.first_page :])
        states = given.pop("states", self.world.states and self.world.states[1])
        self.receivers[rank].send_metadata(indices, self.aux, states, **given)

    def frames(self, rank: int = 0) -> list[bytes]:
        """The message that a decode rank would send for this request to the first prefill rank."""
        return sent_frames(self.receivers[rank], lambda: self.ask_of(rank))[0]

    def bootstrap(self, fenced: bool = False) -> Self:
        return self.start_prefill().start_decode(fenced).ask().begin()

    def begin(self) -> Self:
        """Prefill, which has heard from decode, begins."""
        self.wait_senders(KVPoll.WaitingForInput)
        for sender in self.senders:
            sender.init(self.num_pages, self.aux)
        return self

    def send(self, *ends: int) -> Self:
        """Send the pages up to each of ``ends``; the last chunk ends at the prompt's last page."""
        for sender in self.senders:
            start = self.first_page
            for end in (*ends, self.num_pages):
                states = self.world.states and end == self.num_pages and self.world.states[0]
                sender.send(np.arange(start, end, dtype=np.int32), states or None)
                start = end
        return self

    def wait_senders(self, state: int) -> None:
        """Poll every sender until it says ``state``."""
        for sender in self.senders:
            until(lambda sender=sender: sender.poll() == state, f"the sender gets to {state}", sender.poll)

    def wait_receivers(self, state: int) -> None:
        """Poll every receiver until it says ``state``."""
        for receiver in self.receivers:
            until(lambda receiver=receiver: receiver.poll() == state, f"the receiver gets to {state}", receiver.poll)

    def finish(self) -> None:
        """Both ends see that all is there, and are over."""
        self.wait_senders(KVPoll.Success)
        self.wait_receivers(KVPoll.Success)
        for end in (*self.senders, *self.receivers):
            # As the schedulers do, where an end has it.
            getattr(end, "clear", lambda: None)()

    def fail(self, decode_too: bool = True) -> tuple[str, ...]:
        """Both ends fail, or prefill alone; the reasons of the first sender and of the first receiver."""
        self.wait_senders(KVPoll.Failed)
        if decode_too:
            self.wait_receivers(KVPoll.Failed)
        ours = reasons(self.senders)[:1]
        return (*ours, *reasons(self.receivers)[:1]) if decode_too else tuple(ours)

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

    def assert_landed(self) -> None:
        """Decode has the delta, all of it and nothing else."""
        raise NotImplementedError
