"""The flag: its two names, what it changes, and the combinations it refuses with one clear message."""

from __future__ import annotations

import pytest
from sglang.srt.server_args import prepare_server_args

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


def test_decode_has_none_without_the_flag(parse):
    args = parse(*DECODE)
    assert not args.disaggregation_decode_enable_radix_cache
    assert args.disable_radix_cache


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"], "decode workers"),
        ([], "decode workers"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mori"], "mori"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"], "fake"),
        ([*DECODE, "--disable-radix-cache"], "--disable-radix-cache"),
        ([*DECODE, "--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
        ([*DECODE, "--enable-lmcache"], "--enable-lmcache"),
        ([*DECODE, "--enable-streaming-session"], "--enable-streaming-session"),
        ([*DECODE, "--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        ([*DECODE, "--enable-hisparse"], "--enable-hisparse"),
    ],
)
def test_other_combinations_are_refused(parse, options, named):
    with pytest.raises((ValueError, AssertionError)) as refused:
        parse(*options, FLAG)
    assert FLAG in str(refused.value) and named in str(refused.value)


EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "draft"]


def test_eagle_keeps_the_radix_cache(parse):
    args = parse(*DECODE, *EAGLE, FLAG)
    assert not args.disable_radix_cache and args.speculative_eagle_topk == 1
    # Requests with a grammar are refused one by one, by the engine's own check.
    assert args.grammar_backend == "none" and parse(*DECODE, FLAG).grammar_backend != "none"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*EAGLE, "--tp-size", "2"], "--tensor-parallel-size above 1"),
        ([*EAGLE, "--enable-custom-logit-processor"], "--enable-custom-logit-processor"),
        (["--speculative-algorithm", "EAGLE"], "MTP"),
    ],
)
def test_other_speculation_is_refused(parse, options, named):
    with pytest.raises(ValueError) as refused:
        parse(*DECODE, *options, FLAG)
    assert FLAG in str(refused.value) and named in str(refused.value)


@pytest.mark.parametrize("name", ["SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_DISAGG_STAGING_BUFFER"])
def test_an_environment_switch_is_refused_too(parse, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=name):
        parse(*DECODE, FLAG)
