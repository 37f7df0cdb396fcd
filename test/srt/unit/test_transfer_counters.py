"""The counters of a worker: which figure goes to which, and under which labels. And how runs of pages are counted."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from engine_classes import engine_class
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.disaggregation.decode_admission import AdmissionPolicy
from sglang.srt.disaggregation.decode_prefix import KvTransferCounters
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.observability.kv_transfer_metrics import count_transfer
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

PREFIX = "sglang:"


@pytest.fixture
def registry(monkeypatch):
    found = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, name, partial(getattr(prometheus_client, name), registry=found))
    monkeypatch.setattr(KvTransferCounters, "_made", {})
    return found


def told(registry) -> dict[str, float]:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {s.name.removeprefix(PREFIX): s.value for s in samples if not s.name.endswith("_created") and s.value}


@pytest.mark.parametrize(
    ("cached", "details", "counted"),
    [
        (960, {"device": 0, "host": 0, "decode_prefix": 960}, {"device": 960}),
        (960, {"device": 64, "host": 32, "decode_prefix": 960}, {"device": 928, "host": 32}),
        (
            *(960, {"device": 8, "host": 8, "storage": 16, "storage_backend": "file", "decode_prefix": 960}),
            {"device": 936, "host": 8, "storage_file": 16},
        ),
        # Prefill held more, and neither held anything.
        (96, {"device": 96, "host": 0, "decode_prefix": 16}, {"device": 96}),
        (0, {"device": 0, "host": 0, "decode_prefix": 0}, {}),
        # Without the flag.
        (96, {"device": 64, "host": 32}, {"device": 64, "host": 32}),
        (96, {"device": 0, "host": 0}, {}),
        (96, None, {"total": 96}),
    ],
)
def test_what_decode_held_is_counted_among_the_cached_tokens(registry, monkeypatch, cached, details, counted):
    """Once, when the request has ended; and its client is told the parts as they were."""
    monkeypatch.setattr(prometheus_client, "Histogram", partial(prometheus_client.Histogram, registry=registry))
    args = SimpleNamespace(prompt_tokens_buckets=None, generation_tokens_buckets=None)
    manager = object.__new__(TokenizerManager)
    manager.metrics_collector = TokenizerMetricsCollector(args, {"model_name": "m"})
    manager.enable_priority_scheduling, manager.disaggregation_mode = False, DisaggregationMode.DECODE
    obj = SimpleNamespace(custom_labels=None, sampling_params={})
    times = APIServerReqTimeStats(disagg_mode=DisaggregationMode.DECODE)
    for finished in (False, True):
        state = ReqState([], finished, asyncio.Event(), obj, time_stats=times)
        out = SimpleNamespace(
            completion_tokens=[5, 5], prompt_tokens=[1024] * 2, cached_tokens=[7, cached], retraction_counts=[0, 0],
            cached_tokens_details=[{"device": 7}, details],
        )  # fmt: skip
        as_told = details and dict(details)
        manager.collect_metrics(state, out, 1)
        assert details == as_told and out.cached_tokens_details[0] == {"device": 7}
    assert {
        s.labels["cache_source"]: s.value
        for metric in registry.collect()
        for s in metric.samples
        if s.name == "sglang:cached_tokens_total"
    } == counted


@pytest.mark.parametrize("dp_rank", [None, 0, 1])
def test_labels(registry, dp_rank):
    KvTransferCounters("m", "decode", enabled=True, dp_rank=dp_rank).blocked()
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    labels = {frozenset((key, value) for key, value in s.labels.items() if key != "cause") for s in samples}
    expected = {"model_name": "m", "engine_type": "decode"}
    assert labels == {frozenset((expected if dp_rank is None else expected | {"dp_rank": str(dp_rank)}).items())}


def scheduler_of(mode: str, dp_size: int = 1, **ranks: int) -> SimpleNamespace:
    args = SimpleNamespace(served_model_name="m", disaggregation_mode=mode, enable_metrics=True, dp_size=dp_size)
    known = {"dp_rank": None, "pp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0} | ranks
    return SimpleNamespace(server_args=args, **known)


def test_the_rank_is_a_label_whoever_asks_next(registry, monkeypatch):
    """Hooks of the transfer queue ask for them before there is a manager."""
    scheduler = scheduler_of("decode", dp_size=2, dp_rank=1)

    class Made(Exception):
        pass

    def asks_first(args: object, tree: object) -> None:
        KvTransferCounters.get(scheduler.server_args)
        raise Made

    def init(self: object) -> None:
        self.scheduler, self.tree_cache = scheduler, object.__new__(DecodeRadixCache)

    monkeypatch.setattr(engine_class(DecodeTransferQueue), "__init__", init)
    monkeypatch.setattr(AdmissionPolicy, "of", asks_first)
    with pytest.raises(Made):
        DecodeTransferQueue()
    assert KvTransferCounters.get(scheduler.server_args).labels["dp_rank"] == "1"


@pytest.mark.parametrize("ranks", [{}, {"attn_tp_rank": 1}, {"attn_cp_rank": 1}, {"pp_rank": 1}])
def test_requests_and_tokens_are_counted_by_the_rank_that_answers(registry, ranks):
    counters = KvTransferCounters.of(scheduler_of("decode", **ranks))
    counters.committed(100, 64, 10)
    counters.ended(SimpleNamespace(status_code=500, message="timed out"))
    counters.blocked()
    counters.overtaken(1)
    counters.followed(4, 0.5)
    assert len(told(registry)) == (0 if ranks else 11)
    # What each rank finds out for itself.
    counters.lost_peer()
    assert told(registry)["kv_transfer_peers_lost_total"] == 1


@pytest.mark.parametrize(
    ("lens", "theirs", "page_bytes"),
    [
        # An MLA target, and a draft whose K and V are wider: each rank gets all of both.
        ([1152, 1152, 8192, 8192], 1152, 18688),
        # And one that is narrower.
        ([1152, 1152, 512, 512], 1152, 3328),
        # Of heads, a decode rank gets its share, of a draft's as well; or all that this rank has.
        ([4096] * 6, 1024, 6 * 1024),
        ([4096] * 6, 8192, 6 * 4096),
        # A stage without any.
        ([], 1024, 0),
    ],
)
def test_bytes_are_those_of_all_buffers(registry, lens, theirs, page_bytes):
    counters = KvTransferCounters("m", "prefill", enabled=True)
    count_transfer(counters, SimpleNamespace(kv_item_lens=lens, state_item_lens=[]), theirs, 10, 5, 1)
    said = told(registry)
    assert said.pop("kv_transfer_runs_total") == 1
    assert said == ({
        "kv_transfer_sent_bytes_total": 10 * page_bytes, "kv_transfer_saved_bytes_total": 5 * page_bytes,
    } if page_bytes else {})  # fmt: skip


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_metrics_nothing_is_counted(registry, role):
    counters = KvTransferCounters("m", role, enabled=False)
    counters.sent(1, 2, 3)
    counters.sent_states(1)
    counters.committed(1, 1)
    counters.blocked()
    counters.followed(1, 1)
    counters.overtaken(1)
    counters.tree(1, 1)
    assert not list(registry.collect())
