"""A model with states has as many slots with the decode tree as without, and no tree at all without this extra."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers import scheduler  # noqa: F401  registers the kinds
from sglang.srt.mem_cache import kv_cache_builder, state_kind
from sglang.srt.mem_cache.state_kind import StateKind
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import prepare_server_args
from test_flag import DECODE, FLAG

from sglang_pd_radix.tools.make_model import ModelShape, make_model


@pytest.fixture(scope="module")
def parse_hybrid(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model") / "hybrid", ModelShape(arch="qwen3-next"))
    common = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", *DECODE]
    return lambda *options: prepare_server_args([*common, *options])


@pytest.mark.parametrize("flag", [[FLAG], []], ids=["flag", "no flag"])
def test_a_decode_worker_has_one_state_slot_for_each_request(parse_hybrid, monkeypatch, flag):
    """With the flag as without it: the engine would take two more, or four, for states of prefixes."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    strategy = ["--mamba-scheduler-strategy", "extra_buffer", "--page-size", "64"]
    args = parse_hybrid("--max-running-requests", "20", *strategy, *flag)
    args.check_server_args()
    assert args.enable_mamba_extra_buffer() == (not flag)
    # What the strategy is for without a prefix cache: larger pages, and steps that overlap.
    assert args.page_size == 64 and not args.disable_overlap_schedule
    assert args.disable_radix_cache == (not flag)
    runner = object.__new__(ModelRunner)
    params = SimpleNamespace(mamba_cache_per_req=1 << 20)
    runner.server_args, runner.dp_size, runner.spec_algorithm = args, 1, SimpleNamespace(is_none=lambda: True)
    runner.model_config = SimpleNamespace(context_len=1024)
    monkeypatch.setattr(ModelRunner, "mambaish_config", SimpleNamespace(mamba2_cache_params=params))
    args.disable_radix_cache = not flag
    left = runner.handle_max_mamba_cache(1.0)
    assert args.max_mamba_cache_size == 20 and left == pytest.approx(1 - 20 / 1024)
    assert runner._resolve_max_num_reqs(100_000) == 20
    assert args.disable_radix_cache == (not flag)


def test_without_this_extra_its_name_is_said(monkeypatch):
    """At the start, whatever tree the engine has built."""
    engines = object()
    assert [kind.word for kind in state_kind.kinds() if kind.word] == ["states", "windows"]
    with pytest.raises(ValueError, match=r"in some layers linear attention .*\(GDN\) or sliding windows, are. Start"):
        kv_cache_builder.build(StateKind, engines, None)
    monkeypatch.setattr(state_kind, "_kinds", [])
    with pytest.raises(ValueError, match=r"throughout \(RadixCache\) are without the extra hybrid. Start this decode"):
        kv_cache_builder.build(StateKind, engines, None)
