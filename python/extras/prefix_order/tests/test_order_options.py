"""The options of the order of admission."""

from __future__ import annotations

import pytest
from test_flag import DECODE, FLAG, PREFILL, parse

__all__ = ["parse"]


@pytest.mark.parametrize(
    "given", [("--disaggregation-decode-admission", "fcfs"), ("--disaggregation-decode-max-overtaken", "5")]
)
def test_the_order_of_admission_is_of_a_worker_with_a_radix_cache(parse, given):
    parse(*DECODE, FLAG, *given)
    for role in (DECODE, PREFILL, []):
        with pytest.raises(ValueError, match=f"{given[0]} needs {FLAG}. Give both to the decode worker"):
            parse(*role, *given)
    # What is the default changes nothing.
    parse(*PREFILL, "--disaggregation-decode-admission", "prefix", "--disaggregation-decode-max-overtaken", "32")


def test_a_bound_below_nothing_is_refused(parse):
    with pytest.raises(ValueError, match="--disaggregation-decode-max-overtaken is -1: give 0 or more"):
        parse(*DECODE, FLAG, "--disaggregation-decode-max-overtaken", "-1")
