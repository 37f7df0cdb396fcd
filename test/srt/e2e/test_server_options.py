"""Switches and choices of the engine's server arguments, on both workers of a pair with the flag: it starts, answers as
without them, and uses what it holds. With `make test-all`, but for the walk over all of them."""

from __future__ import annotations

import argparse

import pytest
import requests
from pd import FLAG, Pair, conversations, counter
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.timeout(600)

PAGES = ["--page-size", "16", "--chunked-prefill-size", "64"]
# What is tried together, by what it is about. Options of one group do not touch each other.
GROUPS: dict[str, list[str]] = {
    "priorities, lower first": [
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        "--disable-priority-preemption",
    ],
    "priorities": ["--enable-priority-scheduling", "--schedule-policy", "lof", "--default-priority-value", "3"],
    "logs and metrics": [
        *("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json", "--show-time-cost"),
        *("--enable-mfu-metrics", "--enable-metrics-for-all-schedulers", "--collect-tokens-histogram"),
        *("--enable-request-time-stats-logging", "--enable-cache-report", "--decode-log-interval", "1"),
        *("--export-metrics-to-file", "--export-metrics-to-file-dir", "DIRECTORY", "--log-level", "debug"),
        *("--crash-dump-folder", "DIRECTORY", "--gc-warning-threshold-secs", "0.1"),
    ],
    "streams": [
        *("--incremental-streaming-output", "--stream-response-default-include-usage", "--stream-interval", "4"),
        *("--enable-tokenizer-batch-encode", "--disable-tokenizer-batch-decode", "--gc-threshold", "100"),
    ],
    "streams, another tokenizer": ["--enable-dynamic-batch-tokenizer", "--tokenizer-mode", "slow"],
    "several tokenizers": ["--tokenizer-worker-num", "2"],
    "no tokenizer": ["--skip-tokenizer-init"],
    "order of prefill, lpm": [
        *("--schedule-policy", "lpm", "--scheduler-recv-interval", "3", "--num-continuous-decode-steps", "2"),
        *("--sleep-on-idle", "--prefill-max-requests", "2", "--max-prefill-tokens", "256"),
        *("--num-reserved-decode-tokens", "8", "--disaggregation-decode-polling-interval", "3"),
    ],
    "order of prefill, dfs-weight": [
        *("--schedule-policy", "dfs-weight", "--enable-mixed-chunk", "--disable-overlap-schedule"),
        *("--radix-eviction-policy", "slru", "--enable-return-hidden-states", "--enable-nan-detection"),
    ],
    "order of prefill, random": ["--schedule-policy", "random", "--radix-eviction-policy", "lfu"],
    "order of prefill, routing-key": [
        *("--schedule-policy", "routing-key", "--abort-on-priority-when-disabled", "--allow-auto-truncate"),
        *("--enable-p2p-check", "--disable-piecewise-cuda-graph", "--disable-cuda-graph"),
    ],
    "grammars, outlines": [
        *("--grammar-backend", "outlines", "--constrained-json-disable-any-whitespace", "--sampling-backend"),
        *("pytorch", "--disable-outlines-disk-cache", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    ],
    "grammars, llguidance": ["--grammar-backend", "llguidance", "--sampling-defaults", "openai"],
    "memory": [
        *("--weight-loader-disable-mmap", "--enable-weights-cpu-backup", "--mem-fraction-static", "0.3"),
        *("--disable-fast-image-processor", "--disable-shared-experts-fusion", "--disable-chunked-prefix-cache"),
        *("--disable-custom-all-reduce", "--enable-fp32-lm-head"),
    ],
    "a key": ["--api-key", "of the workers"],
}
# Why the others are not here.
ELSEWHERE = {
    "tests of their own": """--enable-custom-logit-processor --enable-metrics --disaggregation-mode --enable-lora
        --disaggregation-transfer-backend --enable-hierarchical-cache --hicache-write-policy --hicache-storage-backend
        --disable-radix-cache --enable-dp-attention --enable-multimodal --kv-cache-dtype --enable-pegaflow
        --pegaflow-allow-non-loopback --enable-memory-saver --enable-trace
        --disaggregation-decode-enable-radix-cache --disaggregation-enable-decode-radix-cache
        --disaggregation-decode-verify-pages --speculative-algorithm
        --disaggregation-decode-admission --load-balance-method --skip-server-warmup --enable-streaming-session
        --enable-lmcache --enable-hisparse --disaggregation-decode-enable-offload-kvcache --dtype --attention-backend
        --mamba-scheduler-strategy --lora-target-modules --lora-backend --enable-multi-layer-eagle
        --lora-eviction-policy --prefill-attention-backend --decode-attention-backend""",
    "of GPUs, their kernels and links": """--disable-flashinfer-autotune --enable-flashinfer-allreduce-fusion
        --enforce-disable-flashinfer-allreduce-fusion --enable-aiter-allreduce-fusion --disable-cuda-graph-padding
        --enable-profile-cuda-graph --enable-cudagraph-gc --enable-layerwise-nvtx-marker --enable-nccl-nvls
        --enable-symm-mem --disable-flashinfer-cutlass-moe-fp4-allgather --enable-mscclpp --enable-torch-symm-mem
        --pre-warm-nccl --enable-torch-compile --enable-torch-compile-debug-mode --enforce-piecewise-cuda-graph
        --triton-attention-reduce-in-fp32 --flashinfer-mla-disable-ragged --enable-attn-tp-input-scattered
        --enable-fused-qk-norm-rope --enable-fused-moe-sum-all-reduce --enable-pdmux --enable-deterministic-inference
        --nsa-prefill-backend --nsa-decode-backend --fp8-gemm-backend --fp4-gemm-backend --mamba-backend
        --linear-attn-backend --linear-attn-decode-backend --linear-attn-prefill-backend --hicache-io-backend
        --hicache-mem-layout --piecewise-cuda-graph-compiler --flashinfer-mxfp4-moe-precision --max-lora-chunk-size
        --speculative-attention-mode --enable-lora-overlap-loading --mamba-ssm-dtype --disable-hybrid-swa-memory
        --enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode --prefill-cp-mode --quantization
        --enable-prefill-context-parallel --enable-two-batch-overlap --enable-single-batch-overlap
        --enable-double-sparsity --rl-on-policy-target --quantize-and-serve --enable-draft-weights-cpu-backup
        --speculative-draft-model-quantization --speculative-draft-load-format --load-format""",
    "of experts": """--enable-eplb --enable-expert-distribution-metrics --enable-elastic-expert-backup
        --enable-return-routed-experts --speculative-moe-runner-backend --speculative-moe-a2a-backend --moe-a2a-backend
        --moe-runner-backend --deepep-mode --elastic-ep-backend --enable-dp-lm-head""",
    "of images, embeddings and encoders": """--is-embedding --keep-mm-feature-on-device --encoder-only --language-only
        --enable-adaptive-dispatch-to-encoder --enable-broadcast-mm-inputs-process --mm-enable-dp-encoder
        --enable-prefix-mm-cache --enable-mm-global-cache --mm-attention-backend --encoder-transfer-backend
        --enable-precise-embedding-interpolation""",
    "of other servers, or files that are not there": """--trust-remote-code --grpc-mode --use-ray --enable-ssl-refresh
        --checkpoint-engine-wait-weights-before-ready --delete-ckpt-after-loading
        --remote-instance-weight-loader-start-seed-via-transfer-engine --remote-instance-weight-loader-backend""",
    "of aggregated servers, DP ranks or stages": """--enable-prefill-delayer --enable-dynamic-chunking
        --hicache-storage-prefetch-policy --speculative-ngram-match-type""",
}


def switches() -> set[str]:
    """The options of the engine, and of this package, that are on or off, or one of a few."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    kinds = (argparse._StoreTrueAction,)
    return {one.option_strings[0] for one in parser._actions if isinstance(one, kinds) or one.choices}


def test_no_switch_is_left_out():
    tried = {word for options in GROUPS.values() for word in options if word.startswith("--")}
    named = {word: why for why, words in ELSEWHERE.items() for word in words.split()}
    assert sorted(switches() - tried - named.keys()) == []
    assert sorted(named.keys() & tried) == [] and sorted(named.keys() - switches()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("group", GROUPS)
def test_a_pair_answers_as_without_them(clusters, model, truth, group, tmp_path, monkeypatch):
    options = [str(tmp_path) if option == "DIRECTORY" else option for option in GROUPS[group]]
    if group == "a key":
        send = requests.Session.request
        keyed = {"Authorization": f"Bearer {options[1]}"}
        monkeypatch.setattr(requests.Session, "request", lambda *args, **kwargs: send(*args, headers=keyed, **kwargs))
    cluster = clusters.get(model, decode_args=[FLAG], common_args=[*PAGES, *options])
    pair = Pair(cluster)
    for _ in range(2):
        assert conversations(pair) == truth["conversations"]
    assert counter(pair.decode_url, "sglang:decode_prefix_hit_tokens_total") > 0
    if group != "no tokenizer":
        served = requests.get(cluster.router_url + "/v1/models", timeout=30).json()["data"][0]["id"]
        chat = {"model": served, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
        for stream in (False, True):
            reply = requests.post(
                cluster.router_url + "/v1/chat/completions", json={**chat, "stream": stream}, timeout=60
            )
            assert reply.status_code == 200 and reply.text, reply.text
    if group == "several tokenizers":
        # Four calls reach both processes, or as good as.
        for url in (pair.prefill_url, pair.decode_url) * 4:
            reply = requests.post(url + "/pause_generation", json={}, timeout=30)
            assert reply.status_code == 400 and "one of 2 tokenizer processes" in reply.text, reply.text
        assert conversations(pair) == truth["conversations"]
    assert cluster.dead() is None
    pair.check_idle()
