"""Shared decode attention in a whole model: log-probabilities and greedy tokens of the engine's own backend."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from interpreted import interpreted
from sglang import bench_one_batch as engine
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.layers.attention import attention_registry, triton_backend
from sglang.srt.layers.attention import utils as attention_utils
from sglang.srt.layers.attention.shared_prefix import option, triton_kernels, triton_shared
from sglang.srt.layers.attention.triton_ops import decode_attention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

from sglang_pd_radix.tools.make_model import ModelShape, make_model


@contextmanager
def loaded(shape: ModelShape, folder):
    model = str(make_model(folder / "model", shape))
    options = {"page_size": 16, "max_total_tokens": 8192, "max_running_requests": 16, "disable_cuda_graph": True}
    args = ServerArgs(model, device="cpu", dtype="float32", attention_backend="torch_batched", **options)
    set_global_server_args_for_scheduler(args)
    # What the engine sets for its own process must not reach the servers of later tests, nor the next model here.
    with patch.dict(os.environ), patch("sglang.srt.eplb.expert_location._global_expert_location_metadata", None):
        bench_runner, _ = engine.load_model(args, PortArgs.init_new(args), 0, 0)
        yield bench_runner.torch_runner
    destroy_model_parallel()
    destroy_distributed_environment()


def request(rid: int, ids: list[int], prefix: torch.Tensor) -> Req:
    req = Req(str(rid), "", ids, SamplingParams(temperature=0, max_new_tokens=4))
    req.fill_ids = ids
    req.prefix_indices = prefix
    req.set_extend_input_len(len(ids) - len(prefix))
    req.logprob_start_len = len(ids)
    return req


def prefill(runner, reqs: list[Req]):
    tokens, _, batch = engine.extend(reqs, runner)
    return tokens, batch


def test_the_triton_backend_with_sharing_and_without(tmp_path):
    """Batches made by the engine's own code; the kernels in Triton's interpreter, one layer, since that is slow."""
    words = random.Random(0)
    prompt = lambda count: [words.randrange(400, 1900) for _ in range(count)]  # noqa: E731
    shape = ModelShape(layers=1, heads=2, kv_heads=1, head_dim=32)
    modules = (triton_backend, triton_shared, decode_attention, attention_utils, triton_kernels)
    with (
        loaded(shape, tmp_path) as runner,
        torch.no_grad(),
        interpreted(*modules),
        patch.object(triton_shared, "CALL", 0.0),
    ):
        system = prompt(48)
        req = request(0, system, torch.empty(0, dtype=torch.int64))
        prefill(runner, [req])
        held = runner.req_to_token_pool.req_to_token[req.req_pool_idx, :48].long()
        tokens, batch = prefill(runner, [request(1 + i, system + prompt(3 + 5 * i), held) for i in range(3)])
        make = attention_registry.ATTENTION_BACKENDS["triton"]
        backends = {"engine": make(runner)}
        with patch.dict(os.environ, {option.OPTION: "1"}):
            backends["shared"] = make(runner)
        # What pays on a GPU is far longer than what an interpreter can do in a test.
        backends["shared"]._costs = replace(backends["shared"]._costs, piece=0, query=0)
        for _ in range(2):
            batch.output_ids = tokens
            batch.prepare_for_decode()
            found = {}
            for name, backend in backends.items():
                runner.attn_backend = backend
                forward_batch = ForwardBatch.init_new(batch.get_model_worker_batch(), runner)
                logits = runner.forward(forward_batch).logits_output.next_token_logits
                found[name] = logits.log_softmax(-1)
            assert backends["shared"]._plan.items[:, 5].tolist() == [3], "one prefix was to be read once for three"
            assert (found["engine"] - found["shared"]).abs().max() < 1e-5
            tokens = found["shared"].argmax(-1)
            assert torch.equal(tokens, found["engine"].argmax(-1))
