"""Which drafts a worker takes, and that both of a pair speculate alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from every_state_bench import Bench, bench, kind, timed  # noqa: F401
from sglang.srt.disaggregation.common import drafts
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION
from sglang.srt.mem_cache import cache_support
from test_flag import DECODE, FLAG, parse  # noqa: F401
from test_hybrid_options import parse_hybrid, parse_layout  # noqa: F401
from test_prefill_answers import ask

from sglang_pd_radix.tools.cluster import free_ports

EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "draft"]


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_eagle_keeps_the_radix_cache(parse, algorithm):  # noqa: F811
    args = parse(*DECODE, "--speculative-algorithm", algorithm, *EAGLE[2:], FLAG)
    assert not args.disable_radix_cache and args.speculative_eagle_topk == 1
    # Requests with a grammar are refused one by one, by the engine's own check.
    assert args.grammar_backend == "none" and parse(*DECODE, FLAG).grammar_backend != "none"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*EAGLE, "--enable-custom-logit-processor"], "--enable-custom-logit-processor"),
        (["--speculative-algorithm", "EAGLE"], "MTP"),
    ],
)
def test_other_speculation_is_refused(parse, options, named):  # noqa: F811
    with pytest.raises(ValueError) as refused:
        parse(*DECODE, *options, FLAG)
    assert FLAG in str(refused.value) and named in str(refused.value)


def test_a_draft_in_a_hybrid_model(parse_hybrid):  # noqa: F811
    """Qwen3-Next's and Qwen3.5's own are verified; others are not, nor is one beside a model that has states."""
    options = [FLAG, "--mamba-scheduler-strategy", "extra_buffer", "--speculative-algorithm"]
    for name in ("EAGLE", "NEXTN"):
        args = parse_hybrid(*options, name)
        assert not args.disable_radix_cache and args.speculative_algorithm == "EAGLE"
    with pytest.raises(ValueError, match="MTP"):
        parse_hybrid(*options, "EAGLE3")
    cache_support.check(cache_support.kinds_with("linear attention")[0], args)
    args.speculative_draft_model_path = "other"
    with pytest.raises(ValueError, match=r"linear attention .*\(other\).*without the flag"):
        cache_support.check(cache_support.kinds_with("linear attention")[0], args)
    args.speculative_draft_model_path = None
    args.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["JetNemotronForCausalLM"]))
    with pytest.raises(ValueError, match=r"MTP.*Qwen3NextForCausalLM, Qwen3_5"):
        args._check_decode_radix_cache()


def test_one_that_speculates_otherwise_is_of_no_use():
    with pytest.raises(ValueError, match="speculates with EAGLE and this decode worker with nothing"):
        ask(200, {"version": DECODE_PREFIX_VERSION, "drafts": "EAGLE"})


@pytest.mark.parametrize("theirs, own", [(None, "EAGLE"), ("EAGLE", None), ("another draft", "EAGLE3")])
def test_a_prefill_that_does_not_speculate_alike_is_said_so(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    theirs: str | None,
    own: str | None,
):
    """Its pages would bring no KV for this worker's drafts, which tokens do not show."""
    (port,) = free_ports(1)
    answer = {"version": 1, "pieces": 0, "state": 1, **({"drafts": theirs} if theirs else {})}
    if theirs == "another draft":
        answer |= {"drafts": own, "draft_model": theirs}
        monkeypatch.setattr(drafts, "describe_draft", lambda server_args: "this draft")
    reply = SimpleNamespace(status_code=200, json=lambda: answer)
    monkeypatch.setattr(bench.manager.requests, "get", lambda *args, **kwargs: reply)
    monkeypatch.setattr(bench.manager.server_args, "speculative_algorithm", own, raising=False)
    req = bench.arrive(prefill=False, bootstrap_host="127.0.0.1", bootstrap_port=port)
    assert timed(bench, req) < 12
    assert "this decode worker" in req.finished_reason.message and (theirs or "nothing") in req.finished_reason.message
