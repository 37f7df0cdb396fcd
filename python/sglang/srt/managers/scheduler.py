"""Scheduler of a decode worker with a radix cache.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.lost_requests import First, LostReqs
from sglang.srt.disaggregation.refusal import RefusedReq, RefusedRooms, tell_prefill
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, KVClassType, get_kv_class, prepare_abort
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache import mamba_radix_cache, swa_radix_cache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.decode_cache_checks import FLAG, check_draft, check_draft_of_hybrid, check_windows
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.pegaflow_memory import kv_layout
from sglang.srt.mem_cache.pegaflow_pages import model_namespace, rank_namespace
from sglang.srt.mem_cache.pegaflow_radix_cache import PegaFlowDecodeRadixCache, PegaFlowRadixCache, PegaFlowTree
from sglang.srt.mem_cache.pegaflow_room import live_on_scheduler
from sglang.srt.mem_cache.pegaflow_session import PegaFlowSession
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.window_radix_cache import WindowRadixCache
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.utils import TypeBasedDispatcher

logger = logging.getLogger(__name__)

__all__ = ["Scheduler"]


def _failed_processors(batch, result) -> dict[int, str]:
    """Why the logit processors of a step's requests failed, by their place."""
    # With pipeline stages the result says it, else the output in it.
    said = (getattr(of, "failed_processors", None) for of in (result, getattr(result, "logits_output", None)))
    failed = next(filter(None, said), None)
    # A step of speculation leaves them with the batch.
    info = getattr(batch, "sampling_info", None)
    left = vars(info).pop("failed_processors", None) if info is not None else None
    return failed or left or {}


def _hopeless(result, output) -> dict[int, str]:
    """The same for requests that no token was left for."""
    said = [getattr(of, "hopeless", None) for of in (result, output)]
    hopeless = next((one for one in said if one is not None), None)
    if hopeless is None:
        return {}
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    reason = "No token can be chosen: the grammar, logit_bias or the model leave none"
    return {place: reason for place, none in enumerate(hopeless.tolist()) if none}


class Scheduler(engine.Scheduler):
    """Gives a decode worker its tree and tells from outside what the pools hold."""

    # The most tokens that requests held at the end of a step of the decode queue, since the last flush. And the longest
    # that such a step has taken, or a request's way into the queue; seconds.
    kv_used_peak = 0
    longest_queue_step = 0.0
    # What decode has refused, on prefill.
    refused_rooms = RefusedRooms()
    # A flush that waits until no request is left, and until when, as the engine has it.
    _pending_flush: tuple[Any, float] | None = None

    def init_cache_with_memory_pool(self) -> None:
        """Puts the decode tree in the place of the engine's radix cache when the flag asks for it."""
        if self.server_args.enable_pegaflow:
            super().init_cache_with_memory_pool()
            self._init_pegaflow()
            return
        if not self.server_args.disaggregation_decode_enable_radix_cache:
            super().init_cache_with_memory_pool()
            return
        runner = self.tp_worker.model_runner
        if runner.hybrid_gdn_config is not None:
            check_draft_of_hybrid(self.server_args)
            # The tree for KV alone: states come from prefill with every request, so none has to be kept for a prefix.
            with patch.object(mamba_radix_cache, "MambaRadixCache", RadixCache):
                super().init_cache_with_memory_pool()
        elif runner.is_hybrid_swa:
            check_windows(self.server_args)
            # The same for windows.
            with patch.object(swa_radix_cache, "SWARadixCache", RadixCache):
                super().init_cache_with_memory_pool()
            if type(self.tree_cache) is RadixCache:
                self.tree_cache = WindowRadixCache.take_over(self.tree_cache, self.sliding_window_size)
                return
        else:
            super().init_cache_with_memory_pool()
            if hasattr(runner.token_to_kv_pool, "get_state_buf_infos") and type(self.tree_cache) is RadixCache:
                raise ValueError(
                    f"{FLAG} is not verified for this model: beside KV it keeps what the engine calls state "
                    f"({type(runner.token_to_kv_pool).__name__}). Start this decode worker without the flag."
                )
        if type(self.tree_cache) is not RadixCache:
            raise ValueError(
                f"{FLAG} is not verified for this model: the engine chose {type(self.tree_cache).__name__} for it, "
                "and only models with full attention throughout (RadixCache), or in some layers linear attention of "
                "the kind of Qwen3-Next (GDN) or sliding windows, are. Start this decode worker without the flag."
            )
        if self.draft_worker is not None:
            worker = self.draft_worker
            draft = worker.draft_worker.draft_runner if self.enable_overlap else worker.model_runner
            check_draft(self.server_args, runner.model_config, draft.model_config)
        self.tree_cache = DecodeRadixCache.take_over(self.tree_cache)

    def _init_pegaflow(self) -> None:
        """Put a tree in place that saves to the PegaFlow server and loads from it."""
        args = self.server_args
        if type(self.tree_cache) is not RadixCache:
            raise ValueError(
                "--enable-pegaflow is not verified for this model: the engine chose "
                f"{type(self.tree_cache).__name__} for it, and only full-attention models (RadixCache) are. "
                "Leave the flag out."
            )
        layout = kv_layout(self.token_to_kv_pool_allocator.get_kvcache(), self.page_size)
        tree = PegaFlowDecodeRadixCache if args.disaggregation_decode_enable_radix_cache else PegaFlowRadixCache
        self.tree_cache = tree.take_over(self.tree_cache)
        rank = None if layout.shared else self.tp_rank
        session = PegaFlowSession(
            args.pegaflow_endpoint,
            f"sglang-{uuid.uuid4().hex}-{self.tp_rank}",
            rank_namespace(model_namespace(args), layout.describe(), rank, self.tp_size),
            layout,
        )
        # Of what all ranks hold alike, one saves all.
        saves = not layout.shared or self.tp_rank == 0
        self.tree_cache.attach(session, self.tp_cpu_group if self.tp_size > 1 else None, saves)
        # On decode, the queue of requests that wait for memory sets its own.
        self.tree_cache.live = lambda: live_on_scheduler(self)
        # The engine's own hooks for prefixes that come from elsewhere: asked of the tree at each of their turns.
        self.enable_hicache_storage = True

    def get_internal_state(self, recv_req):
        """Adds the pool figures of invariant I1 under ``kv_pool``, all in tokens."""
        output = super().get_internal_state(recv_req)
        if isinstance(self.tree_cache, PegaFlowTree):
            output.internal_state = {**output.internal_state, "pegaflow": self.tree_cache.pegaflow_state()}
        if not self._has_plain_pool():
            return output
        output.internal_state = {**output.internal_state, "kv_pool": self._kv_pool_state()}
        return output

    def _has_plain_pool(self) -> bool:
        """Whether one pool has all KV, so that its figures say what requests hold."""
        return type(self.tree_cache) in (RadixCache, ChunkCache) or isinstance(
            self.tree_cache, (DecodeRadixCache, PegaFlowTree)
        )

    def process_decode_queue(self) -> None:
        """Adds five things.

        Prefills are asked that could not be while a step was in flight whose result has now been processed.

        Failures are told, and transfers end, also while retracted requests wait for memory. The engine looks at neither
        until all of these are back: if what they wait for is held by transfers, both wait for ever.

        Prefills are told what waits here.

        And the record of the most tokens that requests held, with the flag as without it. A step of the queue ends when
        what it admitted has its pages, and begins after a decode step has freed those of the answers that ended in it,
        so this misses no request, however short its life.

        And that of the longest step.
        """
        began = time.monotonic()
        queue = self.disagg_decode_prealloc_queue
        queue.begin_step()
        super().process_decode_queue()
        if queue.retracted_queue and isinstance(self.tree_cache, DecodeRadixCache):
            queue.pop_preallocated()
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())
        queue.end_step()
        if self._has_plain_pool():
            free = self._available_tokens() + self.tree_cache.evictable_size()
            self.kv_used_peak = max(self.kv_used_peak, self.max_total_num_tokens - free)
        self.longest_queue_step = max(self.longest_queue_step, time.monotonic() - began)

    def _kv_manager(self):
        """The transfer backend's manager, None without disaggregation."""
        name = {
            engine.DisaggregationMode.PREFILL: "disagg_prefill_bootstrap_queue",
            engine.DisaggregationMode.DECODE: "disagg_decode_prealloc_queue",
        }.get(self.disaggregation_mode)
        return getattr(self, name).kv_manager if name else None

    def get_new_prebuilt_batch(self):
        """Adds that a batch has no more LoRA adapters than fit; the engine looks at that on prefill only, and ends.

        Requests whose adapter does not fit wait with their KV, and others of a running one go before them, as in the
        engine's own scheduling of prefills.
        """
        if not (self.enable_lora and isinstance(self.tree_cache, DecodeRadixCache)):
            return super().get_new_prebuilt_batch()
        fits = self.tp_worker.model_runner.lora_manager.validate_lora_batch
        adapters = {req.lora_id for req in self.running_batch.reqs}
        ready, waiting = [], []
        for req in self.waiting_queue:
            if req.lora_id in adapters or fits({req.lora_id} | adapters):
                adapters.add(req.lora_id)
                ready.append(req)
            else:
                waiting.append(req)
        self.waiting_queue = ready
        try:
            return super().get_new_prebuilt_batch()
        finally:
            self.waiting_queue = [*self.waiting_queue, *waiting]

    def update_running_batch(self, batch):
        """Adds, on decode, that what cannot be taken back is processed before a request is retracted.

        What is saved of a request is the KV of the tokens whose results have been processed. A step in flight goes
        further. KV of those tokens is computed again after the resume. But a state that has taken them in cannot let
        them go; and of overlapped speculation the engine drops the result and has the request draft once more from
        where that step began, of which nothing is left.
        """
        steps = getattr(self, "result_queue", None)
        if (
            steps
            and self.disaggregation_mode == engine.DisaggregationMode.DECODE
            and (batch.is_spec_v2 or hasattr(self.req_to_token_pool, "mamba_pool"))
            and (engine.TEST_RETRACT or not batch.check_decode_mem())
        ):
            self._end_step()
        return super().update_running_batch(batch)

    def _available_tokens(self) -> int:
        """Free tokens of the pool that the tree's slots are from."""
        tree = self.tree_cache
        return (tree.pool if isinstance(tree, DecodeRadixCache) else self.token_to_kv_pool_allocator).available_size()

    def _kv_pool_state(self) -> dict:
        tree = self.tree_cache
        state = {
            "size": self.max_total_num_tokens,
            "available": self._available_tokens(),
            "evictable": tree.evictable_size(),
            "protected": tree.protected_size(),
            "used_peak": self.kv_used_peak,
            "longest_queue_step_s": round(self.longest_queue_step, 3),
            "idle": self.is_fully_idle() and not (self._has_quarantine() or getattr(tree, "busy", False)),
            "free_req_slots": len(self.req_to_token_pool.free_slots),
            "req_slots": self.req_to_token_pool.size + getattr(self.req_to_token_pool, "pre_alloc_size", 0),
        }
        buffers = getattr(self, "req_to_metadata_buffer_idx_allocator", None)
        if buffers is not None:
            state |= {"metadata_buffers": buffers.size, "free_metadata_buffers": buffers.available_size()}
        manager = self._kv_manager()
        if isinstance(manager, CommonKVManager):
            state["rooms"] = manager.rooms_held()
        if isinstance(tree, DecodeRadixCache):
            state |= {"locks_taken": tree.locks_taken, "locks_released": tree.locks_released}
            if state["idle"]:
                state["audit"] = tree.audit([])
            if tree.windows is not None:
                state |= {"window_size": tree.windows.size, "window_available": tree.windows.available_size()}
        states = getattr(self.req_to_token_pool, "mamba_pool", None)
        if states is not None:
            state |= {"state_slots": states.size, "free_state_slots": states.available_size()}
            if "audit" in state:
                state["audit"] += self._audit_states(states)
        return state

    def _audit_states(self, states) -> list[str]:
        """How the state slots contradict that no request is here; one in the retracted queue has none either."""
        free = states.free_slots.tolist()
        if sorted(free) == list(range(1, states.size + 1)):
            return []
        return [f"{len(set(free))} different state slots are free, {len(free)} in all, and there are {states.size}"]

    # ---- requests that cannot be served ----

    def init_request_dispatcher(self) -> None:
        """Adds messages about requests: refused by the other worker or the tokenizer manager; lost, on prefill."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [(RefusedReq, self.handle_refused_request), (LostReqs, self.handle_lost_requests)]
        )

    def recv_requests(self) -> list:
        """Adds, on prefill, what the rank that receives for all knows of requests that are lost, before all else."""
        # Elsewhere than on that rank there is no socket. Pipeline stages agree on what they begin.
        socket = self.recv_from_tokenizer
        if self.disaggregation_mode != engine.DisaggregationMode.PREFILL or socket is None or self.pp_size > 1:
            return super().recv_requests()
        lost = self.lost_requests()
        if not lost:
            return super().recv_requests()
        self.recv_from_tokenizer = First(LostReqs(lost), socket)
        try:
            return super().recv_requests()
        finally:
            self.recv_from_tokenizer = socket

    def _split_work_and_control_reqs(self, recv_reqs: list) -> tuple[list, list]:
        """Adds that what is lost goes, like work, to the ranks of one DP rank; control goes to all, from the first."""
        work, control = super()._split_work_and_control_reqs(recv_reqs)
        lost = [one for one in control if isinstance(one, LostReqs)]
        return lost + work, [one for one in control if not isinstance(one, LostReqs)]

    def handle_generate_request(self, recv_req) -> None:
        """Adds that an error ends this request only, and ``extra_key``: the engine receives it and then drops it.

        The key (also as ``cache_salt``) counts on decode workers with the flag, where prefixes of different keys must
        not be shared.
        """
        if isinstance(self.tree_cache, (DecodeRadixCache, PegaFlowTree)):
            Req.incoming_extra_key = recv_req.extra_key
        # An empty one is none to the engine, until there is another in its batch, which then ends the worker.
        recv_req.custom_logit_processor = recv_req.custom_logit_processor or None
        try:
            if recv_req.custom_logit_processor and self.server_args.enable_custom_logit_processor:
                # Made again in each batch; what cannot be made must be known before.
                CustomLogitProcessor.from_str(recv_req.custom_logit_processor)
            super().handle_generate_request(recv_req)
        except Exception as e:
            # On all ranks, which have been given the same.
            reason = f"The request cannot be served: {type(e).__name__}: {e}"
            logger.error("Request %s", recv_req.rid, exc_info=e)
            finished = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": reason}
            self.send_to_tokenizer.send_output(AbortReq(rid=recv_req.rid, finished_reason=finished), recv_req)
            self._tell_peer(recv_req, reason)
        finally:
            Req.incoming_extra_key = None

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Adds three cases that the engine forgets.

        A request that is known to be wrong (its grammar, its logprobs) is refused at once. The engine has it shake
        hands with a prompt of one token, which is not what the peer has.

        A pause that retracts sends decode requests back without saying so. They would shake hands anew with a prefill
        that has long finished them, and wait for ever.

        With priorities, a prefill sorts by them what waits, and one without any ends it: it gets the least.
        """
        if isinstance(self.tree_cache, DecodeRadixCache) and req.is_retracted:
            is_retracted = True
        if self.disaggregation_mode != engine.DisaggregationMode.NULL and not is_retracted:
            reason = self.refused_rooms.reason(req.bootstrap_room)
            if reason is None and isinstance(req.to_finish, FINISH_ABORT):
                reason = req.to_finish.message
            if reason is not None:
                prepare_abort(req, reason, status_code=HTTPStatus.BAD_REQUEST)
                self.stream_output([req], req.return_logprob)
                self._tell_peer(req, reason)
                return
        if self.disaggregation_mode == engine.DisaggregationMode.PREFILL and self.enable_priority_scheduling:
            self._set_or_validate_priority(req)
        began = time.monotonic()
        super()._add_request_to_queue(req, is_retracted)
        self.longest_queue_step = max(self.longest_queue_step, time.monotonic() - began)

    def handle_refused_request(self, recv_req: RefusedReq) -> None:
        """Fail what is here of a room that decode has refused, or comes later; tell decode of one refused here."""
        if self.disaggregation_mode != engine.DisaggregationMode.PREFILL:
            return
        if not recv_req.by_decode:
            self._fail_on_decode(recv_req.room, recv_req.reason)
            return
        self.refused_rooms.note(recv_req.room, recv_req.reason)
        for req in self.grammar_manager.grammar_queue:
            if req.bootstrap_room == recv_req.room:
                req.set_finish_with_abort(recv_req.reason)
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        sender = manager.rooms.live.get(recv_req.room) if isinstance(manager, CommonKVManager) else None
        if sender is not None:
            sender.fail(recv_req.reason)
            sender.poll()

    def _tell_peer(self, req, reason: str) -> None:
        """Tell the other worker of a pair that this one has refused ``req``, a Req or the message of one."""
        room, host = req.bootstrap_room, req.bootstrap_host
        if not room or host == FAKE_BOOTSTRAP_HOST:
            return
        if self.disaggregation_mode == engine.DisaggregationMode.PREFILL:
            self._fail_on_decode(room, reason)
        elif self.disaggregation_mode == engine.DisaggregationMode.DECODE and self.attn_tp_rank == 0 and host:
            tell_prefill(host, req.bootstrap_port or self.server_args.disaggregation_bootstrap_port, room, reason)

    def _fail_on_decode(self, room: int, reason: str) -> None:
        """Answer decode's request for a room that is refused here, which may have come or not, with a failure."""
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        if not isinstance(manager, CommonKVManager) or room in manager.rooms.live:
            # What is live is another request of that room.
            return
        addr = f"{self.server_args.host}:{self.server_args.disaggregation_bootstrap_port}"
        sender_class = get_kv_class(self.transfer_backend, KVClassType.SENDER)
        sender = sender_class(manager, addr, room, [self.tp_rank], self.pp_rank)
        sender.fail(reason)
        sender.poll()

    # ---- speculative decoding ----

    def _keep_undrafted_out(self, batch, result) -> None:
        """Keep what the draft model has no KV for out of the tree.

        Without overlap, a step ends with the draft model taking in what was accepted, but only of requests that go on:
        of those that end with it, the slots of that step hold another draft's KV.
        """
        if batch.spec_algorithm.is_none() or batch.is_spec_v2 or not isinstance(self.tree_cache, DecodeRadixCache):
            return
        for req, accepted in zip(batch.reqs, result.accept_length_per_req_cpu or (), strict=False):
            if req.finished():
                # What is allocated beyond is given back.
                req.kv_committed_len -= accepted + 1

    # ---- errors of a batch that are one request's ----

    def process_batch_result(self, batch, result) -> None:
        """Adds that requests whose logit processor has raised, or that no token is left for, end with that.

        That what the draft model has not seen of a request that ends stays out of the tree. And that a request without
        ``token_ids_logprob`` has an empty tensor beside those of one with it, where the engine has a list and raises.
        """
        output: Any = getattr(result, "logits_output", None)
        of_tokens = getattr(output, "next_token_token_ids_logprobs_val", None)
        if of_tokens:
            output.next_token_token_ids_logprobs_val = [torch.as_tensor(values) for values in of_tokens]
        failed = _failed_processors(batch, result)
        # Which requests go on to the next draft has been decided by then: those that fail end with that.
        verified = bool(failed) and getattr(result, "accept_length_per_req_cpu", None) is not None
        if not verified:
            self._fail_running(batch.reqs, failed | _hopeless(result, output))
        self._keep_undrafted_out(batch, result)
        super().process_batch_result(batch, result)
        if verified:
            self._fail_running(batch.reqs, failed)

    def abort_request(self, recv_req) -> None:
        """Adds that a request aborted in prefill's waiting queue fails its transfer, or decode would wait for it."""
        leaving = []
        if self.disaggregation_mode == engine.DisaggregationMode.PREFILL:
            leaving = [r for r in self.waiting_queue if recv_req.abort_all or r.rid.startswith(recv_req.rid)]
        super().abort_request(recv_req)
        for req in leaving:
            if isinstance(req.disagg_kv_sender, CommonKVSender):
                req.disagg_kv_sender.abort()
                req.disagg_kv_sender.poll()

    # ---- quarantine: pages of failed transfers are neither free nor a request's ----

    def _has_quarantine(self) -> bool:
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return queue is not None and bool(queue.quarantine)

    def flush_cache(self) -> bool:
        """Adds that a flush leaves pages in quarantine where they are, and begins the record of the peak anew.

        Pages that a PegaFlow server saves or loads are waited for some seconds; then they stay with it.

        And that it does not fail for a step in flight when the answers of all requests have been told: a weight update,
        which may come at once after the last of them, takes a refusal for an error that ends the scheduler.
        """
        self.kv_used_peak, self.longest_queue_step = 0, 0.0
        if isinstance(self.tree_cache, DecodeRadixCache):
            self._end_step_of_none()
        if isinstance(self.tree_cache, PegaFlowTree) and self.is_fully_idle() and not self.tree_cache.drain():
            logger.warning("A flush does not wait for the PegaFlow server any longer; it keeps the pages that it uses.")
            self.tree_cache.fence()
        flush = super().flush_cache
        if self._has_quarantine():
            done = self.disagg_decode_transfer_queue.flush_around_quarantine(flush)
        else:
            done = flush()
        if done and isinstance(self.tree_cache, PegaFlowTree):
            self.tree_cache.keep_fenced()
        return done

    def flush_cache_wrapped(self, recv_req):
        """Adds that several TP ranks of a prefill or decode worker, or with PegaFlow, look together at one that may
        wait.
        """
        if self._flushes_alone() or self._pending_flush is not None or not recv_req.timeout_s or recv_req.timeout_s < 0:
            return super().flush_cache_wrapped(recv_req)
        self._pending_flush = recv_req, time.monotonic() + recv_req.timeout_s
        return None

    def _check_pending_flush(self) -> None:
        """Adds that these give up in the same turn. By its own clock, one would while another flushes a turn later."""
        if self._pending_flush is None or self._flushes_alone():
            super()._check_pending_flush()
            return
        recv_req, deadline = self._pending_flush
        state = torch.tensor([int(self.is_fully_idle()), int(time.monotonic() < deadline)])
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=self.attn_tp_cpu_group)
        idle, in_time = state.tolist()
        if idle:
            super()._check_pending_flush()
        elif not in_time:
            self._pending_flush = None
            answer = FlushCacheReqOutput(success=False, message="Requests were left until the time was up.")
            self.send_to_tokenizer.send_output(answer, recv_req)

    def _flushes_alone(self) -> bool:
        if self.disaggregation_mode == engine.DisaggregationMode.NULL and not isinstance(self.tree_cache, PegaFlowTree):
            return True
        return self.attn_tp_size == 1

    def _end_step_of_none(self) -> None:
        """Process the result of the step in flight if all of its requests have ended, as the loop is about to do."""
        steps = getattr(self, "result_queue", None)
        if steps and all(req.finished() for req in steps[-1][0].reqs):
            self._end_step()
            self.running_batch.filter_batch()

    # ---- weight updates: see scheduler_update_weights_mixin.py ----

    def _can_flush(self) -> bool:
        """Whether no request is here.

        Of those that have been retracted, and of batches under way at pipeline stages, the engine does not think.
        """
        if isinstance(self.tree_cache, DecodeRadixCache):
            self._end_step_of_none()
        queue = getattr(self, "disagg_decode_prealloc_queue", None)
        if queue is not None and queue.retracted_queue:
            return False
        if self.pp_size > 1 and any(batch is not None for batch in self.mbs):
            return False
        return self.is_fully_idle()

    def process_input_requests(self, recv_reqs) -> None:
        """Adds, once per turn of every event loop, what PegaFlow has done, and weight updates that have waited."""
        super().process_input_requests(recv_reqs)
        if isinstance(self.tree_cache, PegaFlowTree) and self.tree_cache.advance():
            # Only the end of a running request has the engine look again at those that found no room, and none may run.
            self.running_batch.batch_is_full = False
        self._update_if_idle(recv_reqs)

    def _update(self, update: Callable[[Any], Any], recv_req):
        self._leave_pegaflow()
        return update(recv_req)

    def _end_step(self) -> None:
        """Process the result of the step in flight now; the loop then finds none."""
        self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = self.cur_batch = None

    def self_check_during_idle(self) -> None:
        """Puts the leak check off while pages are in quarantine, which it would report as lost."""
        if not self._has_quarantine():
            super().self_check_during_idle()

    # ---- PegaFlow ----

    def _prefetch_kvcache(self, req) -> None:
        """Has PegaFlow asked for the prompt, where the engine asks its hierarchical cache."""
        if not isinstance(self.tree_cache, PegaFlowTree):
            super()._prefetch_kvcache(req)
        else:
            # As in a match: one token must be left to compute.
            end = len(req.origin_input_ids) + len(req.output_ids) - 1
            if req.return_logprob and req.logprob_start_len >= 0:
                end = min(end, req.logprob_start_len)
            tokens = (req.origin_input_ids + req.output_ids)[: max(end, 0)]
            self.tree_cache.prefetch(req.rid, tokens, req.extra_key, req.priority or 0)

    def maybe_sleep_on_idle(self) -> None:
        """Adds that it does not sleep while requests wait for PegaFlow, or an update for a rank that is not idle."""
        if not (isinstance(self.tree_cache, PegaFlowTree) and self.tree_cache.busy) and not self.postponed_updates:
            super().maybe_sleep_on_idle()

    def _leave_pegaflow(self) -> None:
        """Stop using the server: what it holds is of other weights than this worker has now."""
        tree = self.tree_cache
        if not isinstance(tree, PegaFlowTree) or tree.session.stopped:
            return
        logger.warning("The weights have been changed: this worker uses PegaFlow no more. Start it anew to use it.")
        tree.leave()
