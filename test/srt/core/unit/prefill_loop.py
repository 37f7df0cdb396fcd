"""The engine's loops of a prefill worker as they are, on one or several TP ranks, over the wire of `nixl_world`.

The scheduler's methods, queues, tree, pools, managers and senders are the real ones. Stand-ins are the model, which
computes nothing, and what goes between TP ranks: threads meet where processes would.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import nixl_world as nixl_wire
import pytest
import torch
import zmq
from decode_worker import make_allocator
from sglang.srt.disaggregation import prefill as queues
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.decode_radix import tp_agreement
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler as schedulers
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import allocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_pd_radix.supplied.cpu_host.allocator import _patch_allocator

PAGE, CHUNK, POOL, VOCABULARY = nixl_wire.PAGE, 16, 512, 300
MAX_REQS = 8


class LoopEnds(BaseException):
    """Thrown into the loop, which has no end of its own."""


class Ranks:
    """Where the TP ranks of a prefill meet; each is a thread."""

    def __init__(self, size: int):
        self.size, self.rank = size, threading.local()
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def gather(self, said: Any) -> list[Any]:
        """What every rank says here."""
        self._said[self.rank.number] = said
        self._barrier.wait()
        all_said = list(self._said)
        self._barrier.wait()
        return all_said

    def broadcast(self, said: Any, *args: Any, **kwargs: Any) -> Any:
        return self.gather(said)[0]

    def poll(self, pollers: list[Any], *groups: Any) -> list[int]:
        """MIN, as the engine's reduction. Ranks whose queues differ would hang or crash there."""
        polls = self.gather([int(poller.poll()) for poller in pollers])
        assert len({len(one) for one in polls}) == 1, "ranks have different queues"
        return [min(column) for column in zip(*polls, strict=True)]

    def abort(self) -> None:
        self._barrier.abort()


class Queue(queues.PrefillBootstrapQueue):
    """The real queue, with the manager of a rank of the wire."""

    def __init__(self, manager: Any, scheduler: PrefillScheduler):
        self.queue, self.kv_manager, self.scheduler = [], manager, scheduler
        self.tp_rank = self.pp_rank = self.bootstrap_port = 0
        self.max_total_num_tokens, self.transfer_backend = POOL, TransferBackend.NIXL
        self.token_to_kv_pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.req_to_metadata_buffer_idx_allocator = scheduler.req_to_metadata_buffer_idx_allocator


class PrefillScheduler(Scheduler):
    """The real scheduler of one rank; what it says goes to ``told`` and ``answers``, what it computes to
    ``steps``."""

    def __init__(self, loop: PrefillLoop, rank: int):
        self.loop, self.told, self.answers, self.steps = loop, [], [], []
        self.server_args = cast(Any, loop.server_args)
        self.tp_rank = self.attn_tp_rank = rank
        self.tp_size = self.attn_tp_size = loop.ranks.size
        self.pp_rank = self.attn_cp_rank = 0
        self.pp_size = self.attn_cp_size = 1
        self.tp_group = SimpleNamespace(rank=rank, ranks=[*range(self.tp_size)])
        self.tp_cpu_group = self.attn_tp_cpu_group = self.attn_cp_cpu_group = None
        self.disaggregation_mode = DisaggregationMode.PREFILL
        self.max_req_input_len = POOL
        self.enable_overlap, self.is_generation, self.page_size = loop.overlap, True, PAGE
        kv = MHATokenToKVPool(POOL, PAGE, torch.float32, 1, 1, 1, "cpu", False)
        self.token_to_kv_pool_allocator = make_allocator(POOL, PAGE, kv)
        self.req_to_token_pool = ReqToTokenPool(MAX_REQS, POOL, "cpu", False)
        self.tree_cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=PAGE,
            )
        )
        self.disagg_metadata_buffers = MetadataBuffers(2 * MAX_REQS, hidden_size=16, hidden_states_dtype=torch.float32)
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(2 * MAX_REQS)
        self.disagg_prefill_bootstrap_queue = Queue(loop.wire.prefill[rank].manager, self)
        self.disagg_prefill_inflight_queue, self.waiting_queue = [], []
        self.running_batch, self.last_batch, self.cur_batch = ScheduleBatch(reqs=[], batch_is_full=False), None, None
        self.chunked_req, self.result_queue = None, deque()
        self.chunked_prefill_size, self.max_prefill_tokens, self.max_prefill_bs = CHUNK, 1024, 0
        self.max_running_requests, self.truncation_align_size, self.max_total_num_tokens = MAX_REQS, None, POOL
        self.new_token_ratio = self.init_new_token_ratio = 1.0
        self.enable_hisparse = self.is_hybrid_ssm = self.enable_kv_cache_events = False
        self.current_scheduler_metrics_enabled = False
        self.enable_priority_preemption = self.enable_hierarchical_cache = self.enable_hicache_storage = False
        self.enable_dynamic_chunking = self.is_mixed_chunk = self.enable_lora = self.enable_priority_scheduling = False
        self.enable_metrics = self.enable_pdmux = self.require_mlp_sync = self.is_hybrid_swa = False
        self.priority_scheduling_preemption_threshold, self.dllm_config, self.prefill_delayer = 0, None, None
        self.recv_skipper = self.input_blocker = self.forward_sleep_time = self.draft_worker = None
        self.max_recv_per_poll, self.forward_ct, self._engine_paused = -1, 0, False
        self.policy = SchedulePolicy("fcfs", self.tree_cache, False, False, False)
        self.spec_algorithm, self.device = SpeculativeAlgorithm.NONE, "cpu"
        self.model_config = cast(Any, Args(vocab_size=VOCABULARY))
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[], clear=lambda: None)
        self.grammar_manager.abort_requests = lambda recv_req: None
        self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        self.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
        self.send_to_tokenizer = SimpleNamespace(send_output=lambda message, req: None)
        self.return_health_check_ipcs = deque()
        self.recv_from_tokenizer = self.recv_from_rpc = None
        if rank == 0:
            self.recv_from_tokenizer = SimpleNamespace(recv_pyobj=self._receive_nothing, poll=lambda ms: 0)
            self.recv_from_rpc = self.recv_from_tokenizer
        self.init_request_dispatcher()
        # The device.
        self.future_map = FutureMap(MAX_REQS, None, POOL, "cpu", self.spec_algorithm)
        self.batch_record_buf, self.batch_record_ct = [None] * 2, 0
        self.forward_stream_ctx, self.schedule_stream = contextlib.nullcontext(), None
        self.forward_stream = SimpleNamespace(wait_stream=lambda other: None)
        step = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        self.device_module = SimpleNamespace(Event=lambda: step)
        self.model_worker = SimpleNamespace(forward_batch_generation=self._forward)

    @staticmethod
    def _receive_nothing(flags: int) -> None:
        raise zmq.ZMQError

    def _forward(self, batch: Any, pp_proxy_tensors: None = None) -> GenerationBatchResult:
        """One step. What happens while it computes is the test's."""
        self.steps.append({req.rid: req.extend_input_len for req in batch.reqs})
        self.loop.during(self)
        tokens = torch.tensor([7] * len(batch.reqs))
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=None))
        result.next_token_ids = tokens
        return result

    def recv_requests(self) -> list:
        self.loop.before(self)
        return super().recv_requests()

    def _check_pending_flush(self) -> None:
        pass

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        # As the engine's own, which tells the end of a request once.
        for req in reqs:
            if req.finished() and not req.finished_output:
                req.finished_output = True
                self.told.append((req, len(self.steps)))
                self.answers.append(type(req.finished_reason).__name__)

    def check_tree_cache(self) -> None:
        """The tests look at the tree themselves."""

    def maybe_sleep_on_idle(self) -> None:
        pass

    def reset_metrics(self) -> None:
        pass

    def _profile_batch_predicate(self, batch: Any) -> None:
        pass

    def report_prefill_stats(self, **stats: Any) -> None:
        pass

    def log_batch_result_stats(self, *args: Any) -> None:
        pass

    def assert_nothing_held(self) -> None:
        tree = self.tree_cache
        assert tree.protected_size() == 0
        below = [*tree.root_node.children.values()]
        while below:
            # One lock too few and one too many may have the same sum.
            node = below.pop()
            assert node.lock_ref == 0, (node.key, node.lock_ref)
            below += node.children.values()
        assert self.token_to_kv_pool_allocator.available_size() + tree.evictable_size() == POOL
        assert sorted(self.req_to_token_pool.free_slots) == [*range(MAX_REQS)]
        assert self.req_to_metadata_buffer_idx_allocator.available_size() == 2 * MAX_REQS
        assert not (self.waiting_queue or self.disagg_prefill_inflight_queue)
        assert not any(self.disagg_prefill_bootstrap_queue.kv_manager.rooms_held().values())


class Args(SimpleNamespace):
    """Server arguments; what is not named is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class PrefillLoop:
    """A prefill worker. ``before`` is called by each rank between its steps, ``during`` while one is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, overlap: bool = True):
        self.overlap, self.ranks, self.wire = overlap, Ranks(ranks), nixl_wire.World(monkeypatch, ranks, ranks)
        self.server_args = Args(page_size=PAGE, pp_max_micro_batch_size=MAX_REQS, disaggregation_mode="prefill")
        self.server_args.enable_mamba_extra_buffer, self.server_args.attention_backend = lambda: False, "torch_native"
        set_global_server_args_for_scheduler(cast(Any, self.server_args))
        for name in ("alloc_extend_kernel", "alloc_decode_kernel"):
            # Whatever this host is.
            monkeypatch.setattr(allocator, name, getattr(allocator, name))
        _patch_allocator(allocator)
        monkeypatch.setattr(schedulers, "broadcast_pyobj", self.ranks.broadcast)
        engines = utils.poll_and_all_reduce_attn_cp_tp_group
        for module in (utils, queues):
            # An extra may have put something around it.
            if module.poll_and_all_reduce_attn_cp_tp_group is engines:
                monkeypatch.setattr(module, "poll_and_all_reduce_attn_cp_tp_group", self.ranks.poll)
        monkeypatch.setattr(tp_agreement, "told_by_all", lambda own, group: self.ranks.gather(own))
        self.before: Callable[[PrefillScheduler], None] = lambda scheduler: None
        self.during: Callable[[PrefillScheduler], None] = lambda scheduler: None
        self.schedulers = [PrefillScheduler(self, rank) for rank in range(ranks)]
        self.reqs: dict[str, list[Req]] = {}
        self.not_asked: nixl_wire.Request | None = None

    def arrive(
        self,
        prompt_len: int,
        room: int,
        asked: bool = True,
        held: int = 0,
        token: int | None = None,
        salt: str | None = None,
    ) -> list[Req]:
        """A request, for which decode has asked; the same on all ranks, and different in all its tokens from others.

        asked: if not, decode asks when the test calls `ask`. held: tokens that decode has. token: of which its prompt
        consists. salt: its KV is for requests of the same one only.
        """
        wire = self.wire.request(room, prompt_len, held)
        reqs = []
        for scheduler in self.schedulers:
            tokens = [room % VOCABULARY if token is None else token] * prompt_len
            req = Req(
                f"request-{room}",
                "",
                tokens,
                SamplingParams(max_new_tokens=4),
                bootstrap_host="10.0.0.9",
                bootstrap_port=8998,
                bootstrap_room=room,
                disagg_mode=DisaggregationMode.PREFILL,
                vocab_size=VOCABULARY,
                extra_key=salt,
            )
            req.sampling_params.normalize(None)
            scheduler.disagg_prefill_bootstrap_queue.add(req, 1)
            reqs.append(req)
        wire.senders = [req.disagg_kv_sender for req in reqs]
        self.reqs[reqs[0].rid] = reqs
        if asked:
            self.ask(wire)
        self.not_asked = None if asked else wire
        return reqs

    def ask(self, wire: nixl_wire.Request) -> None:
        wire.start_decode()
        self.asking(wire)
        wire.ask()
        ready = queues.KVPoll.WaitingForInput, queues.KVPoll.Transferring
        for sender in wire.senders:
            nixl_wire.until(lambda sender=sender: sender.poll() in ready, "decode's request is there", sender.poll)

    def asking(self, wire: nixl_wire.Request) -> None:
        """Decode is about to ask for it."""

    def run(self, steps: int) -> None:
        """The loops of all ranks for ``steps`` turns."""
        turns = dict.fromkeys(range(self.ranks.size), 0)
        before, errors = self.before, []

        def count(scheduler: PrefillScheduler) -> None:
            if turns[scheduler.tp_rank] == steps:
                raise LoopEnds
            turns[scheduler.tp_rank] += 1
            before(scheduler)

        def serve(scheduler: PrefillScheduler) -> None:
            self.ranks.rank.number = scheduler.tp_rank
            loop = "overlap" if self.overlap else "normal"
            try:
                getattr(scheduler, f"event_loop_{loop}_disagg_prefill")()
            except LoopEnds:
                pass
            except BaseException as error:
                errors.append(error)
                self.ranks.abort()

        self.before = count
        threads = [threading.Thread(target=serve, args=(scheduler,), daemon=True) for scheduler in self.schedulers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.before = before
        # The first one is why the others could not meet.
        for error in errors:
            raise error
        assert not any(thread.is_alive() for thread in threads)
