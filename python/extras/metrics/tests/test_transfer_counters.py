"""The counters of a worker: which figure goes to which, and under which labels. And how runs of pages are counted."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from engine_classes import engine_class
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats
from test_dashboard import PANELS

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
    """The queues ask for them, which know of no rank."""
    made = object.__new__(Scheduler)
    vars(made).update(vars(scheduler_of("decode", dp_size=2, dp_rank=1)))
    asked = []
    monkeypatch.setattr(
        engine_class(Scheduler), "init_disaggregation", lambda self: asked.append(events_of(self.server_args))
    )
    made.init_disaggregation()
    assert asked[0].labels["dp_rank"] == "1"


def followed_s(seconds: float) -> SimpleNamespace:
    """A request that has waited so long for the transfer of another."""
    entry = SimpleNamespace(following_since=1.0, held_alone=0, waited_s=seconds, local=False)
    return SimpleNamespace(entry=entry, req=SimpleNamespace(time_stats=SchedulerReqTimeStats()))


@pytest.mark.parametrize("ranks", [{}, {"attn_tp_rank": 1}, {"attn_cp_rank": 1}, {"pp_rank": 1}])
def test_requests_and_tokens_are_counted_by_the_rank_that_answers(registry, ranks):
    counters = KvTransferCounters.of(scheduler_of("decode", **ranks))
    counters.committed(100, 64, 10)
    counters.ended(SimpleNamespace(status_code=500, message="timed out"))
    counters.blocked()
    counters.overtaken(1)
    counters.admitted(followed_s(0.5), 4, 0)
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
    counters.sent(SimpleNamespace(kv_item_lens=lens, state_item_lens=[]), theirs, 10, 5, 1)
    said = told(registry)
    assert said.pop("kv_transfer_runs_total") == 1
    assert said == ({
        "kv_transfer_sent_bytes_total": 10 * page_bytes, "kv_transfer_saved_bytes_total": 5 * page_bytes,
    } if page_bytes else {})  # fmt: skip


def test_what_a_run_of_pages_has_is_that_of_all_layers(registry):
    """As it is counted: Qwen3-8B's 36 layers, K and V, of which a backend writes one at a time."""
    counters = KvTransferCounters("m", "prefill", enabled=True)
    item, layers = 16 * 8 * 128 * 2, 36
    kv_args = SimpleNamespace(kv_item_lens=[item] * 2 * layers, state_item_lens=[])
    counters.sent(kv_args, item, 10, 0, 10)
    counted = told(registry)
    assert counted["kv_transfer_sent_bytes_total"] / counted["kv_transfer_runs_total"] == 2 * layers * item
    (shown,) = (panel for panel in PANELS if panel["title"].startswith("Bytes in one run of pages"))
    assert shown["title"].endswith("all layers") and "over twice the number of layers" in shown["description"]
    assert "kv_transfer_sent_bytes_total" in shown["targets"][0]["expr"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_metrics_nothing_is_counted(registry, role):
    counters = KvTransferCounters("m", role, enabled=False)
    counters.sent(SimpleNamespace(kv_item_lens=[1], state_item_lens=[1]), 1, 2, 3, states=1)
    counters.committed(1, 1)
    counters.blocked()
    counters.admitted(followed_s(1), 1, 0)
    counters.overtaken(1)
    counters.tree(1, 1)
    assert not list(registry.collect())
