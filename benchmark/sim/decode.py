"""The decode worker: the real queues, tree, pool and allocator, with a loop that takes its time from the simulation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from decode_worker import DecodeWorker, Queue
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import alloc_token_slots, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sim.events import Clock
from sim.figures import Gauges, Record
from sim.local import SimulatedSteps
from sim.prefill import Job, Link, Prefill
from sim.steps import step_time, tokens_read
from sim.workload import SPAN, Request, Workload

# What the engine frees for each other request when it retracts one.
RETRACT_STEPS = 20
UNIQUE = itertools.count(1)


def _tree(policy: str, params: CacheInitParams) -> DecodeRadixCache:
    """The tree, with this --radix-eviction-policy."""
    return DecodeRadixCache(dataclasses.replace(params, eviction_policy=policy))


class Step(NamedTuple):
    """What the gate asks of a batch whose result has come."""

    reqs: list[Req]
    forward_mode: ForwardMode = ForwardMode.DECODE
    global_num_tokens: None = None


class Receiver:
    """The wire as the decode worker sees it."""

    carries_prefix = True
    require_staging = False
    metadata_room = None
    fenced = False

    def __init__(self, worker: SimulatedDecode, req: Req, record: Record, prefill: Prefill):
        self.worker, self.req, self.record, self.prefill = worker, req, record, prefill
        self.peer_takes_prefix = not worker.off
        self.bootstrap_addr = f"{prefill.name}:8998"
        self.state = KVPoll.Bootstrapping
        self.quiet = False
        # Every prefill here drops what decode computes.
        self.kv_mgr = SimpleNamespace(drops=lambda address: True)

    def init(self, prefill_dp_rank: int) -> None:
        self.worker.clock.after(self.worker.times.handshake, self._shaken)

    def _shaken(self) -> None:
        self.state = KVPoll.WaitingForInput
        self.worker.wake()

    def poll(self) -> int:
        return self.state

    def send_metadata(self, page_indices, aux_index, state_indices, decode_prefix_len=None) -> None:
        worker, record = self.worker, self.record
        self.aux_index = aux_index
        self.state = KVPoll.Transferring
        record.admitted = worker.clock.now
        record.prefix_len = min((decode_prefix_len or 0) * worker.scale, record.request.length)
        record.sent_pages = len(page_indices)
        worker.asked(record)
        job = Job(record.request, record.prefix_len, worker.links[self.prefill.name], self._arrived)
        worker.clock.after(worker.times.message, lambda: self.prefill.add(job))

    def _arrived(self) -> None:
        meta = self.worker.meta
        meta.output_ids[self.aux_index, 0] = 1
        meta.bootstrap_room[self.aux_index, 0] = self.req.bootstrap_room
        self.state = KVPoll.Success
        self.worker.wake()

    @property
    def conclude_state(self) -> int | None:
        return self.state if self.state in (KVPoll.Success, KVPoll.Failed) else None

    @conclude_state.setter
    def conclude_state(self, state: int) -> None:
        self.state = state

    def end(self) -> None:
        """Nothing is asked of prefill: decode computes the prompt."""
        record = self.record
        record.admitted, record.local = self.worker.clock.now, True
        record.prefix_len = min((self.req.transfer_prefix_len or 0) * self.worker.scale, record.request.length)
        self.worker.asked(record)

    def failure_exception(self) -> None:
        raise RuntimeError("failed in the simulation")

    def abort(self) -> None:
        self.state = KVPoll.Failed

    cancel = abort

    def writers_done(self) -> bool:
        return self.quiet

    def clear(self) -> None:
        pass


class SimulatedQueue(Queue):
    """The real queue; its receivers are those of the simulation."""

    worker: SimulatedDecode

    def _create_receiver_and_enqueue(self, req: Req) -> DecodeRequest:
        record = self.worker.records[req.rid]
        prefill = self.worker.prefill_of(record.request)
        decode_req = DecodeRequest(req, Receiver(self.worker, req, record, prefill))
        self.queue.append(decode_req)
        return decode_req

    def _resolve_prefill_dp_rank(self, req: Req) -> int:
        return 0


class SimulatedDecode(DecodeWorker):
    """One decode worker: steps of decoding, and between them a look at the queues, as the engine's loop does."""

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        off: bool,
        options: Mapping[str, Any],
        *,
        longest: int,
        prefill_of: Callable[[Request], Prefill],
        asked: Callable[[Record], None],
        finished: Callable[[Record], None],
        name: str,
    ):
        self.clock, self.times, self.off, self.scale = clock, workload.times, off, workload.scale
        self.prefill_of, self.asked, self.finished, self.name = prefill_of, asked, finished, name
        self.max_running = workload.max_running
        size = workload.pool // workload.scale // workload.page * workload.page
        super().__init__(
            size,
            workload.page,
            max_reqs=workload.max_running,
            max_len=-(-longest // workload.scale) + workload.page,
            reserved=-(-workload.reserve // workload.scale),
            queue_type=SimulatedQueue,
            tree_type=ChunkCache if off else functools.partial(_tree, options.get("radix_eviction_policy", "lru")),
            options=options,
        )
        self.queue.worker = self
        # What holds requests back, if an ITL is promised; and whether prefill has the same cores and computes.
        self.gate = next((limit.__self__.gate for limit in self.transfer.hooks.limit), None)
        self.beside: Callable[[], bool] = lambda: False
        # There is no memory behind the slots, so nothing is copied when a request is retracted or resumed.
        self.allocator.get_cpu_copy = lambda indices: []
        self.allocator.load_cpu_copy = lambda kv_cache_cpu, indices: None
        self.allocator.get_kvcache().cpu_offloading_chunk_size = 1
        self.links: dict[str, Link] = {}
        self.records: dict[str, Record] = {}
        self.local = None if self.transfer.local is None else SimulatedSteps(self, self.transfer.local)
        self.gauges = Gauges()
        self._ids = itertools.count(1)
        # A stride: decode steps without a look at the queues.
        self._version = 0
        self._began = self._step = 0.0
        self._steps = 0
        self._ticking = False

    def _scheduler_stand_in(self, args: SimpleNamespace, *rest: Any) -> SimpleNamespace:
        """Adds what the gate asks of the model: whether steps read what is shared once."""
        made = super()._scheduler_stand_in(args, *rest)
        made.tp_worker.model_runner.attn_backend = SimpleNamespace(shares_prefixes=bool(self.times.shares))
        return made

    @property
    def load(self) -> int:
        """Requests that it has and has not finished."""
        return len(self.records)

    def arrive(self, request: Request) -> Record:
        n = next(self._ids)
        rid = f"{self.name}-{n}"
        record = self.records[rid] = Record(request, self.clock.now)
        prompt = request.slots(self.scale, UNIQUE)
        # As many slots as the answer takes, and its last token, which takes none.
        slots = -(-(request.length + request.answer - 1) // self.scale) - len(prompt)
        req = Req(
            rid,
            "",
            prompt,
            SamplingParams(max_new_tokens=slots + 1),
            bootstrap_host=self.prefill_of(request).name,
            bootstrap_port=8998,
            bootstrap_room=n,
            disagg_mode=DisaggregationMode.DECODE,
        )
        self.queue.add(req)
        assert not self.streamed, f"{rid} was refused: {self.streamed[0].finished_reason}"
        self.wake()
        return record

    # ---- the loop ----

    def wake(self) -> None:
        """Something has come from outside: look at the queues, after the decode step that is under way."""
        if self._steps:
            done = max(1, math.ceil((self.clock.now - self._began) / self._step - 1e-9))
            if done < self._steps:
                self._stride(done)
        elif not self._ticking:
            self._ticking = True
            self.clock.at(self.clock.now, self._tick)

    def _stride(self, steps: int) -> None:
        """Decode ``steps`` steps from the last look at the queues on."""
        self._steps = steps
        self._version += 1
        version = self._version
        self.clock.at(self._began + steps * self._step, lambda: self._end_stride(version))

    def _end_stride(self, version: int) -> None:
        if version != self._version:
            return
        steps, self._steps = self._steps, 0
        if self.local is not None:
            self.local.decoded(steps)
        self.gauges.decoded += steps * len(self.running)
        self._grow(steps)
        ended = [r for r in self.running if self.records[r.rid].tokens >= self.records[r.rid].request.answer]
        for req in ended:
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        if self.gate is not None:
            self.gate.note_step(Step(self.running), None, self.clock.now)
        for req in ended:
            self._finish(req)
        self._tick()

    def _end_local(self) -> None:
        assert self.local is not None
        self.local.end()
        self._tick()

    def _tick(self) -> None:
        """A look at the queues, the prebuilt batch, and the next decode steps, or one over prompts."""
        if self.local is not None and self.local.under_way:
            return
        self._ticking = False
        self._look()
        self.gauges.take(self)
        seconds = None if self.local is None else self.local.begin()
        if seconds is not None:
            self._ticking = True
            self.clock.after(seconds, self._end_local)
        elif self.running:
            left = min([self.records[r.rid].request.answer - self.records[r.rid].tokens for r in self.running])
            self._began = self.clock.now
            self._step = step_time(self, len(self.running), tokens_read(self))
            self._stride(1 if self.gate is not None else min(left, self.times.stride))
        elif self.records:
            if self.gate is not None:
                self.gate.idle()
            self._ticking = True
            self.clock.after(self.times.poll, lambda: self._tick() if self._ticking else None)

    def _look(self) -> None:
        """As the engine's loop looks at its queues before each decode step."""
        self.waiting.extend(self.queue.resume_retracted_reqs())
        if not self.queue.retracted_queue:
            admitted, failed = self.queue.pop_preallocated()
            assert not failed
            self.transfer.extend(admitted)
            self.waiting.extend(self.transfer.pop_transferred())
        room = self.max_running - len(self.running)
        ready, self.scheduler.waiting_queue = self.waiting[:room], self.waiting[room:]
        for req in ready:
            req.init_next_round_input(self.tree)
            self.begin_answer(req, req.output_ids)

    def begin_answer(self, req: Req, first: Sequence[int]) -> None:
        """``req`` has its prompt's KV and its first token, and decodes from now on. first: what stands for that."""
        record = self.records[req.rid]
        req.output_ids = list(first)
        if record.first is None:
            record.first = self.clock.now
            record.tokens = 1
            # The metadata buffer has 32 bits for it.
            req.output_ids[0] = record.request.answer_key * SPAN
        if record.tokens >= record.request.answer:
            self._release(req)
        else:
            self.tree.cache_unfinished_req(req)
            self._complete_page(req)
            self.running.append(req)

    # ---- decoding ----

    def _slots(self, record: Record, tokens: int) -> int:
        """Slots of KV after ``tokens`` tokens of the answer, the last of which has none yet."""
        return -(-(record.request.length + tokens - 1) // self.scale)

    def _complete_page(self, req: Req) -> None:
        """Write the rest of its last page into its table, which has the slots of its tokens only."""
        end = req.kv_allocated_len
        rest = -end % self.page_size
        if rest:
            table = self.pool.req_to_token[req.req_pool_idx]
            table[end : end + rest] = torch.arange(1, rest + 1, dtype=torch.int32) + table[end - 1]

    def _grow(self, steps: int) -> None:
        """Slots for the next tokens of all running requests; who has the fewest goes when there are none left."""
        page = self.page_size
        while True:
            records = [self.records[req.rid] for req in self.running]
            # Who needs another slot, of which most stand for many tokens, and how many it will have then.
            growing = [
                (req, end)
                for req, record in zip(self.running, records, strict=True)
                if (end := self._slots(record, record.tokens + steps)) != req.kv_allocated_len
            ]
            more = [pages(end, page) - pages(req.kv_allocated_len, page) for req, end in growing]
            need = sum(more) * page
            evict_from_tree_cache(self.tree, need)
            if self.allocator.available_size() >= need:
                break
            self._retract(min(self.running, key=lambda r: (len(r.output_ids), -len(r.origin_input_ids))))
        slots = alloc_token_slots(self.tree, need).to(torch.int32) if need else None
        taken = 0
        for (req, end), num_pages in zip(growing, more, strict=True):
            if num_pages and slots is not None:
                start, new = pages(req.kv_allocated_len, page) * page, num_pages * page
                self.pool.write((req.req_pool_idx, slice(start, start + new)), slots[taken : taken + new])
                taken += new
            req.kv_committed_len = req.kv_allocated_len = end
            answered = end - len(req.origin_input_ids) + 1
            first = self.records[req.rid].request.answer_key * SPAN
            req.output_ids.extend(range(first + len(req.output_ids), first + answered))
        for record in records:
            record.tokens += steps

    def _retract(self, req: Req) -> None:
        """As the engine retracts a request: its KV goes to host memory, which here takes no time."""
        assert len(self.running) > 1, "one request alone does not fit the pool"
        self.running.remove(req)
        req.offload_kv_cache(self.pool, self.allocator)
        release_kv_cache(req, self.tree, is_insert=False)
        evict_from_tree_cache(self.tree, len(self.running) * RETRACT_STEPS)
        req.reset_for_retract()
        self.queue.add(req, is_retracted=True)
        self.gauges.retracted += 1

    def _finish(self, req: Req) -> None:
        self.running.remove(req)
        record = self.records[req.rid]
        if (record.request.length + record.tokens - 1) % self.scale:
            # Its last slot is filled in part, so nobody can share it.
            req.output_ids[len(req.output_ids) - 2] = -next(UNIQUE)
        self._release(req)

    def _release(self, req: Req) -> None:
        release_kv_cache(req, self.tree)
        record = self.records.pop(req.rid)
        record.done = self.clock.now
        self.finished(record)
