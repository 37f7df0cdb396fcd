"""What a worker takes for ``--load-balance-method longest_prefix``, and ranks that are alike."""

from __future__ import annotations

import pytest
from sglang.srt.managers.prefix_balance import PrefixBalance
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.server_args import prepare_server_args

from sglang_pd_radix.tools.make_model import make_model

DECODE = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]


@pytest.fixture
def parse(tmp_path):
    common = ["--model-path", str(make_model(tmp_path / "model")), "--device", "cpu", "--dtype", "float32"]
    return lambda *options: prepare_server_args([*common, *options])


def test_dp_ranks_may_be_chosen_by_prefix(parse):
    ranks = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    args = parse(*DECODE, FLAG, *ranks, "--load-balance-method", "longest_prefix")
    assert args.enable_dp_attention and args.load_balance_method == "longest_prefix"
    assert parse(*DECODE, FLAG, *ranks).load_balance_method == "round_robin"
    for options in (DECODE, ["--disaggregation-mode", "prefill", *DECODE[2:]], []):
        with pytest.raises(ValueError, match="longest_prefix") as refused:
            parse(*options, *ranks, "--load-balance-method", "longest_prefix")
        assert FLAG in str(refused.value)


def test_ranks_that_are_alike_take_turns():
    balance = PrefixBalance(3, 1 << 20, 16)
    chosen = []
    for n in range(6):
        chosen.append(balance.choose(range(10), None, [True] * 3, float(n)))
        for rank in range(3):
            balance.report(rank, 0, n + 0.5)
    assert chosen == [0, 1, 2, 0, 1, 2]
    # Also behind one that was sent without being asked about.
    balance.given(1, range(10), None, 7.0)
    for rank in range(3):
        balance.report(rank, 0, 7.5)
    assert balance.choose(range(10), None, [True] * 3, 8.0) == 2
