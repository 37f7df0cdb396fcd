"""DeepSeek's sparse attention on a CPU host: the kernels against plain forms, and a whole model in the engine."""

from __future__ import annotations

import itertools
import json
import os
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.supplied.cpu_host.dsa import kernels
from sglang_pd_radix.tools.make_model import ModelShape, make_model, make_vocabulary
from sglang_pd_radix.tools.models.dsa import CODE, TOPK

PAGE = 64
LAYERS = 2
INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
EMITTED = make_vocabulary(ModelShape().vocab).emitted

pytestmark = pytest.mark.skipif(not cpu_host.active(), reason="a CUDA host has the engine's own kernels")


def fp8(codes: np.ndarray) -> np.ndarray:
    """The numbers that bytes are as float8_e4m3fn."""
    sign, exponent, fraction = codes >> 7, (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10))
    return np.where(sign == 1, -size, size)


def index_keys(pages: np.ndarray, slot: int) -> np.ndarray:
    """The index key of a slot in the engine's layout: 64 * 128 bytes of fp8, then 64 float32 scales per page."""
    page, token = divmod(slot, PAGE)
    assert pages.dtype == np.uint8 and pages.shape[1] == PAGE * (128 + 4)
    (scale,) = pages[page, PAGE * 128 + 4 * token : PAGE * 128 + 4 * (token + 1)].copy().view("<f4")
    return fp8(pages[page, 128 * token : 128 * (token + 1)]) * scale


def hadamard(size: int) -> torch.Tensor:
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return torch.tensor(signs) / size**0.5


# -- kernels


def test_quantized_numbers_are_the_nearest():
    x = torch.randn(3, 5, 128) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    all_numbers = np.sort(fp8(np.setdiff1d(np.arange(256), [0x7F, 0xFF])))
    for scale_fmt in (None, "ue8m0"):
        y, scale = kernels.quantize(x, 128, scale_fmt)
        assert y.dtype == torch.float8_e4m3fn and y.shape == x.shape and scale.shape == (3, 5, 1)
        largest = x.abs().amax(-1, keepdim=True) / scale
        # Of powers of two the smallest that leaves everything within 448.
        assert (largest <= 448 * (1 + 1e-6)).all() and (largest > (224 if scale_fmt else 447.9)).all()
        if scale_fmt:
            assert (torch.frexp(scale).mantissa == 0.5).all()
        scaled = (x / scale).numpy()
        nearest = np.abs(scaled[..., None] - all_numbers).min(-1)
        assert np.allclose(np.abs(fp8(y.view(torch.uint8).numpy()) - scaled), nearest, atol=1e-4)
    assert kernels.quantize(torch.full((1, 128), 448.0), 128, "ue8m0")[1].item() == 1


def test_scores_do_not_depend_on_the_batch():
    q, _ = kernels.quantize(torch.randn(50, 3, 128))
    keys, scales = kernels.quantize(torch.randn(70, 128))
    weights, scales = torch.randn(50, 3), scales[:, 0]
    scores = kernels.index_scores(q, weights, keys, scales)
    products = torch.relu(torch.einsum("qhd,kd->qhk", q.float(), keys.float() * scales[:, None]))
    assert torch.allclose(scores, (products * weights[..., None]).sum(1), rtol=1e-4, atol=1e-2)
    parts = [kernels.index_scores(q[a:b], weights[a:b], keys, scales) for a, b in ((0, 1), (1, 20), (20, 50))]
    assert torch.equal(torch.cat(parts), scores)
    # Nor on the order in which a kernel adds up.
    order = torch.randperm(128)
    q, keys = (x.view(torch.uint8)[..., order].view(x.dtype) for x in (q, keys))
    assert torch.equal(kernels.index_scores(q, weights, keys, scales), scores)


def test_attention_to_all_and_to_some():
    """Against dense attention with a mask; and zeros for a token that fills up the batch."""
    q, latents = torch.randn(5, 4, 24), torch.randn(90, 1, 24)
    slots = torch.randperm(90)[:60]
    seen = torch.zeros(5, 60, dtype=torch.bool)
    seen[0], seen[1, :3], seen[2, ::2], seen[3, 59] = True, True, True, True
    chosen = [slots[row].tolist() for row in seen]
    padded = torch.tensor([row + [-1] * (60 - len(row)) for row in chosen])
    out = kernels.sparse_attention(q, latents, padded[:4], 16, 0.3)
    kv = latents[slots, 0]
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[:4].transpose(0, 1), kv.expand(4, -1, -1), kv[:, :16].expand(4, -1, -1), seen[:4], scale=0.3
    )
    assert torch.allclose(out[:4], dense.transpose(0, 1), atol=1e-5) and not out[4].any()


# -- a model in the engine


@contextmanager
def loaded(model):
    """The engine's model runner, with pages of 64 as the engine chooses them."""
    from sglang import bench_one_batch
    from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(model, device="cpu", dtype="float32", max_total_tokens=8192, max_running_requests=16)
    assert (args.attention_backend, args.page_size, args.kv_cache_dtype) == ("nsa", PAGE, "auto")
    set_global_server_args_for_scheduler(args)
    # What the engine sets for its own process must not reach the servers of later tests, nor the next model here.
    with patch.dict(os.environ), patch("sglang.srt.eplb.expert_location._global_expert_location_metadata", None):
        runner, _ = bench_one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        yield runner.torch_runner
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("dsa") / "model", ModelShape("dsa", layers=LAYERS)))


@pytest.fixture(scope="module")
def runner(model):
    with loaded(model) as runner:
        yield runner


def prefill(runner, prompts, prefixes=None):
    """(first tokens, batch) of prompts of which the slots in ``prefixes`` are in the pool already."""
    from sglang import bench_one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    reqs = []
    for ids, prefix in zip(prompts, prefixes or itertools.repeat(torch.empty(0, dtype=torch.int64)), strict=False):
        req = Req(str(len(reqs)), "", ids, SamplingParams(temperature=0, max_new_tokens=4))
        req.fill_ids, req.prefix_indices, req.logprob_start_len = ids, prefix, len(ids)
        req.set_extend_input_len(len(ids) - len(prefix))
        reqs.append(req)
    with torch.no_grad():
        tokens, _, batch = bench_one_batch.extend(reqs, runner)
    return tokens, batch


def decode(runner, tokens, batch, steps):
    """The answers, one list for each request."""
    from sglang import bench_one_batch

    answer = [tokens]
    for _ in range(steps - 1):
        answer.append(bench_one_batch.decode(answer[-1], batch, runner)[0])
    return torch.stack(answer, 1).tolist()


@pytest.fixture
def clear(runner):
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()


def random_ids(seed, length):
    chooser = random.Random(seed)
    return [chooser.choice(EMITTED) for _ in range(length)]


@pytest.fixture(scope="module")
def reference(model):
    """greedy(ids, steps, sparse): answers of DeepSeek V3 of another library, and of it the tokens that the indexer of
    each layer selects, in whole numbers as the model is made for."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

    settings = json.loads(Path(model, "config.json").read_text())
    settings = {k: v for k, v in settings.items() if k not in ("architectures", "model_type", "dtype", "torch_dtype")}
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**settings, attn_implementation="eager")).eval()
    weights = load_file(f"{model}/model.safetensors")
    theirs.load_state_dict({name: tensor for name, tensor in weights.items() if ".indexer." not in name})
    sparse_now = SimpleNamespace(on=True)

    def masked(module, query, key, value, attention_mask, **kwargs):
        seen = module.selected if sparse_now.on else torch.ones_like(module.selected).tril()
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS["selected"] = masked
    theirs.config._attn_implementation = "selected"

    def select(attention, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)[0]
        own = {name: weights[f"model.layers.{attention.layer_idx}.self_attn.indexer.{name}"] for name in INDEXER}
        q = attention.q_a_layernorm(attention.q_a_proj(x)) @ own["wq_b.weight"].t()
        k = torch.nn.functional.layer_norm(x @ own["wk.weight"].t(), (128,), own["k_norm.weight"], own["k_norm.bias"])
        q, k = q.unflatten(1, (-1, 128)) @ hadamard(128), k @ hadamard(128)
        scores = torch.einsum("qhd,kd->qhk", q.round(), (2 * k).round() / 2).relu().sum(1)
        scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :TOPK]
        attention.selected = torch.zeros_like(scores).bool().scatter_(1, order, True) & (scores > -torch.inf)

    for layer in theirs.model.layers:
        layer.self_attn.register_forward_pre_hook(select, with_kwargs=True)

    @torch.no_grad()
    def greedy(ids, steps, sparse=True):
        ids, sparse_now.on = list(ids), sparse
        for _ in range(steps):
            ids.append(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        return ids[-steps:]

    return greedy


def test_answers_are_those_of_another_library(runner, clear, reference):
    """In one batch, whole and in chunks: a prompt that the indexer selects all of, and prompts of which some."""
    prompts = [random_ids(1, TOPK - 8), random_ids(2, TOPK + 1), random_ids(3, 150), random_ids(4, 200)]
    answers = decode(runner, *prefill(runner, prompts), 8)
    assert answers == [reference(prompt, 8) for prompt in prompts]
    assert answers[0] == reference(prompts[0], 8, sparse=False)
    assert all(
        answer != reference(prompt, 8, sparse=False) for answer, prompt in zip(answers[2:], prompts[2:], strict=True)
    )
    held = torch.empty(0, dtype=torch.int64)
    for end in (64, 128, 200):
        tokens, batch = prefill(runner, [prompts[3][:end]], [held])
        held = runner.req_to_token_pool.req_to_token[batch.reqs[0].req_pool_idx, :end].long()
    assert decode(runner, tokens, batch, 8) == answers[3:]


def test_index_pages_have_the_engines_layout(runner, clear, model):
    """A token's code, in fp8 with a scale, where a plain reader finds it; and that is what is sent in transfers."""
    pool = runner.token_to_kv_pool
    ids = random_ids(5, 100)
    _, batch = prefill(runner, [ids])
    slots = runner.req_to_token_pool.req_to_token[batch.reqs[0].req_pool_idx, : len(ids)].tolist()
    embed = load_file(f"{model}/model.safetensors")["model.embed_tokens.weight"]
    code = torch.sign(embed[ids][:, :CODE])
    code[:, 0] *= 0.5
    expected = torch.cat([code, -code], 1).numpy()
    for layer in range(LAYERS):
        pages = pool.index_k_with_scale_buffer[layer].numpy()
        found = np.stack([index_keys(pages, slot) for slot in slots])
        assert np.abs(found - expected).max() == 0
    pointers, lengths, items = pool.get_state_buf_infos()
    assert items == [PAGE * 132] * LAYERS and pointers[0] == pool.index_k_with_scale_buffer[0].data_ptr()
    assert pool.get_contiguous_buf_infos()[2] == [PAGE * 4 * pool.kv_cache_dim] * LAYERS


def test_wrong_pages_show_in_the_answer(runner, clear):
    """One batch of the same prompt: a row that is right, then rows with index pages or KV pages damaged."""
    pool, prompt = runner.token_to_kv_pool, random_ids(6, 5 * PAGE)
    index = pool.index_k_with_scale_buffer
    kv = [buffer.view(-1, PAGE, *buffer.shape[1:]) for buffer in pool.kv_buffer]
    kinds = [(pages, kind) for pages in (index, kv) for kind in ("swap", "zeros", "another request's")]
    tokens, batch = prefill(runner, [prompt] * (1 + len(kinds)))
    _, other = prefill(runner, [random_ids(7, 5 * PAGE)])
    table = runner.req_to_token_pool.req_to_token
    (foreign,) = table[other.req_pool_indices, 2 * PAGE].tolist()
    for req, (buffers, kind) in zip(batch.reqs[1:], kinds, strict=True):
        first, second = (table[req.req_pool_idx, PAGE * page].item() // PAGE for page in (1, 3))
        for pages in buffers:
            if kind == "swap":
                pages[[first, second]] = pages[[second, first]]
            else:
                pages[first] = 0 if kind == "zeros" else pages[foreign // PAGE].clone()
    right, *damaged = decode(runner, tokens, batch, 32)
    assert [kind for kind, answer in zip(kinds, damaged, strict=True) if answer == right] == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speculative_algorithm": "EAGLE"}, "Speculative decoding .* sparse attention does not run on a CPU host"),
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native: .* runs on nsa"),
        ({"decode_attention_backend": "torch_batched"}, "--decode-attention-backend torch_batched: .* runs on nsa"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3: .* auto or bfloat16"),
    ],
)
def test_options_that_do_not_run_here_are_refused(model, options, message):
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match=message):
        ServerArgs(model, device="cpu", **options)
