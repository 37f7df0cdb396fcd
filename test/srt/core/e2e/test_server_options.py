"""Switches and choices of the engine's server arguments, on both workers of a pair with the flag: it starts, answers as
without them, and uses what it holds."""

from __future__ import annotations

import pytest
import requests
from pd import FLAG, Pair, conversations, counter

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

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
