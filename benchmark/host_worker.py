"""A real decode worker in one process whose model takes no time, so that what a step takes is the host's part.

Scheduler, queues, tree, pools, sampling information, messages to the detokenizer (pickled, as they are to be sent) are
those of a server. Stand-ins are prefill, which answers at once, and the model, whose tokens are all the same.
`step_costs.py` brings it into states.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from types import SimpleNamespace
from typing import Any

# As in a server's processes: what would be compiled at its first call takes longer than all that is asked here.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp())

import torch  # noqa: E402

torch.set_num_threads(1)

from sglang.srt.disaggregation.base import KVPoll  # noqa: E402
from sglang.srt.disaggregation.decode import DecodeRequest  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import PortArgs, prepare_server_args  # noqa: E402

WORD, WORDS = 500, range(400, 1900)


class Ends(BaseException):
    """Thrown into the loop, which has no end of its own."""


class Wire:
    """A receiver whose prefill answers at once."""

    carries_prefix, require_staging, metadata_room, fenced = True, False, None, False
    peer_takes_prefix, bootstrap_addr, conclude_state = True, "10.0.0.1:1", None
    # It computes all prompts itself.
    kv_mgr = SimpleNamespace(drops=lambda addr: False)

    def __init__(self, meta: Any, req: Req):
        self.meta, self.req, self.state = meta, req, KVPoll.WaitingForInput

    def init(self, prefill_dp_rank: int) -> None:
        pass

    def poll(self) -> int:
        return self.state

    def send_metadata(self, page_indices: Any, aux_index: int, state_indices: Any, decode_prefix_len: int = 0) -> None:
        self.meta.output_ids[aux_index, 0] = WORD
        self.meta.cached_tokens[aux_index] = 0
        self.meta.bootstrap_room[aux_index, 0] = self.req.bootstrap_room
        self.state = KVPoll.Success

    def abort(self) -> None:
        self.state = KVPoll.Failed

    cancel = abort

    def writers_done(self) -> bool:
        return True

    def failure_exception(self) -> None:
        raise RuntimeError("the job is done")

    def clear(self) -> None:
        pass


class Detokenizer:
    """Takes messages as a socket does: as bytes."""

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        pickle.dumps(output)


class Worker:
    """``scheduler``, and the requests that keep it busy."""

    def __init__(self, options: list[str]):
        args = prepare_server_args(options)
        args.check_server_args()
        self.scheduler = s = Scheduler(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        s.schedule_stream = s.device_module.Stream()
        s.send_to_detokenizer = Detokenizer()
        s.model_worker.forward_batch_generation = self._forward
        self.queue = s.disagg_decode_prealloc_queue
        self.queue._create_receiver_and_enqueue = self._enqueue
        self.queue._resolve_prefill_dp_rank = lambda req: 0
        self.rooms = itertools.count(1)
        self.word = itertools.count(WORDS.start)

    def _enqueue(self, req: Req) -> DecodeRequest:
        made = DecodeRequest(req, Wire(self.queue.metadata_buffers, req))
        self.queue.queue.append(made)
        return made

    @staticmethod
    def _forward(batch: Any, **_: Any) -> GenerationBatchResult:
        tokens = torch.full((len(batch.seq_lens),), WORD)
        return GenerationBatchResult(LogitsProcessorOutput(next_token_logits=None), next_token_ids=tokens)

    def _add(self, answer: int) -> None:
        """A request of one of four shared prefixes, or of as many as the job says."""
        room = next(self.rooms)
        own = [WORDS.start + (room * 7 + i * i) % len(WORDS) for i in range(self.job["own"])]
        first = room % self.job.get("prefixes", 4)
        prefix = [WORDS.start + (first + 4 * i) % len(WORDS) for i in range(self.job["shared"])]
        params = SamplingParams(temperature=0, max_new_tokens=answer, ignore_eos=True)
        params.normalize(None)
        req = Req(
            f"r{room}", "", prefix + own, params, stream=self.job["stream"], bootstrap_host="10.0.0.1",
            bootstrap_port=1, bootstrap_room=room, disagg_mode=DisaggregationMode.DECODE,
            vocab_size=self.scheduler.model_config.vocab_size,
        )  # fmt: skip
        req.tokenizer = None
        self.live.append(req)
        self.scheduler._add_request_to_queue(req)

    def _end(self) -> None:
        """Have all that run end, and the worker become idle."""
        for req in self.live:
            # Without the flag, who waits for memory is not ended while he waits.
            req.sampling_params.max_new_tokens = 1
        self.scheduler.abort_request(AbortReq(abort_all=True))
        scheduler, turns = self.scheduler, iter(range(3000, -1, -1))

        def turn() -> list:
            assert next(turns), "the worker does not become idle"
            if scheduler.is_fully_idle() and not getattr(scheduler, "result_queue", None):
                raise Ends
            return []

        scheduler.recv_requests = turn
        try:
            if scheduler.enable_overlap:
                scheduler.event_loop_overlap_disagg_decode()
            else:
                scheduler.event_loop_normal_disagg_decode()
        except Ends:
            pass
