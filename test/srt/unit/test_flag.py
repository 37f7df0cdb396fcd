"""The flag: its two names, what it changes, and the combinations it refuses with one clear message."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import DecodeWorker
from sglang.srt.mem_cache import cache_support, kv_cache_builder
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import prepare_server_args

from sglang_pd_radix.patching import loader
from sglang_pd_radix.tools.make_model import ModelShape, make_model

FLAG = "--disaggregation-decode-enable-radix-cache"
DECODE = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]


@pytest.fixture(scope="module")
def parse(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model") / "m")
    return lambda *options: prepare_server_args(["--model-path", str(model), "--device", "cpu", *options])


@pytest.mark.parametrize("name", [FLAG, "--disaggregation-enable-decode-radix-cache"])
def test_decode_keeps_its_radix_cache_with_the_flag(parse, name):
    args = parse(*DECODE, name)
    args.check_server_args()
    assert args.disaggregation_decode_enable_radix_cache
    assert not args.disable_radix_cache


def test_a_worker_does_not_start_with_a_secret_that_nothing_heeds(parse, monkeypatch):
    monkeypatch.setattr(loader._state, "extras", [])
    args = parse(*DECODE)
    for nothing in ("", " "):
        monkeypatch.setenv("SGLANG_DISAGGREGATION_SECRET_FILE", nothing)
        args.check_server_args()
    monkeypatch.setenv("SGLANG_DISAGGREGATION_SECRET_FILE", "/etc/secret")
    with pytest.raises(ValueError, match="SGLANG_DISAGGREGATION_SECRET_FILE is set, and messages would not be signed"):
        args.check_server_args()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"], "decode workers"),
        ([], "decode workers"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mori"], "mori"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"], "fake"),
        ([*DECODE, "--disable-radix-cache"], "--disable-radix-cache"),
        ([*DECODE, "--enable-lmcache"], "--enable-lmcache"),
        ([*DECODE, "--enable-streaming-session"], "--enable-streaming-session"),
        ([*DECODE, "--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        ([*DECODE, "--enable-lora-overlap-loading"], "--enable-lora-overlap-loading"),
        ([*DECODE, "--enable-return-routed-experts"], "--enable-return-routed-experts"),
        ([*DECODE, "--enable-hisparse"], "--enable-hisparse"),
        # The engine would make an ordinary server of it.
        ([*DECODE, "--dllm-algorithm", "LowConfidence"], "--dllm-algorithm"),
        ([*DECODE, "--num-reserved-decode-tokens", "-1"], "--num-reserved-decode-tokens is -1: give 0 or more"),
        ([*DECODE, "--disaggregation-decode-polling-interval", "0"], "interval is 0: give 1 or more"),
    ],
)
def test_other_combinations_are_refused(parse, options, named):
    with pytest.raises((ValueError, AssertionError)) as refused:
        parse(*options, FLAG)
    assert FLAG in str(refused.value) and named in str(refused.value)


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


PREFILL = ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"]


def test_what_turns_the_radix_cache_off_is_told(parse, tmp_path):
    assert_told_what_turns_the_cache_off(parse, tmp_path, FLAG, *DECODE, FLAG)


def assert_told_what_turns_the_cache_off(parse, tmp_path, option, *options):
    """The engine does so by itself for some models and attention backends, and with deterministic inference."""
    model = shutil.copytree(parse().model_path, tmp_path / "dual")
    config = json.loads((model / "config.json").read_text())
    chunks = {"chunk_size": 1024, "local_size": 128, "original_max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps({**config, "dual_chunk_attention_config": chunks}))
    dual = ["--model-path", str(model), "--attention-backend", "dual_chunk_flash_attn"]
    with pytest.raises(ValueError) as refused:
        parse(*options, *dual)
    assert f"{option} needs the radix cache" in str(refused.value)
    assert "for this model or --attention-backend dual_chunk_flash_attn" in str(refused.value)
    assert "--disable-radix-cache" not in str(refused.value)
    with pytest.raises(ValueError, match=f"{option} is not verified together with --disable-radix-cache"):
        parse(*options, *dual, "--disable-radix-cache")
    # Before the model is loaded.
    args = parse(*options, "--enable-deterministic-inference", "--attention-backend", "flashinfer")
    with pytest.raises(ValueError, match=f"{option} needs .* deterministic inference with --attention-backend flash"):
        args.check_server_args()
    parse(*options, "--enable-deterministic-inference", "--attention-backend", "triton").check_server_args()


def test_a_tree_that_keeps_nothing_is_refused():
    """The engine has one for a multimodal model of the Transformers backend."""
    engines = DecodeWorker(64, 1, max_reqs=4, max_len=64, reserved=1, tree_type=RadixCache).tree
    engines.disable = True
    runner: Any = SimpleNamespace(token_to_kv_pool=None)
    with pytest.raises(ValueError, match=f"{FLAG} needs the radix cache, .* Transformers backend"):
        kv_cache_builder.build(cache_support.DECODE, engines, runner, lambda: 0)


@pytest.mark.parametrize("name", [FLAG, "--disaggregation-enable-decode-radix-cache"])
@pytest.mark.parametrize("given", [True, False])
def test_both_names_of_the_flag_are_known_in_a_file_of_options(parse, tmp_path, name, given):
    file = tmp_path / "options.yaml"
    file.write_text(f"{name[2:]}: {str(given).lower()}\n")
    assert parse(*DECODE, "--config", str(file)).disaggregation_decode_enable_radix_cache == given
