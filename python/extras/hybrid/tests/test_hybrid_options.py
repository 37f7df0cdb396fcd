"""A model with states has as many slots with the decode tree as without, and no tree at all without this extra."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang.srt.managers.scheduler  # noqa: F401  registers the kinds
from sglang.srt.mem_cache import decode_radix_cache, hybrid_support, state_kind
from sglang.srt.mem_cache.decode_radix_cache import build_tree
from sglang.srt.mem_cache.state_kind import StateKind
from sglang.srt.mem_cache.state_slots import StateSlots
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs, prepare_server_args
from test_flag import DECODE, FLAG

from sglang_pd_radix.tools.make_model import ModelShape, make_model


@pytest.fixture(scope="module")
def parse_layout(tmp_path_factory):
    def parse(arch: str, *options: str) -> ServerArgs:
        model = make_model(tmp_path_factory.mktemp("model") / arch, ModelShape(arch))
        return prepare_server_args(
            ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", *DECODE, *options]
        )

    return parse


@pytest.fixture(scope="module")
def parse_hybrid(parse_layout):
    return lambda *options: parse_layout("qwen3-next", *options)


@pytest.mark.parametrize("arch", ["qwen3-next", "falcon-h1", "nemotron-h", "kimi-linear"])
def test_the_flag_turns_off_nothing(parse_layout, monkeypatch, arch):
    """Of a cache that holds states the engine says: no overlap, and for Kimi-Linear no cache. Decode's holds none."""
    args = parse_layout(arch, FLAG)
    assert not args.disable_overlap_schedule and not args.disable_radix_cache
    assert args.get_model_config().hf_config.architectures[0] in hybrid_support.STATES
    # A model that has not been run is left to the engine.
    monkeypatch.setattr(hybrid_support, "STATES", ())
    if arch == "kimi-linear":
        with pytest.raises(ValueError, match="needs the radix cache, which the engine turns off for this model"):
            parse_layout(arch, FLAG).check_server_args()
    else:
        assert parse_layout(arch, FLAG).disable_overlap_schedule


def test_other_states_are_not_taken_for_these():
    runner = SimpleNamespace(mambaish_config=1, is_hybrid_swa=False, token_to_kv_pool=None)
    runner.model = type("Lfm2ForCausalLM", (), {})()
    assert state_kind.kind_of(runner) is StateKind
    runner.model = type("FalconH1ForCausalLM", (), {})()
    # As a draft that is part of the model leaves it.
    runner.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["FalconH1ForCausalLMMTP"]))
    assert state_kind.kind_of(runner) is StateSlots
    runner.mambaish_config = None
    assert state_kind.kind_of(runner) is StateKind


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
    assert [kind.word for kind in state_kind.STATE_KINDS if kind.word] == ["states", "windows"]
    names = r"in some layers linear attention \(GDN .*KDA .*\), Mamba2 .* or sliding windows, are. Start"
    with pytest.raises(ValueError, match=names):
        build_tree(StateKind, engines, None)
    monkeypatch.setattr(decode_radix_cache, "STATE_KINDS", [])
    with pytest.raises(ValueError, match=r"throughout \(RadixCache\) are without the extra hybrid. Start this decode"):
        build_tree(StateKind, engines, None)
