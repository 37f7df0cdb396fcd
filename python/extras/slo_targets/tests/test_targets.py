"""Targets for ITL and TTFT: their options, their metrics, and whether one is held in a simulation."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.itl_gate import ItlHooks
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters
from sglang.srt.observability.target_metrics import TargetMetrics
from sglang.srt.server_args import ttft_option
from simulate import simulate
from test_flag import DECODE, FLAG, parse  # noqa: F401
from test_simulate import SMALL_A
from test_transfer_counters import registry, scheduler_of, told  # noqa: F401

TARGET = "args.disaggregation_decode_itl_target="


@pytest.mark.parametrize("name", ["itl", "ttft"])
def test_a_target_is_a_time_and_needs_the_flag(parse, name):  # noqa: F811
    option, field = f"--disaggregation-decode-{name}-target", f"disaggregation_decode_{name}_target"
    assert getattr(parse(*DECODE, FLAG), field) is None
    assert float(getattr(parse(*DECODE, FLAG, option, "12.5"), field)) == 12.5
    for wrong in (
        "0",
        "-1",
        "nan",
        "inf",
        "1e+10",
        *(["x", "5,refuse,refuse", ",refuse", "5, refuse"] * (name == "ttft")),
    ):
        said = f"{option} is {re.escape(wrong)}: give milliseconds, above 0 and at most 1e.09"
        with pytest.raises(ValueError, match=said):
            parse(*DECODE, FLAG, option, wrong)
    with pytest.raises(ValueError, match=f"{option} needs {FLAG}"):
        parse(*DECODE, option, "10")


def test_the_option_says_whether_requests_are_refused(parse, monkeypatch):  # noqa: F811
    option = "--disaggregation-decode-ttft-target"
    given = parse(*DECODE, FLAG, option, "2000,refuse").disaggregation_decode_ttft_target
    assert ttft_option(given) == (2000, True) and ttft_option("2000") == ttft_option(2000.0) == (2000, False)
    monkeypatch.setenv("SGLANG_PD_RADIX_EXTRAS", "slo_targets")
    with pytest.raises(ValueError, match=f"{option} 2000,refuse needs the extra failure_reports"):
        parse(*DECODE, FLAG, option, "2000,refuse")
    parse(*DECODE, FLAG, option, "2000")


def queue_of(target_ms: float | None, enable_metrics: bool = True, **ranks: int) -> SimpleNamespace:
    scheduler = scheduler_of("decode", **ranks)
    scheduler.server_args.disaggregation_decode_itl_target = target_ms
    scheduler.server_args.enable_metrics = enable_metrics
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None))
    KvTransferCounters.of(scheduler)
    return SimpleNamespace(scheduler=scheduler)


def test_the_metrics_are_there_without_a_target(registry):  # noqa: F811
    """And once, however many ask for them; on a worker with DP ranks each has its label."""
    queue = queue_of(None, dp_size=2, dp_rank=1)
    assert ItlHooks.of(queue) is None and ItlHooks.of(queue) is None
    samples = [sample for metric in registry.collect() for sample in metric.samples if "itl" in sample.name]
    assert samples and all(sample.labels["dp_rank"] == "1" for sample in samples)


@pytest.mark.parametrize("ranks", [{}, {"attn_tp_rank": 1}])
def test_requests_are_counted_by_the_rank_that_answers(registry, ranks):  # noqa: F811
    gate = ItlHooks.of(queue_of(20.0, **ranks)).gate
    assert told(registry) == {"decode_itl_target_seconds": 0.02}
    gate.tell_held("x", lambda: 3)
    counted = {} if ranks else {"decode_itl_held_requests_total": 1}
    assert told(registry) == {"decode_itl_target_seconds": 0.02, "decode_itl_waiting_requests": 3, **counted}


def test_without_metrics_nothing_is_counted(registry):  # noqa: F811
    metrics = TargetMetrics.get(queue_of(20.0, enable_metrics=False).scheduler.server_args)
    metrics.itl_target(1)
    metrics.itl(1, 1)
    metrics.itl_waiting(1)
    metrics.itl_held()
    metrics.ttft_late()
    assert not list(registry.collect())


def test_a_target_is_held_by_the_real_gate():
    free = simulate("a", "new", SMALL_A)
    target = 0.5 * free["itl_mean"]
    held = simulate("a", "new", [*SMALL_A, f"{TARGET}{1e3 * target}"])
    assert held["itl_p90"] <= 1.1 * target < 0.6 * free["itl_mean"]
    assert held["mean_running"] < 0.7 * free["mean_running"] and held["ttft_p50"] > free["ttft_p50"]
