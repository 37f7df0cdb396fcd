"""A real decode worker that speculates, in one process: scheduler, target and draft model, queues, tree, pools.

Stand-in is the wire: what a prefill would send is computed with the worker's own models, as a prefill computes it, and
copied to the pages that the worker asks for. A measurement of docs/evidence.md: takes the arguments of a server and
prints what became of each request, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from typing import Any

# As in a server's processes: what would be compiled at its first call takes longer than all that is asked here.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch  # noqa: E402

torch.set_num_threads(1)

from sglang.srt.disaggregation.base import KVPoll  # noqa: E402
from sglang.srt.disaggregation.decode import DecodeRequest  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import PortArgs, prepare_server_args  # noqa: E402

WORDS = range(400, 1900)


class Ends(BaseException):
    """Thrown into the loop, which has no end of its own."""


class Wire:
    """A receiver whose prefill answers at once."""

    carries_prefix, require_staging, metadata_room, fenced = True, False, None, False
    peer_takes_prefix, bootstrap_addr = True, "10.0.0.1:1"

    def __init__(self, worker: Worker, req: Req):
        self.worker, self.req, self.state = worker, req, KVPoll.WaitingForInput

    def poll(self) -> int:
        return self.state

    def send_metadata(self, page_indices: Any, aux_index: int, state_indices: Any, decode_prefix_len: int = 0) -> None:
        self.worker.send(self.req, page_indices, aux_index, state_indices, decode_prefix_len)
        self.state = KVPoll.Success

    def clear(self) -> None:
        pass


class Worker:
    """``scheduler`` and what its requests got."""

    def __init__(self, options: list[str]):
        args = prepare_server_args(options)
        args.check_server_args()
        self.scheduler = Scheduler(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        self.scheduler.schedule_stream = self.scheduler.device_module.Stream()
        self.scheduler.recv_requests = self._recv
        self.scheduler.stream_output = self._stream
        self.page = args.page_size
        self.queue = self.scheduler.disagg_decode_prealloc_queue
        target, draft = self.scheduler.token_to_kv_pool_allocator.get_kvcache(), self.queue.draft_token_to_kv_pool
        self.speculates = draft is not None
        pools = [target, *([draft] if self.speculates else [])]
        # Of a hybrid model, what of it is KV; the rest is one state for each request.
        self.pools = [getattr(pool, "full_kv_pool", pool) for pool in pools]
        self.states = getattr(self.scheduler.req_to_token_pool, "mamba_pool", None)
        self.has_tree = isinstance(self.scheduler.tree_cache, DecodeRadixCache)
        self.cached: dict[tuple[int, ...], dict[str, Any]] = {}
        self.ended: list[Req] = []
        self.rooms = itertools.count(1)
        self.between: Any = None
        self.sent = self.steps = 0

    # ---- prefill ----

    def _req(self, prompt: list[int], max_new: int, mode: DisaggregationMode) -> Req:
        params = SamplingParams(temperature=0, max_new_tokens=max_new, ignore_eos=True)
        params.normalize(None)
        room = next(self.rooms)
        req = Req(
            f"r{room}", "", list(prompt), params, bootstrap_host="10.0.0.1", bootstrap_port=1, bootstrap_room=room,
            disagg_mode=mode, vocab_size=self.scheduler.model_config.vocab_size,
        )  # fmt: skip
        req.tokenizer = None
        return req

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """KV of both pools, the first token and what a draft starts from."""
        found = self.cached.get(tuple(prompt))
        if found is None:
            s = self.scheduler
            req = self._req(prompt, 1, DisaggregationMode.NULL)
            req.init_next_round_input(None)
            batch = ScheduleBatch.init_new(
                [req], s.req_to_token_pool, s.token_to_kv_pool_allocator, s.tree_cache, s.model_config,
                s.enable_overlap, s.spec_algorithm,
            )  # fmt: skip
            batch.prepare_for_extend()
            plain = s.enable_overlap or not self.speculates
            result = s.model_worker.forward_batch_generation(batch.get_model_worker_batch() if plain else batch)
            start = result.next_draft_input if s.enable_overlap else batch.spec_info
            slots = s.req_to_token_pool.req_to_token[req.req_pool_idx, : len(prompt)].long()
            found = self.cached[tuple(prompt)] = {
                "kv": [[b[slots].clone() for b in (*pool.k_buffer, *pool.v_buffer)] for pool in self.pools],
                "first": int(result.next_token_ids[0]),
                "start": [],
                "state": self.states and self.states.get_cpu_copy(req.mamba_pool_idx),
            }
            if os.environ.get("SGLANG_TEST_SPOIL") == "1":
                # The draft's keys, each with the value of another token.
                keys, values = found["kv"][-1]
                found["kv"][-1] = [keys, values.roll(1, 0)]
            if self.speculates:
                found["start"] = [t[0].clone() for t in (start.topk_p, start.topk_index, start.hidden_states)]
            s.token_to_kv_pool_allocator.free(slots)
            if self.states:
                s.req_to_token_pool.free_mamba_cache(req)
            s.req_to_token_pool.free(req)
        return found

    def send(self, req: Req, page_indices: Any, aux: int, state_indices: Any, prefix: int) -> None:
        found, n, page = self.prefill(req.origin_input_ids), len(req.origin_input_ids), self.page
        slots = (torch.tensor(page_indices).long()[:, None] * page + torch.arange(page)).flatten()[: n - prefix]
        assert len(slots) == n - prefix
        self.sent += len(slots)
        for pool, values in zip(self.pools, found["kv"], strict=True):
            for buffer, value in zip((*pool.k_buffer, *pool.v_buffer), values, strict=True):
                buffer[slots] = value[prefix:]
        if self.states:
            self.states.load_cpu_copy(found["state"], torch.tensor(state_indices[0]))
        meta = self.queue.metadata_buffers
        meta.output_ids[aux, 0] = found["first"]
        if self.speculates:
            topk_p, topk_index, hidden = found["start"]
            meta.output_topk_p[aux, :1], meta.output_topk_index[aux, :1] = topk_p, topk_index
            meta.output_hidden_states[aux] = hidden
        meta.cached_tokens[aux] = 0
        meta.bootstrap_room[aux, 0] = req.bootstrap_room

    # ---- decode ----

    def _recv(self) -> list:
        self.steps += 1
        assert self.steps < 20000, "the loop does not come to an end"
        self.between()
        return []

    def _stream(self, reqs: list[Req], *args: Any, **kwargs: Any) -> None:
        new = [req for req in reqs if req.finished() and req not in self.ended]
        for req in new:
            req.seen_histogram = list(req.spec_acceptance_histogram)
        self.ended += new

    def answer(self, prompts: list[list[int]], max_new: int) -> list[Req]:
        """All at once. Returns the requests when the worker is idle again."""
        reqs = [self._req(prompt, max_new, DisaggregationMode.DECODE) for prompt in prompts]
        for prompt in prompts:
            self.prefill(prompt)
        for req in reqs:
            self.queue.queue.append(DecodeRequest(req, Wire(self, req)))
            if self.queue.has_radix:
                self.queue._register(self.queue.queue[-1])

        def between() -> None:
            if all(req.finished() for req in reqs) and self.scheduler.is_fully_idle():
                raise Ends

        self.between = between
        try:
            if self.scheduler.enable_overlap:
                self.scheduler.event_loop_overlap_disagg_decode()
            else:
                self.scheduler.event_loop_normal_disagg_decode()
        except Ends:
            pass
        self.check()
        return reqs

    def check(self) -> None:
        """I1 at idle."""
        tree = self.scheduler.tree_cache
        held = tree.evictable_size() + tree.protected_size() if self.has_tree else 0
        free = self.scheduler.token_to_kv_pool_allocator.available_size()
        assert free + held == self.scheduler.max_total_num_tokens, (free, held)
        if self.has_tree:
            assert tree.protected_size() == 0 and self.scheduler.pools().audit() == []
        assert not self.states or self.scheduler.pools().audit_states() == []


def told(req: Req) -> dict[str, Any]:
    return {
        "ids": req.output_ids_through_stop,
        "accepted": req.seen_histogram,
        "held": req.transfer_prefix_len or 0,
        "retracted": req.retraction_count,
    }


def main(options: list[str]) -> None:
    worker = Worker(options)
    rnd = random.Random(5)

    def words(count: int) -> list[int]:
        return [rnd.choice(WORDS) for _ in range(count)]

    # Turns one after another, whose histories are those of the truth if there is one.
    said: list[dict[str, Any]] = []
    history, ends = words(70), [words(9) for _ in range(4)]
    for end in ends:
        (req,) = worker.answer([history], 24)
        said.append(told(req))
        history = history + req.output_ids_through_stop + end
    sent = worker.sent
    # Many at once, some with a history that the tree has.
    shared = words(60)
    prompts = [shared + words(20) for _ in range(3)] + [words(50) for _ in range(3)]
    together = [told(req) for req in worker.answer(prompts, 40)]
    print("RESULT", json.dumps({"turns": said, "together": together, "sent": sent}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
