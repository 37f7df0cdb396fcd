"""The flag: its two names, what it changes, and the combinations it refuses with one clear message."""

from __future__ import annotations

import json
import shutil

import pytest
from decode_world import DecodeWorker
from sglang.srt.mem_cache.decode_radix_cache import build_tree
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.state_kind import StateKind
from sglang.srt.server_args import prepare_server_args

from sglang_pd_radix.patching import loader
from sglang_pd_radix.tools.make_model import make_model

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
    with pytest.raises(ValueError, match=f"{FLAG} needs the radix cache, .* Transformers backend"):
        build_tree(StateKind, engines, None)


@pytest.mark.parametrize("name", [FLAG, "--disaggregation-enable-decode-radix-cache"])
@pytest.mark.parametrize("given", [True, False])
def test_both_names_of_the_flag_are_known_in_a_file_of_options(parse, tmp_path, name, given):
    file = tmp_path / "options.yaml"
    file.write_text(f"{name[2:]}: {str(given).lower()}\n")
    assert parse(*DECODE, "--config", str(file)).disaggregation_decode_enable_radix_cache == given
