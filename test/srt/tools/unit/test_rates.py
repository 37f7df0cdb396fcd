"""`pd-radix bench --slo`: the search for a rate, and rates that are given."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import rates as measured


def trial(rate, kept, requests=100):
    return measured.Trial(rate, requests, kept, rate, 0.1, 0.2, 0.01, 0.02)


def searched(names, server):
    searches = {name: measured.Search() for name in names}
    measured.search_all(searches, server)
    return searches


@given(
    limits=st.tuples(st.floats(0.1, 900), st.floats(0.1, 1.0)),
)
def test_the_rates_are_found(limits):
    """90% are kept up to a rate, and 99% up to a part of it."""
    most, part = limits

    def server(name, rate):
        return trial(rate, 1.0 if rate <= part * most else 0.95 if rate <= most else 0.5)

    search = searched(["one"], server)["one"]
    for share, limit in ((0.9, most), (0.99, part * most)):
        found = search.goodput(share)
        if limit < measured.LEAST_RATE:
            assert found is None
        else:
            assert found is not None and found.rate <= limit < found.rate * measured.PRECISION
    assert len(search.trials) <= 60


def test_no_rate_is_low_enough():
    search = searched(["one"], lambda name, rate: trial(rate, 0.0))["one"]
    rates = [8, 4, 2, 1, 0.5, 0.25, 0.125, 0.0625]
    assert search.goodput(0.9) is None and [t.rate for t in search.trials] == [r for r in rates for _ in range(2)]


def test_every_rate_is():
    search = searched(["one"], lambda name, rate: trial(rate, 1.0))["one"]
    assert search.goodput(0.99).rate == measured.MOST_RATE


def test_a_rate_that_failed_by_chance_bounds_what_is_claimed():
    """Of measurements that contradict each other the lower one counts."""
    search = measured.Search()
    for rate, kept in ((1, 1.0), (2, 0.5), (4, 1.0)):
        search.told(trial(rate, kept))
    assert search.best(0.9) == (1, 2)
    # But it is measured again first, and the better one counts.
    assert search.next_rate() == 2
    search.told(trial(2, 0.95))
    assert search.best(0.9) == (4, math.inf) and search.goodput(0.9).rate == 4
    search.told(trial(8, 0.0))
    assert search.next_rate() == 8
    search.told(trial(8, 0.1))
    assert search.next_rate() == pytest.approx(math.sqrt(4 * 8))
    assert search.rates()[8].kept == 0.1


def test_sides_take_turns():
    asked = []

    def server(name, rate):
        asked.append(name)
        return trial(rate, float(rate < 50))

    searched(["off", "on"], server)
    assert asked[:6] == ["off", "on"] * 3


def test_no_rate_above_the_most_is_tried():
    for most in (5.0, 8.0, 50.0):
        search = measured.Search(most=most)
        measured.search_all({"one": search}, lambda name, rate: trial(rate, 1.0))
        assert search.goodput(0.99).rate == max(t.rate for t in search.trials) == most
    assert measured.Search(most=measured.LEAST_RATE / 2).next_rate() is None


@pytest.mark.parametrize("seconds", [5, 30, 300])
def test_of_99_percent_nothing_is_claimed_of_few_requests(seconds):
    """99% are kept up to 0.5/s and 90% up to 5/s. Of 20 requests at 2/s all are in most cases."""
    for seed in range(40):
        chance = random.Random(seed)

        def server(name, rate):
            n = max(20, math.ceil(rate * seconds))
            kept = sum(chance.random() < 1 - 0.02 * rate for _ in range(n)) / n  # noqa: B023
            return trial(rate, kept, n)

        search = searched(["one"], server)["one"]
        found = search.goodput(0.99)
        assert len(search.trials) < 40
        assert search.goodput(0.9) is not None and (found is None or found.requests >= 100)


def test_below_a_rate_of_few_requests_nobody_looks_for_99_percent():
    """Of still lower rates there would be fewer."""
    asked = []

    def server(name, rate):
        asked.append(rate)
        return trial(rate, 0.95 if rate <= 2 else 0.5, 30)

    search = searched(["one"], server)["one"]
    assert min(asked) == 2 and search.goodput(0.9).rate == 2 and search.goodput(0.99) is None


def test_given_rates():
    found = measured.parse_rates("off=0.9, target=1.9,off=2", ["off", "on", "target"])
    assert found == [("off", 0.9), ("target", 1.9), ("off", 2.0)]


@pytest.mark.parametrize(
    "text", ["1", "off", "off=", "off=x", "off=0", "off=nan", "off=2000", "other=1", "off=1,", "=1"]
)
def test_no_rates(text):
    with pytest.raises(PdRadixError, match="--slo-rates .* sides off, on"):
        measured.parse_rates(text, ["off", "on"])
