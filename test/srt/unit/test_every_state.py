"""A request may be lost at every point of its life, by every cause, on every backend: it alone ends, and is told once.

The points are walked, not listed: a cell is a place in the decode worker (a queue or list of its code) and what its
receiver says there. Real schedulers' methods, queues, tree, managers, receivers and senders; stand-ins are the transfer
libraries, the model, and what a prefill scheduler does.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import decode_world
import numpy as np
import pytest
import test_mooncake_wire as mooncake_wire
import test_nixl_wire as nixl_wire
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver, MooncakeKVSender
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, TransferBackend
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE, CHUNK = 4, 3
KINDS = {
    "nixl": (nixl_wire.World, TransferBackend.NIXL, NixlKVReceiver, NixlKVSender),
    "mooncake": (mooncake_wire.World, TransferBackend.MOONCAKE, MooncakeKVReceiver, MooncakeKVSender),
}
# No room is a small number, so that one that is left in a book cannot be taken for something else there.
FIRST_ROOM = 7_100_000_000


class Half:
    """What prefill does with one request. ``goes_on``: whether it works when the bench steps."""

    def __init__(self, bench: Bench, req: Req):
        self.bench, self.req = bench, req
        self.sender = bench.sender_type(bench.prefill, bench.addr(req), req.bootstrap_room, [0], 0)
        self.sender.prompt_len = len(req.origin_input_ids)
        self.goes_on = self.begun = self.ended = False
        self.sent = 0

    @property
    def dead(self) -> bool:
        return self.bench.dead and self.req.bootstrap_host == self.bench.host

    def step(self) -> None:
        if self.ended or self.dead:
            return
        state = self.sender.poll()
        if state == KVPoll.WaitingForInput and not self.begun:
            self.sender.init(decode_world.pages(len(self.req.origin_input_ids), PAGE), 0)
            self.sent, self.begun = self.sender.decode_prefix_len // PAGE, True
        if state == KVPoll.Failed:
            self.ended = True
            with pytest.raises(Exception, match="."):
                self.sender.failure_exception()
        elif state == KVPoll.Success:
            self.ended = True
            if hasattr(self.sender, "clear"):
                self.sender.clear()
        elif self.begun and self.goes_on:
            self.send_all()

    def send_all(self) -> None:
        self.send(decode_world.pages(len(self.req.origin_input_ids), PAGE) - self.sent)

    def send(self, num_pages: int) -> None:
        decode_req = next((dr for dr in self.bench.world.transfer.queue if dr.req is self.req), None)
        if num_pages and decode_req is not None:
            self.bench.world.deliver(decode_req, num_pages)
        if num_pages:
            self.sender.send(np.arange(self.sent, self.sent + num_pages, dtype=np.int32))
        self.sent += num_pages
        if decode_req is not None and self.sent == decode_world.pages(len(self.req.origin_input_ids), PAGE):
            self.bench.bring_metadata(decode_req)


class Bench:
    """A decode worker with real queues and receivers, a prefill worker at two addresses, and requests to both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str):
        self.monkeypatch = monkeypatch
        net_type, backend, self.receiver_type, self.sender_type = KINDS[kind]
        self.net = net_type(monkeypatch)
        self.prefill, self.manager = self.net.prefill[0].manager, self.net.decode[0].manager
        address = self.net.addr if kind == "mooncake" else nixl_wire.ADDR
        self.host, port = address.split(":")
        self.port = int(port)
        # Another name of the same prefill, for those that go on when the first is lost.
        self.other_host = "localhost"
        self.manager.prefill_info_table[f"{self.other_host}:{self.port}"] = self.manager.prefill_info_table[address]
        self.manager.prefix_peers[f"{self.other_host}:{self.port}"] = True
        self.address = address

        world = self.world = decode_world.World(size=192, page_size=PAGE, max_reqs=4)
        world.queue.kv_manager, world.queue.transfer_backend = self.manager, backend
        self.scheduler = self._scheduler(world)
        self.halves: dict[str, Half] = {}
        self.finished: Counter[str] = Counter()
        self.dead = False
        self.gone = False
        self.numbers = iter(range(1000))
        monkeypatch.setattr(common, "nothing_listens", lambda host, port: self.gone)
        self._note_pages(self.receiver_type)
        self._note_pages(FakeKVReceiver)

    def _scheduler(self, world: decode_world.World) -> Scheduler:
        scheduler = object.__new__(Scheduler)
        vars(scheduler).update(vars(world.scheduler))
        scheduler.disaggregation_mode = DisaggregationMode.DECODE
        scheduler.tree_cache, scheduler.enable_hicache_storage = world.tree, False
        scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue = world.queue, world.transfer
        scheduler.server_args.disaggregation_decode_enable_offload_kvcache = False
        scheduler.server_args.disaggregation_decode_polling_interval = 1
        scheduler.grammar_manager = SimpleNamespace(abort_requests=lambda recv: None)
        scheduler.cur_batch = None
        scheduler.told_aborted = []
        scheduler.send_to_tokenizer = SimpleNamespace(
            send_output=lambda message, req: scheduler.told_aborted.append(message.rid)
        )
        world.scheduler = world.queue.scheduler = world.transfer.scheduler = scheduler
        return scheduler

    def _note_pages(self, receiver_type: type) -> None:
        """Receivers remember which pages they named, which `World.deliver` and `World.check` ask."""
        send = receiver_type.send_metadata

        @functools.wraps(send)
        def note(receiver, page_indices, aux_index=None, *rest, **more):
            receiver.page_indices, receiver.aux_index = page_indices.tolist(), aux_index
            receiver.prefix_len, receiver.sent_pages = more.get("decode_prefix_len") or 0, 0
            return send(receiver, page_indices, aux_index, *rest, **more)

        self.monkeypatch.setattr(receiver_type, "send_metadata", note)

    # ---- requests ----

    def addr(self, req: Req) -> str:
        return f"{req.bootstrap_host}:{req.bootstrap_port}"

    def arrive(self, host: str | None = None, n: int = 1, prompt_len: int = 22, prefill: bool = True) -> Req:
        number = next(self.numbers)
        req = Req(
            f"request-{number}",
            "",
            [1 + number % 200, *range(1, prompt_len)],
            SamplingParams(max_new_tokens=6),
            bootstrap_host=self.host if host is None else host,
            bootstrap_port=self.port,
            bootstrap_room=FIRST_ROOM + number,
            disagg_mode=DisaggregationMode.DECODE,
        )
        req.sampling_params.n = n
        self.world.weights_of[req.rid] = self.world.weights
        if prefill and req.bootstrap_host != FAKE_BOOTSTRAP_HOST:
            self.halves[req.rid] = Half(self, req)
        self.world.queue.add(req)
        return req

    def forget_prefill(self) -> None:
        """As before the first handshake with it; it does not answer."""
        self.manager.prefill_info_table.pop(self.address)
        ensure = self.manager.try_ensure_parallel_info
        self.manager.try_ensure_parallel_info = lambda addr: addr != self.address and ensure(addr)

    def entry(self, req: Req) -> Any:
        queues = self.world.queue.queue + self.world.transfer.queue + self.world.transfer.quarantine
        return next((dr for dr in queues if dr.req is req), None)

    def receiver(self, req: Req) -> Any:
        entry = self.entry(req)
        return entry and entry.kv_receiver

    def bring_metadata(self, decode_req: Any) -> None:
        index = decode_req.metadata_buffer_index
        self.world.meta.output_ids[index, 0] = 7
        self.world.meta.bootstrap_room[index, 0] = decode_req.req.bootstrap_room

    def abort(self, message: AbortReq) -> None:
        """Both workers hear of it, but what decode knows the address of, it has to tell prefill itself."""
        for decode_req in self.world.queue.pending_reqs:
            self.halves[decode_req.req.rid].sender.abort()
        self.scheduler.abort_request(message)

    # ---- time ----

    def step(self, decode: bool = True) -> None:
        """One step of both schedulers."""
        world = self.world
        self.scheduler.process_decode_queue()
        for req in [*self.scheduler.waiting_queue] if decode else []:
            self.scheduler.waiting_queue.remove(req)
            req.init_next_round_input(world.tree)
            world.tree.cache_unfinished_req(req)
            world.running.append(req)
        if decode:
            before = list(world.running)
            for req in before:
                if req.to_finish is not None:
                    req.finished_reason = req.to_finish
                    world.finish(req)
                    world.streamed.append(req)
            world.decode()
            self.finished.update(
                r.rid for r in before if r not in world.running and not r.finished() and not r.is_retracted
            )
        for half in self.halves.values():
            half.step()
        self.prefill.settle()
        for decode_req in world.transfer.queue:
            if isinstance(decode_req.kv_receiver, FakeKVReceiver):
                self.bring_metadata(decode_req)
        world.check()

    def step_until(self, done: Callable[[], bool], what: str, decode: bool = False) -> None:
        deadline = time.monotonic() + 5
        while not done():
            assert time.monotonic() < deadline, f"{what} does not come"
            self.step(decode)
            time.sleep(0.001)

    def drain(self) -> None:
        """Everything goes on until nothing moves."""
        for half in self.halves.values():
            half.goes_on = True
        world = self.world

        def idle() -> bool:
            return world.idle() and not world.queue.retracted_queue and not world.queue.pending_reqs

        self.step_until(idle, "the end", decode=True)
        self.step_until(lambda: all(half.ended or half.dead for half in self.halves.values()), "prefill's end")

    # ---- the outcome ----

    def told(self, req: Req) -> int:
        """How often the client was told that its request has ended."""
        aborted = self.scheduler.told_aborted.count(req.rid)
        return sum(one is req for one in self.world.streamed) + aborted + self.finished[req.rid]

    def assert_books_closed(self) -> None:
        """At the end nothing is held, and no book of anybody mentions a request."""
        world = self.world
        assert world.allocator.available_size() + world.tree.evictable_size() == world.size
        assert world.tree.protected_size() == 0 and world.tree.locks_taken == world.tree.locks_released
        assert len(world.pool.free_slots) == len(set(world.pool.free_slots)) == world.pool.req_to_token.shape[0]
        assert sorted(world.meta_alloc.free_slots) == list(range(world.meta_alloc.size))
        rooms = set(range(FIRST_ROOM, FIRST_ROOM + next(self.numbers)))
        for owner in (self.manager, world.queue, world.transfer):
            left = {name for name, book in vars(owner).items() if mentions(book, rooms)}
            assert not left, f"{type(owner).__name__}: {left}"
        if not self.dead:
            # What prefill remembers on purpose.
            left = {name for name, book in vars(self.prefill).items() if mentions(book, rooms)} - {"ended_rooms"}
            assert not left, f"prefill: {left}"


def mentions(book: Any, rooms: set[int]) -> bool:
    """Whether one of these rooms, or a request of one, is in a container, at any depth."""
    if isinstance(book, int):
        return book in rooms
    if isinstance(book, (Req, DecodeRequest, common.CommonKVReceiver, common.CommonKVSender)):
        return True
    if isinstance(book, dict):
        return any(mentions(key, rooms) or mentions(value, rooms) for key, value in book.items())
    if isinstance(book, (list, tuple, set, frozenset)) or type(book).__name__ == "deque":
        return any(mentions(item, rooms) for item in book)
    return False


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[Bench]:
    made = Bench(monkeypatch, kind)
    yield made
    if hasattr(made.net, "close"):
        made.net.close()


# ---- the points of a life: each brings a new request there ----


def pending(bench: Bench) -> Req:
    """Its handshake has not begun: nothing is known of its prefill."""
    bench.forget_prefill()
    req = bench.arrive()
    assert [dr.req for dr in bench.world.queue.pending_reqs] == [req]
    return req


def shaken(bench: Bench) -> Req:
    """Its receiver is ready, and no step has seen it."""
    return bench.arrive()


def short_of_memory(bench: Bench) -> Req:
    hog = bench.world.arrive([250] * 180, warmup=True)
    bench.world.handshake(hog)
    bench.scheduler.process_decode_queue()
    req = bench.arrive()
    bench.scheduler.process_decode_queue()
    entry = bench.entry(req)
    assert entry in bench.world.queue.queue and entry.waiting_for_input
    bench.hog = hog
    return req


def asked(bench: Bench) -> Req:
    """Prefill has been asked for its KV."""
    req = bench.arrive()
    bench.step()
    assert bench.entry(req) in bench.world.transfer.queue
    return req


def begun(bench: Bench) -> Req:
    req = asked(bench)
    bench.step_until(lambda: bench.halves[req.rid].begun, "prefill's turn")
    return req


def sent_in_part(bench: Bench) -> Req:
    req = begun(bench)
    bench.halves[req.rid].send(CHUNK)
    return req


def arrived(bench: Bench) -> Req:
    """All is here, and no step has seen it."""
    req = begun(bench)
    bench.halves[req.rid].send_all()
    return req


def without_metadata(bench: Bench) -> Req:
    """All has been announced, and the metadata has not landed."""
    req = arrived(bench)
    room = bench.world.meta.bootstrap_room[bench.entry(req).metadata_buffer_index]
    room.zero_()
    bench.step_until(lambda: bench.receiver(req).poll() == KVPoll.Transferring, "the announcement")
    return req


def committed(bench: Bench) -> Req:
    req = arrived(bench)
    bench.step_until(lambda: req in bench.world.waiting, "the commit")
    return req


def running(bench: Bench) -> Req:
    req = committed(bench)
    bench.step()
    assert req in bench.world.running
    return req


def retracted(bench: Bench) -> Req:
    req = running(bench)
    bench.world.retract(req)
    assert bench.world.queue.retracted_queue == [req]
    return req


def resumed(bench: Bench) -> Req:
    req = retracted(bench)
    bench.scheduler.process_decode_queue()
    assert req in bench.world.waiting
    return req


def quarantined(bench: Bench) -> Req:
    """It has failed and been told, and prefill may still write for it."""
    req = begun(bench)
    bench.receiver(req).abort()
    bench.scheduler.process_decode_queue()
    assert [dr.req for dr in bench.world.transfer.quarantine] == [req]
    return req


STATES = [
    pending,
    shaken,
    short_of_memory,
    asked,
    begun,
    sent_in_part,
    without_metadata,
    arrived,
    committed,
    running,
    retracted,
    resumed,
    quarantined,
]
# Prefill's part is done.
BEYOND = {committed, running, retracted, resumed}


# ---- causes ----


def prefill_lost(bench: Bench, req: Req) -> None:
    bench.dead = bench.gone = True
    bench.manager._handle_node_failure(bench.address)


def client_aborts(bench: Bench, req: Req) -> None:
    bench.abort(AbortReq(rid=req.rid))


def all_are_aborted(bench: Bench, req: Req) -> None:
    bench.abort(AbortReq(abort_all=True))


CAUSES = [prefill_lost, client_aborts, all_are_aborted]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", STATES)
def test_lost(bench: Bench, state: Callable, cause: Callable):
    req = state(bench)
    told = bench.told(req)
    other = bench.arrive(bench.other_host) if cause is not all_are_aborted else None
    cause(bench, req)
    if state is without_metadata and cause is prefill_lost:
        # All has been said about it that will be.
        bench.receiver(req).init_time -= bench.manager.waiting_timeout
    if hasattr(bench, "hog"):
        bench.hog.kv_receiver.state = KVPoll.Success
        bench.hog.kv_receiver.aux_index = bench.hog.metadata_buffer_index
        bench.world.complete(bench.hog)
    bench.drain()
    assert bench.told(req) == 1 and told == int(state is quarantined)
    if cause is prefill_lost and state in BEYOND:
        assert not isinstance(req.finished_reason, FINISH_ABORT)
    if other is not None:
        assert bench.finished[other.rid] == 1
    bench.assert_books_closed()
