"""A decode worker with real queues and receivers, and a prefill with real senders, over either backend.

Real are the schedulers' methods, queues, tree, managers, receivers and senders; stand-ins are the transfer libraries,
the model, and what a prefill scheduler does. With that: the points of a request's life, and what may end it there.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import decode_world
import mooncake_world
import nixl_world
import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver, MooncakeKVSender
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, TransferBackend
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

# What the queues have others do for them.
PARTS_OF_QUEUES = re.compile(r"sglang\.srt\.disaggregation\.(decode_\w+|decode_radix\.\w+)$")
PAGE, CHUNK = 4, 3
PREFILL_SLOT, STATE_SLOTS = 2, 6
KINDS = {
    "nixl": (nixl_world.World, TransferBackend.NIXL, NixlKVReceiver, NixlKVSender),
    "mooncake": (mooncake_world.World, TransferBackend.MOONCAKE, MooncakeKVReceiver, MooncakeKVSender),
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
        self.receiver: Any = None

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
        if num_pages == 0:
            # Nor does the metadata come a second time.
            return
        decode_req = next((dr for dr in self.bench.world.transfer.queue if dr.req is self.req), None)
        if decode_req is not None:
            self.bench.world.deliver(decode_req, num_pages)
        last = self.sent + num_pages == decode_world.pages(len(self.req.origin_input_ids), PAGE)
        states = [self.bench.states] if self.bench.states and last else None
        self.sender.send(np.arange(self.sent, self.sent + num_pages, dtype=np.int32), states)
        self.sent += num_pages
        if decode_req is not None and last:
            self.bench.bring_metadata(decode_req)


class Bench:
    """A decode worker with real queues and receivers, a prefill worker at two addresses, and requests to both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any] | None = None):
        self.monkeypatch = monkeypatch
        # Hundreds of workers are made here, whose threads stay: none of them may wake up by itself.
        monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "100000")
        kind, _, states = kind.partition(" ")
        net_type, backend, self.receiver_type, self.sender_type = KINDS[kind]
        # A model with states: more requests than slots. The number is prefill's; decode's are those of its pool.
        self.states = PREFILL_SLOT if states else None
        self.net = net_type(monkeypatch, **({"states": (PREFILL_SLOT, 0)} if states else {}))
        self.prefill, self.manager = self.net.prefill[0].manager, self.net.decode[0].manager
        address = self.net.addr
        self.host, port = address.split(":")
        self.port = int(port)
        # Another name of the same prefill, for those that go on when the first is lost.
        self.other_host = "localhost"
        self.manager.prefill_info_table[f"{self.other_host}:{self.port}"] = self.manager.prefill_info_table[address]
        known = dataclasses.replace(self.manager.prefills.of(address), others={"queued": 1})
        self.manager.prefills.capabilities |= {address: known, f"{self.other_host}:{self.port}": known}
        self.address = address
        self.info = self.manager.prefill_info_table[address]
        # A request that has most of the memory, see `short_of_memory`.
        self.hog: Any = None

        world = self.world = decode_world.World(
            size=192, page_size=PAGE, max_reqs=4, states=STATE_SLOTS if states else None, options=options
        )
        world.queue.kv_manager, world.queue.transfer_backend = self.manager, backend
        self.scheduler = self._scheduler(world)
        self.halves: dict[str, Half] = {}
        self.finished: Counter[str] = Counter()
        self.dead = False
        self.gone = False
        self.numbers = iter(range(1000))
        are_gone = self.manager.are_gone
        monkeypatch.setattr(self.manager, "are_gone", lambda ranks: self.gone or are_gone(ranks))
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
        scheduler.grammar_manager = SimpleNamespace(abort_requests=lambda recv: None, grammar_queue=[])
        scheduler.cur_batch, scheduler.max_total_num_tokens = None, world.size
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
            receiver.state_indices = rest[0]
            return send(receiver, page_indices, aux_index, *rest, **more)

        self.monkeypatch.setattr(receiver_type, "send_metadata", note)

    # ---- requests ----

    def addr(self, req: Req) -> str:
        return f"{req.bootstrap_host}:{req.bootstrap_port}"

    def arrive(self, host: str | None = None, prompt_len: int = 22, prefill: bool = True, **more: Any) -> Req:
        number = next(self.numbers)
        req = Req(
            f"request-{number}",
            "",
            [1 + number % 200, *range(1, prompt_len)],
            SamplingParams(max_new_tokens=6),
            **{"bootstrap_host": host or self.host, "bootstrap_port": self.port, **more},
            bootstrap_room=FIRST_ROOM + number,
            disagg_mode=DisaggregationMode.DECODE,
        )
        self.world.weights_of[req.rid] = self.world.weights
        if prefill and req.bootstrap_host != FAKE_BOOTSTRAP_HOST:
            self.halves[req.rid] = Half(self, req)
        self.world.queue.add(req)
        receiver = self.receiver(req)
        receiver.page_indices = []
        if req.rid in self.halves:
            self.halves[req.rid].receiver = receiver
        return req

    def forget_prefill(self) -> None:
        """As before the first handshake with it; it does not answer."""
        self.info = self.manager.prefill_info_table.pop(self.address)
        self.manager.try_ensure_parallel_info = self.manager.prefill_info_table.__contains__

    def remember_prefill(self) -> None:
        """It answers."""
        self.manager.prefill_info_table.setdefault(self.address, self.info)
        self.world.queue._ensure_last_attempt_time.clear()

    def begin_anew(self) -> None:
        """Let another request of the same worker be looked at by itself."""
        self.hog, self.dead, self.gone = None, False, False
        self.halves.clear()
        self.scheduler.told_aborted.clear()
        self.world.streamed.clear()
        self.world.tree.evict_shortfall(self.world.size)

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
        deadline = time.monotonic() + 30
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
        for half in self.halves.values():
            if half.receiver.bootstrap_infos is None and not half.ended:
                # Decode never knew whom to tell. It hears of it from its client, or in the end from the clock.
                half.sender.abort()
        self.step_until(lambda: all(half.ended or half.dead for half in self.halves.values()), "prefill's end")

    # ---- the outcome ----

    def told(self, req: Req) -> int:
        """How often the client was told that its request has ended."""
        aborted = self.scheduler.told_aborted.count(req.rid)
        return sum(one is req for one in self.world.streamed) + aborted + self.finished[req.rid]

    def assert_books_closed(self, managers: bool = True) -> None:
        """At the end nothing is held, and no book of anybody mentions a request."""
        world = self.world
        assert world.allocator.available_size() + world.tree.evictable_size() == world.size
        assert world.tree.protected_size() == 0 and world.tree.locks_taken == world.tree.locks_released
        assert len(world.pool.free_slots) == len(set(world.pool.free_slots)) == world.pool.req_to_token.shape[0]
        assert sorted(world.meta_alloc.free_slots) == list(range(world.meta_alloc.size))
        if self.states:
            assert sorted(world.pool.mamba_pool.free_slots.tolist()) == list(range(1, STATE_SLOTS + 1))
        rooms = set(range(FIRST_ROOM, FIRST_ROOM + 1000))
        owners = [owner for queue in (world.queue, world.transfer) for owner in (queue, *parts(queue).values())]
        for owner in (*[self.manager][: int(managers)], *owners):
            left = {name for name, book in vars(owner).items() if mentions(book, rooms)}
            assert not left, f"{type(owner).__name__}: {left}"
        if not self.dead:
            # What prefill remembers on purpose.
            books = {**vars(self.prefill), **vars(self.prefill.rooms)}
            left = {name for name, book in books.items() if mentions(book, rooms)} - {"ended"}
            assert not left, f"prefill: {left}"


def parts(owner: Any) -> dict[str, Any]:
    """What works for a queue, and what works for that, by the path to it: each has books of its own.

    But for rooms, which hold nobody.
    """
    found: dict[str, Any] = {}
    for name, value in vars(owner).items():
        ours = PARTS_OF_QUEUES.match(type(value).__module__) and hasattr(value, "__dict__")
        if ours and not isinstance(value, WeakValueDictionary):
            found[name] = value
            found |= {f"{name}.{more}": part for more, part in parts(value).items()}
    return found


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


def unasked(bench: Bench) -> Req:
    """It has been admitted, and a step in flight still uses its pages; prefill will be asked in the next one."""
    req = bench.arrive()
    ended = SimpleNamespace(finished_reason=FINISH_LENGTH(1), freed_row=-1)
    slots = torch.arange(0, bench.world.size + PAGE, PAGE)
    batch = ScheduleBatch(
        reqs=[ended] * len(slots),
        out_cache_loc=slots,
        req_pool_indices=torch.full_like(slots, -1),
        req_to_token_pool=bench.world.pool,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    bench.scheduler.result_queue = [(batch, SimpleNamespace(copy_done=None))]
    bench.scheduler.process_decode_queue()
    del bench.scheduler.result_queue
    deferred = [dr.req for dr in bench.world.transfer.queue if dr.phase is Phase.DEFERRED]
    assert deferred == [req] == [dr.req for dr in bench.world.transfer.queue]
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
    unasked,
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


def time_runs_out(bench: Bench, req: Req) -> None:
    """Whatever it waits for does not come in the time that the operator has set for it."""
    receiver = bench.receiver(req)
    if receiver is not None:
        receiver.made_at -= 1e6
        receiver.state.given_up_at -= 1e6
        if receiver.init_time is not None:
            receiver.init_time -= 1e6


def prefill_aborts(bench: Bench, req: Req) -> None:
    """It fails there and prefill says so, or will when it is asked."""
    if not bench.halves[req.rid].ended:
        bench.halves[req.rid].sender.abort()


def prefill_refuses(bench: Bench, req: Req) -> None:
    """What decode asks for cannot be right."""
    bench.halves[req.rid].sender.prompt_len += 2 * PAGE


def foreign_metadata(bench: Bench, req: Req) -> None:
    """A late write of another request lands in its metadata buffer."""
    entry = bench.entry(req)
    if entry is not None and entry.metadata_buffer_index != -1 and entry.phase is not Phase.DEFERRED:
        bench.halves[req.rid].send_all()
        bench.world.meta.bootstrap_room[entry.metadata_buffer_index, 0] = 99


# What each cause ends, at least; elsewhere the request may go on, and is told its end once all the same.
BEFORE_COMMIT = {state for state in STATES if state not in BEYOND and state is not quarantined}
ENDS = {
    prefill_lost: BEFORE_COMMIT - {arrived},
    client_aborts: set(STATES) - {quarantined, arrived},
    all_are_aborted: set(STATES) - {quarantined, arrived},
    time_runs_out: {pending, asked, begun, sent_in_part, without_metadata},
    prefill_aborts: {pending, shaken, short_of_memory, asked, begun, sent_in_part},
    prefill_refuses: {shaken, short_of_memory},
    foreign_metadata: {asked, begun, sent_in_part, without_metadata, arrived} - {asked},
}


def has_failed(bench: Bench, req: Req) -> bool:
    return req.rid in bench.scheduler.told_aborted or isinstance(req.finished_reason, FINISH_ABORT)


def make_room(bench: Bench) -> None:
    """What had all the memory ends."""
    if bench.hog is not None:
        bench.hog.kv_receiver.aux_index = bench.hog.metadata_buffer_index
        bench.world.complete(bench.hog)


def queues_and_parts(bench: Bench) -> dict[str, Any]:
    queues = {"prealloc": bench.world.queue, "transfer": bench.world.transfer}
    more = {f"{name}.{path}": part for name, queue in queues.items() for path, part in parts(queue).items()}
    return queues | more


def ran_s() -> float:
    return time.monotonic() - int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def timed(bench: Bench, *reqs: Req) -> float:
    """Seconds until all of these have been told that they failed; no step in between takes long.

    A step's time is without what it waited for a core, which on a busy machine is any time.
    """
    start = time.monotonic()
    while not all(bench.told(req) for req in reqs):
        assert time.monotonic() < start + 60
        began = ran_s()
        bench.scheduler.process_decode_queue()
        assert ran_s() - began < 1, "the scheduler waited"
        time.sleep(0.01)
    assert all(has_failed(bench, req) for req in reqs)
    return time.monotonic() - start
