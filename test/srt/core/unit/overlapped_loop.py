"""The engine's loop of a decode worker as it is: admit, launch step N + 1, process the result of step N, or of N + 1.

The scheduler's methods, queues, tree, batches and pools are the real ones. Stand-ins are the wire and the model of
`decode_world`, and the device: a step's KV is there for the steps after it, and is written once more when its end is
waited for, which is the latest that a device may do it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from decode_world import World, aborted, kv_of
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 100


class LoopEnds(BaseException):
    """Thrown into the loop, which has no end of its own."""


class Step:
    """A decode step on the device, and the event of its end."""

    def __init__(self, kv: torch.Tensor, steps: list[Step], window_kv: torch.Tensor | None = None):
        self._kv, self._steps, self._window_kv = kv, steps, window_kv
        self.written: list[tuple[int, int]] = []
        # Of a model with windows: what it writes to their pool.
        self.windows: list[tuple[int, int]] = []
        # Of a model with states: their slots, and what it leaves there.
        self.states: list[tuple[torch.Tensor, int, int]] = []
        self.rows: set[int] = set()
        self.over = False

    def write(self, slot: int, value: int) -> None:
        self.written.append((slot, value))
        self._kv[slot] = value

    def write_window(self, slot: int, value: int) -> None:
        self.windows.append((slot, value))
        self._window_kv[slot] = value

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        if self.over:
            return
        self.over = True
        # What comes after it on the device may have a slot of it already, and is not undone.
        for step in self._steps[self._steps.index(self) :]:
            for slot, value in step.written:
                self._kv[slot] = value
            for slot, value in step.windows:
                self._window_kv[slot] = value
            for state, _, value in step.states:
                state.fill_(value)


class LoopScheduler(Scheduler):
    """The real scheduler of a decode worker around a `Loop`; what it says and logs goes nowhere."""

    def __init__(self, loop: Loop):
        vars(self).update(vars(loop.scheduler))
        del self.stream_output
        self.loop = loop
        args = self.server_args
        args.enable_deterministic_inference = args.enable_custom_logit_processor = False
        args.disaggregation_decode_enable_offload_kvcache = False
        args.disaggregation_decode_polling_interval = 1
        args.enable_dp_attention, args.elastic_ep_backend = False, None
        args.enable_mamba_extra_buffer = lambda: False
        self.disaggregation_mode, self.tree_cache = DisaggregationMode.DECODE, loop.tree
        self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue = loop.queue, loop.transfer
        self.enable_overlap = loop.overlap
        self.enable_hicache_storage = self.enable_hierarchical_cache = self.enable_hisparse = False
        self.is_generation, self.require_mlp_sync, self.enable_pdmux, self.pp_size = True, False, False, 1
        self.current_scheduler_metrics_enabled = self.enable_kv_cache_events = False
        self.enable_lora, self.enable_priority_scheduling = args.enable_lora, False
        self.tp_size, self.tp_cpu_group = dist.get_world_size(loop.group), loop.group
        self.spec_algorithm, self.device = SpeculativeAlgorithm.NONE, "cpu"
        self.is_hybrid_swa, self.is_hybrid_ssm = loop.windows is not None, loop.states is not None
        self.full_tokens_per_layer, self.swa_tokens_per_layer = loop.size, loop.windows and loop.windows[1]
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY, is_encoder_decoder=False, is_matryoshka=False, hf_config=None
        )
        self.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: False, abort_requests=lambda recv: None, grammar_queue=[], clear=lambda: None
        )
        self.running_batch, self.last_batch, self.cur_batch = ScheduleBatch(reqs=[], batch_is_full=False), None, None
        self.chunked_req, self.waiting_queue, self.result_queue = None, [], deque()
        self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        self.max_running_requests, self.max_total_num_tokens = loop.pool.size, loop.size
        self.new_token_ratio = self.min_new_token_ratio = self.new_token_ratio_decay = self.init_new_token_ratio = 0.0
        self.forward_ct = self.forward_ct_decode = self.num_generated_tokens = 0
        self.forward_sleep_time, self._think_end_id, self._engine_paused = None, None, False
        self.draft_worker, self.return_health_check_ipcs, self.recv_from_tokenizer = None, deque(), None
        self.send_to_tokenizer = SimpleNamespace(send_output=loop.tell)
        # The device.
        self.future_map = FutureMap(loop.pool.size, None, loop.pool.max_context_len, "cpu", self.spec_algorithm)
        self.batch_record_buf, self.batch_record_ct = [None] * 2, 0
        self.forward_stream_ctx, self.schedule_stream = contextlib.nullcontext(), None
        self.forward_stream = SimpleNamespace(wait_stream=lambda other: None)
        self.device_module = SimpleNamespace(Event=lambda: loop.steps[-1])
        self.model_worker = SimpleNamespace(forward_batch_generation=loop.forward)
        self.tp_worker = SimpleNamespace(update_weights_from_disk=loop.update_weights)

    def recv_requests(self) -> list:
        self.loop.looks_later = False
        self.loop.between_steps()
        return []

    def abort_request(self, recv_req: Any) -> None:
        # While a retracted request waits, nobody is looked at, and it need not be there any longer after this.
        self.loop.looks_later |= bool(self.disagg_decode_prealloc_queue.retracted_queue)
        super().abort_request(recv_req)

    def process_input_requests(self, recv_reqs: list) -> None:
        if hasattr(self, "update_if_idle"):
            self.update_if_idle()

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        if any(not req.output_ids and not req.finished() and req is not skip_req for req in reqs):
            self.loop.wrong.append("an answer without a token")
        # As the engine's own, which also sees those again that a step in flight has outlived.
        ended = [req for req in reqs if req.finished() and not req.finished_output]
        for req in ended:
            req.finished_output = True
        self.loop.told += ended

    def self_check_during_idle(self) -> None:
        self.loop.check()
        super().self_check_during_idle()

    def check_tree_cache(self) -> None:
        """`Loop.check` is stricter."""

    def maybe_sleep_on_idle(self) -> None:
        pass

    def _profile_batch_predicate(self, batch: ScheduleBatch) -> None:
        pass

    def report_decode_stats(self, *args: Any, **kwargs: Any) -> None:
        pass

    report_prefill_stats = report_decode_stats

    def log_batch_result_stats(self, *args: Any) -> None:
        pass

    def reset_metrics(self) -> None:
        pass


class Loop(World):
    """A decode worker that is driven from between its steps: ``between`` is called there, as messages are received.

    flag: with the decode tree; else the bare engine's queues (``check`` then looks at requests alone). overlap: with
    the engine's overlapped loop; else with its other, in which the result of a step is there at once.
    """

    tree_type: type[DecodeRadixCache] = DecodeRadixCache

    def __init__(self, flag: bool = True, overlap: bool = True, **sizes: Any):
        self.overlap = overlap
        super().__init__(tree_type=self.tree_type if flag else self._chunk_cache(), **sizes)
        self.flag = flag
        self.steps: list[Step] = []
        self.told: list[Req] = []
        # Weight updates that have been answered.
        self.updated: list[Any] = []
        # In which iteration each request was asked of prefill, and which of them while a step was in flight.
        self.asked_in: dict[str, int] = {}
        self.asked_behind: list[Req] = []
        # Parts of prompts that were computed here: rid, from, to.
        self.extended: list[tuple[str, int, int]] = []
        # In which iteration each of these was.
        self.extended_in: dict[tuple[str, int, int], int] = {}
        # What went against I8. An exception on the spot would fail the request and nothing else.
        self.wrong: list[str] = []
        self.between: Callable[[], None] = lambda: None
        self.iterations = 0
        self.kv.load_cpu_copy = self._when_over(self.kv.load_cpu_copy)
        if self.windows is not None:
            self.window_kv.load_cpu_copy = self._when_over(self.window_kv.load_cpu_copy)
        if self.states is not None:
            states = self.pool.mamba_pool
            states.load_cpu_copy = self._when_over(states.load_cpu_copy)
            states.get_cpu_copy = self._when_over(states.get_cpu_copy)
        if self.tier is not None:
            memory = self.tier.memory
            memory.save, memory.load = self._when_over(memory.save), self._when_over(memory.load)
        for source in self.transfer.hooks.source:
            # What is measured of steps is not the same in every run.
            bucket = source().bucket
            bucket.own = lambda width=bucket.width: [0] * width
        self.scheduler = self.queue.scheduler = self.transfer.scheduler = self._make_scheduler()

    def _make_scheduler(self) -> LoopScheduler:
        return LoopScheduler(self)

    @staticmethod
    def _chunk_cache() -> type[BasePrefixCache]:
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        return ChunkCache

    def run(self, between: Callable[[], None]) -> None:
        """The loop from here on, until ``between`` raises `LoopEnds`; results of steps in flight stay unprocessed."""
        self.between = between
        scheduler = self.scheduler
        loop = scheduler.event_loop_overlap_disagg_decode if self.overlap else scheduler.event_loop_normal_disagg_decode
        with contextlib.suppress(LoopEnds):
            loop()

    def run_in_turn(self, *requests: dict[str, Any], wrong: str) -> Loop:
        """Requests, each when the one before is answered. What is found has ``wrong`` in it, or answers are right."""
        made: list[Any] = []

        def between() -> None:
            if len(self.told) == len(made) < len(requests):
                made.append(self.arrive(**requests[len(made)]))
                self.handshake(made[-1])
            for decode_req in self.asked:
                self.complete(decode_req)
            if len(self.told) == len(requests) and self.in_flight is None:
                raise LoopEnds
            assert self.iterations < 80, "the loop does not come to an end"

        try:
            self.run(between)
        except AssertionError as error:
            assert wrong in str(error)
        else:
            self.check_answers()
        return self

    def between_steps(self) -> None:
        self.iterations += 1
        # All but the last step have been processed, which is later than their end.
        assert all(step.over for step in self.steps[:-1])
        assert not self.wrong, self.wrong
        self.check()
        self.between()

    def tell(self, message: Any, req: Any) -> None:
        """What the scheduler sends to the tokenizer manager."""
        if isinstance(message, UpdateWeightFromDiskReqOutput):
            assert message.success
            self.updated.append(req)
        else:
            self.told.append(req)

    def update_weights(self, request: Any) -> tuple[bool, str]:
        """Other weights, as the engine's worker loads them; a flush that is refused afterwards ends the scheduler."""
        self.weights += 1
        return True, ""

    @property
    def in_flight(self) -> Step | None:
        return self.steps[-1] if self.steps and not self.steps[-1].over else None

    @property
    def asked(self) -> list[DecodeRequest]:
        """The requests in transfer whose prefill knows of it."""
        return [decode_req for decode_req in self.transfer.queue if getattr(decode_req.kv_receiver, "asked", False)]

    @property
    def running(self) -> list[Req]:
        return [req for req in self.scheduler.running_batch.reqs if not req.finished()]

    def ask_for_update(self) -> UpdateWeightFromDiskReqInput:
        """As the tokenizer manager, which does not know of requests whose clients have left."""
        request = UpdateWeightFromDiskReqInput(model_path="")
        answer = self.scheduler.update_weights_from_disk(request)
        if answer is not None:
            self.tell(answer, request)
        return request

    def _when_over(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """As the engine, which waits for the device before it copies a retracted request's KV back."""

        def copy_when_over(*args: Any) -> Any:
            if self.in_flight:
                self.in_flight.synchronize()
            return copy(*args)

        return copy_when_over

    # ---- the model ----

    def forward(self, batch: Any, pp_proxy_tensors: Any = None) -> GenerationBatchResult:
        """One step, which without overlap has ended when this returns."""
        result = self._forward(batch)
        if not self.overlap:
            self.steps[-1].synchronize()
        return result

    def _forward(self, batch: Any) -> GenerationBatchResult:
        """The KV of each request's last token, and a next token that depends on all before it."""
        step = Step(self.kv.k_buffer[0], self.steps, self.window_kv.k_buffer[0] if self.windows is not None else None)
        self.steps.append(step)
        step.rows = set(batch.req_pool_indices.tolist())
        if batch.forward_mode.is_extend():
            return self._extend(batch, step)
        tokens_of = zip(batch.input_ids.tolist(), batch.seq_lens.tolist(), batch.out_cache_loc.tolist(), strict=True)
        sequences = []
        for req, (token, length, slot) in zip(batch.reqs, tokens_of, strict=True):
            tokens = [*(req.origin_input_ids + req.output_ids)[: length - 1], token]
            assert len(tokens) == length
            step.write(slot, kv_of(tokens, self.weights_of[req.rid]))
            sequences.append((req, tokens))
        if self.windows is not None:
            self._attend_to_windows(batch, sequences, step)
        if self.states is not None:
            slots = self.pool.get_mamba_indices(batch.req_pool_indices).tolist()
            for (req, tokens), slot in zip(sequences, slots, strict=True):
                if not req.finished() and self.state(slot).item() != kv_of(tokens[:-1], self.weights_of[req.rid]):
                    self.wrong.append("a state that has not taken in the tokens before this one, and no more")
                value = kv_of(tokens, self.weights_of[req.rid])
                step.states.append((self.state(slot), slot, value))
                self.state(slot).fill_(value)
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=None))

        def sample() -> GenerationBatchResult:
            chosen = [next_token(tokens, req.grammar) for req, tokens in sequences]
            result.next_token_ids = torch.tensor(chosen)
            if batch.return_logprob:
                # Told apart by the token that they belong to.
                result.logits_output.next_token_logprobs = torch.tensor([float(token) for token in chosen])
            return result

        # As the engine's worker: what a grammar allows is known when the result before has been processed.
        if not (batch.has_grammar and self.overlap):
            return sample()
        result.delay_sample_func = sample
        return result

    def _extend(self, batch: Any, step: Step) -> GenerationBatchResult:
        """A step over parts of prompts; what is before each part must be there when it is launched.

        Nor may it come from this step: an attention backend may read that before it writes.
        """
        slots, chosen, logits = batch.out_cache_loc.tolist(), [], LogitsProcessorOutput(next_token_logits=None)
        writes: list[tuple[int, int]] = []
        tokens_of = iter(batch.input_ids.tolist())
        for req, end, start in zip(batch.reqs, batch.seq_lens.tolist(), batch.extend_prefix_lens, strict=True):
            weights = self.weights_of.setdefault(req.rid, self.weights)
            tokens = req.origin_input_ids[:end]
            row = self.pool.req_to_token[req.req_pool_idx, :end].tolist()
            if self.kv.k_buffer[0][row[:start]].flatten().int().tolist() != [
                kv_of(tokens[: i + 1], weights) for i in range(start)
            ]:
                self.wrong.append("a prompt is computed on what is not the KV of its beginning")
            if not start < end <= len(req.origin_input_ids) or row[start:] != slots[: end - start]:
                self.wrong.append("a step over a part of a prompt that is not to be computed, or elsewhere")
            slots = slots[end - start :]
            for place in range(start, end):
                if next(tokens_of) != tokens[place]:
                    self.wrong.append("another token than the prompt's")
                writes.append((row[place], kv_of(tokens[: place + 1], weights)))
            chosen.append(next_token(tokens, req.grammar))
            self.extended.append((req.rid, start, end))
            self.extended_in[self.extended[-1]] = self.iterations
        for slot, content in writes:
            step.write(slot, content)
        result = GenerationBatchResult(logits_output=logits, next_token_ids=torch.tensor(chosen))
        if batch.return_logprob:
            logits.next_token_logprobs = torch.tensor([float(token) for token in chosen])
            result.extend_input_len_per_req = [req.extend_input_len for req in batch.reqs]
            result.extend_logprob_start_len_per_req = [req.extend_logprob_start_len for req in batch.reqs]
        return result

    def _attend_to_windows(self, batch: Any, sequences: list[tuple[Req, list[int]]], step: Step) -> None:
        """What a step reads and writes of the window pool, as the device finds it when it is launched."""
        windows, table = self.tree.windows, self.pool.req_to_token
        rows = batch.req_pool_indices.tolist()
        for (req, tokens), row, slot in zip(sequences, rows, windows.of(batch.out_cache_loc).tolist(), strict=True):
            weights, first = self.weights_of[req.rid], max(0, len(tokens) - 1 - self.windows[0])
            if not req.finished():
                slots = windows.of(table[row, first : len(tokens) - 1].long())
                seen = self.window_kv.k_buffer[0][slots].flatten().int().tolist()
                if seen != [kv_of(tokens[: i + 1], weights) for i in range(first, len(tokens) - 1)]:
                    self.wrong.append("a window that is not that of the tokens before")
            step.write_window(slot, kv_of(tokens, weights))

    # ---- the wire ----

    def arrive(
        self,
        prompt: list[int],
        stop: int | str | None = None,
        grammar: bool = False,
        logprobs: bool = False,
        **options: Any,
    ) -> DecodeRequest:
        """stop: a token or a string that ends the answer. grammar: whether `Alternating` says which token may come."""
        decode_req = super().arrive(prompt, peer_takes_prefix=options.pop("peer_takes_prefix", self.flag), **options)
        req = decode_req.req
        req.vocab_size = VOCABULARY
        req.tokenizer = Digits()
        req.sampling_params.stop_token_ids = {stop} if isinstance(stop, int) else None
        req.sampling_params.stop_strs = stop if isinstance(stop, str) else None
        req.sampling_params.normalize(req.tokenizer)
        req.grammar = Alternating() if grammar else None
        if logprobs:
            req.return_logprob = True
            req.output_token_logprobs_val, req.output_token_logprobs_idx = [], []
            req.output_top_logprobs_val, req.output_top_logprobs_idx = [], []
        send = decode_req.kv_receiver.send_metadata

        def checked(page_indices: Any, *args: Any, **kwargs: Any) -> None:
            """I8: nothing is handed to a prefill that a step in flight may still use."""
            step = self.in_flight
            self.asked_in[req.rid] = self.iterations
            if step is not None:
                self.asked_behind.append(req)
                written = {slot // self.page_size for slot, _ in step.written}
                if written & set(page_indices.tolist()):
                    self.wrong.append("a page with two writers")
                if req.req_pool_idx in step.rows:
                    self.wrong.append("a row that a step in flight reads")
                if args[1] is not None and int(args[1][0]) in {slot for _, slot, _ in step.states}:
                    self.wrong.append("a state with two writers")
                window_pages = {slot // self.page_size for slot, _ in step.windows}
                if args[1] is not None and window_pages & {int(page) for page in args[1]}:
                    self.wrong.append("a page of a window with two writers")
            send(page_indices, *args, **kwargs)
            # The fastest of all wires: the KV is there before that step has ended.
            self.deliver(decode_req, len(page_indices))

        decode_req.kv_receiver.send_metadata = checked
        return decode_req

    def check(self) -> None:
        if self.flag:
            super().check()
            return
        for req in self.waiting + self.running:
            tokens = (req.origin_input_ids + req.output_ids)[: req.kv_committed_len]
            slots = self.pool.req_to_token[req.req_pool_idx, : len(tokens)].tolist()
            self._check_kv(slots, tokens, self.weights_of[req.rid])

    def check_answer(self, req: Req, expected: list[int]) -> None:
        assert req.output_ids == expected

    def check_answers(self) -> None:
        """Every request that has ended by itself has been told what the model says, and each is told once.

        The engine tells those that it gives up outside of a batch of it, and leaves them without a reason.
        """
        assert len({req.rid for req in self.told}) == len(self.told)
        for req in self.told:
            if aborted(req) or req.finished_reason is None:
                continue
            tokens, end = [*req.origin_input_ids, req.output_ids[0]], len(req.origin_input_ids)
            grammar = req.grammar and Alternating()
            while True:
                if grammar is not None:
                    grammar.accept_token(tokens[-1])
                params, said = req.sampling_params, Digits().decode(tokens[end:])
                stopped = tokens[-1] in (params.stop_token_ids or ()) or any(stop in said for stop in params.stop_strs)
                if len(tokens) - end == params.max_new_tokens or stopped:
                    break
                tokens.append(next_token(tokens, grammar))
            self.check_answer(req, tokens[end:])
            if req.return_logprob:
                assert req.output_token_logprobs_idx[1:] == req.output_ids[1:]
                assert req.output_token_logprobs_val[1:] == [float(token) for token in req.output_ids[1:]]


class Digits:
    """A tokenizer in the engine's sense, for stop strings: each token is its number."""

    eos_token_id = additional_stop_token_ids = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(str, tokens))


class Alternating:
    """A grammar in the engine's sense: after each token it has accepted only the other one of 1 and 2 may come."""

    current_token: int | None = None
    finished = False

    def accept_token(self, token: int) -> None:
        self.current_token = token

    def is_terminated(self) -> bool:
        return False


def next_token(tokens: list[int], grammar: Alternating | None = None) -> int:
    """1 or 2: by all tokens so far, or what the grammar leaves."""
    if grammar is not None and grammar.current_token is not None:
        return 2 if grammar.current_token == 1 else 1
    return 1 + zlib.crc32(bytes(tokens)) % 2
