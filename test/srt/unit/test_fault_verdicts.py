"""The verdicts of `benchmark/faults` on storms that are made up: what each finds, and what it lets pass."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from faults import blame, deploy, growth, hits, truth
from faults.blame import Window
from faults.deploy import Done
from faults.schedule import Event, Shape, events
from faults.traffic import Ask, Told
from faults.truth import Truth
from faults.watch import Sample, Watch

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Process


def told(how: str = "whole", began: float = 10.0, took: float = 1.0, **more) -> Told:
    given = {"number": 1, "ask": 0, "manner": "plain", "began_s": began, "ended_s": began + took, "status": 200}
    return Told(**{**given, "ended_how": how, **more})


# ---- failures, and what explains them ----


def stormy(seconds: float = 300, seed: int = 3) -> list[Done]:
    coming = itertools.takewhile(lambda e: e.at_s < seconds, events(seed, Shape()))
    return [Done(e, e.at_s, e.at_s + e.lasts_s + (60 if e.kind == "kill" else 0), "done") for e in coming]


def storm_of(windows: list[Window], fails, seconds: float = 300, clients: int = 8, seed: int = 0) -> list[Told]:
    """Clients that ask one request of half a second after the other; ``fails``: how likely, of the windows met."""
    pick = random.Random(seed)
    found = []
    for client in range(clients):
        at = client * 0.06
        while at < seconds:
            met = [window for window in windows if at <= window.to_s and at + 0.1 >= window.from_s]
            bad = pick.random() < fails(met)
            found.append(told("failed" if bad else "whole", began=at, took=0.1 if bad else 0.5))
            at += 0.3 if bad else 0.5
    return found


def test_a_storm_in_which_every_request_fails_fast():
    windows = blame.windows(stormy(), Shape(), 0.0)
    found = blame.judge(storm_of(windows, lambda met: 1.0), windows)
    problems = blame.problems(found, 0.0)
    assert any("while nothing was wrong" in problem for problem in problems)
    assert any("failed, and what was done explains" in problem for problem in problems)
    # And one in which nobody can be asked at all.
    nobody = blame.problems(blame.judge([], windows), 0.0)
    assert nobody == ["nobody waited for an answer"]


@pytest.mark.parametrize("seed", range(5))
def test_what_the_events_explain_may_fail(seed: int):
    windows = blame.windows(stormy(seed=seed), Shape(), 0.0)
    # One of two workers is out: half of what is asked fails; a cut takes all of it.
    fails = storm_of(windows, lambda met: max((window.part for window in met), default=0.0) * 0.9, seed=seed)
    found = blame.judge(fails, windows)
    assert found.failed > 50 and blame.problems(found, 0.0) == [] == blame.not_judged(found)


def test_one_failure_without_a_cause():
    windows = blame.windows(stormy(), Shape(), 0.0)
    sound = storm_of(windows, lambda met: 0.0)
    quiet = next(one for one in sound if not any(blame._met(window, one) for window in windows))
    lost = told("failed", began=quiet.began_s, took=0.1, number=77, error="boom")
    (problem,) = blame.problems(blame.judge([*sound, lost], windows), 0.0)
    assert "client 77" in problem and "while nothing was wrong: boom" in problem


def test_more_than_the_half_that_an_event_explains():
    """All fail while one of two workers is out: nothing is without a cause, and it is too much all the same."""
    windows = [Window("stop decode-0", False, 0.0, 300.0, 0.5)]
    found = blame.judge(storm_of(windows, lambda met: 0.9), windows)
    assert not found.causeless
    (problem,) = blame.problems(found, 0.0)
    assert "what was done explains" in problem
    assert blame.problems(blame.judge(storm_of(windows, lambda met: 0.5), windows), 0.0) == []
    # There is nothing to see when nothing was wrong.
    assert "0 were asked while nothing was wrong" in blame.not_judged(found)[0]


@pytest.mark.parametrize(
    ("kind", "target", "detail", "explains"),
    [
        ("kill", "prefill-0", "", True),
        ("stop", "decode-1", "", True),
        ("cut", "link", "", True),
        ("slow", "link", "2mbit", True),
        ("pause", "decode-0", "abort", True),
        ("slow", "link", "20mbit", False),
        ("pause", "decode-0", "retract", False),
        ("pause", "prefill-0", "in_place", False),
        ("flush", "decode-0", "", False),
        ("weights", "decode-0", "", False),
        ("weights", "decode-0", "retract", False),
    ],
)
def test_what_explains_a_failure(kind: str, target: str, detail: str, explains: bool):
    done = Done(Event(10.0, kind, target, 2.0, detail), 10.0, 12.0, "done")
    windows = blame.windows([done], Shape(), 100.0)
    failed = told("failed", began=110.5, took=0.2)
    assert bool(blame.judge([failed], windows).causeless) != explains
    # Not what came before it, nor what it did not do.
    assert blame.judge([told("failed", began=105.0, took=1.0)], windows).causeless
    assert not blame.windows([Done(done.event, 10.0, 10.0, "left out: prefill-1 is not back")], Shape(), 100.0)
    # Only a pause that aborts has aborted.
    aborted = told("aborted", began=110.5, took=0.2)
    assert bool(blame.judge([aborted], windows).causeless) == (detail != "abort")


def test_between_a_death_and_the_return_the_router_knows():
    windows = blame.windows([Done(Event(10.0, "kill", "decode-0"), 10.0, 90.0, "ready")], Shape(), 0.0)
    for at, explained in ((11.0, True), (50.0, False), (88.0, True), (93.0, True), (120.0, False)):
        assert bool(blame.judge([told("failed", began=at, took=0.1)], windows).causeless) != explained, at
    # Who waited for it all the time was there when it died.
    assert not blame.judge([told("failed", began=9.0, took=31.0)], windows).causeless


def test_what_was_done_to_nobody_is_said():
    assert blame.never_done(stormy(764), Shape()) == ""
    shape = Shape(link=False, without=frozenset({"stop", "flush", "pause", "weights"}))
    done = [
        Done(Event(1.0, "kill", "decode-0"), 1.0, 2.0, "ready"),
        Done(Event(9.0, "kill", "decode-1"), 9, 9, "left out"),
    ]
    assert blame.never_done(done, shape) == "kill of decode-1, prefill-0, prefill-1"


@pytest.mark.parametrize(
    ("outcome", "done"),
    [
        ("200 Cache flushed.", True),
        ("ready 31 s after its start", True),
        ("went on", True),
        ("restored", True),
        ('200 {"message": "paused"}; then 200 {"message": "goes on"}', True),
        ("400 Cache not flushed because there are pending requests.", False),
        ("0 timed out", False),
        ("0 timed out; then 200 {}", False),
        ("no answer; then 200 {}", False),
        ("failed: decode-0 ended", False),
        ("left out: prefill-1 is not back", False),
        ("was gone already", False),
    ],
)
def test_what_was_refused_was_not_done(outcome: str, done: bool):
    shape = Shape(decode=1, prefill=0, link=False, without=frozenset({"stop", "kill", "pause", "weights"}))
    found = blame.never_done([Done(Event(1.0, "flush", "decode-0"), 1.0, 2.0, outcome)], shape)
    assert found == ("" if done else "flush of decode-0")


# ---- hits on decode ----

ASKS = [Ask(tuple(range(100 * i, 100 * i + 40)), 4) for i in range(30)]


def asked(rounds: int, hit: int | None = 32, worker: str = "decode-0") -> list[Told]:
    """The requests one after the other: the first time nothing is held, then ``hit`` tokens (two pages of 16)."""
    return [
        told(began=float(n), took=0.5, ask=n % 30, worker=worker, hit=0 if n < 30 else hit, ids=(1,))
        for n in range(30 * rounds)
    ]


def test_hits_that_the_requests_make_possible():
    (found,) = hits.judge(asked(3), ASKS, ["decode-0"], 4096, 16)
    assert (found.answered, found.prompts, found.held, found.possible) == (90, 90 * 40, 60 * 32, 60 * 32)
    assert hits.problems("calm", [found]) == [] == hits.not_judged("calm", [found])


def test_a_decode_worker_that_drops_its_hits():
    for hit in (0, 16, None):
        found = hits.judge(asked(3, hit), ASKS, ["decode-0"], 4096, 16)
        assert f"calm: the tree of decode-0 held {30 * 2 * (hit or 0)} tokens" in hits.problems("calm", found)[0]
    # One of two does: the other's hits do not cover it.
    both = [*asked(3), *asked(3, 0, "decode-1")]
    found = hits.judge(both, ASKS, ["decode-0", "decode-1"], 4096, 16)
    assert [("decode-1" in problem) for problem in hits.problems("storm", found)] == [True]
    # And none that answers at all has nothing to show.
    found = hits.judge(asked(3), ASKS, ["decode-0", "decode-2"], 4096, 16)
    assert "decode-2" in hits.not_judged("storm", found)[0]


def test_what_could_be_missed_is_not_asked_for():
    # Too much was sent in between: of 60 pages, 32 fit.
    (found,) = hits.judge(asked(3), ASKS, ["decode-0"], 32 * 16, 16)
    assert found.possible == 0
    # All were sent at once.
    together = [told(began=0.0, took=9.0, ask=n % 30, worker="decode-0", hit=0) for n in range(90)]
    assert hits.judge(together, ASKS, ["decode-0"], 4096, 16)[0].possible == 0
    # The tree was emptied at 50 s, or in the whole time from 20 to 70 s: what came before does not count.
    for span, possible in (((50.0, 50.6), 20 + 9), ((20.0, 70.0), 0), ((100.0, 101.0), 60)):
        (found,) = hits.judge(asked(3), ASKS, ["decode-0"], 4096, 16, {"decode-0": [span]})
        assert found.possible == 32 * possible, span
    (other,) = hits.judge(asked(3), ASKS, ["decode-0"], 4096, 16, {"decode-1": [(20.0, 70.0)]})
    assert other.possible == 60 * 32


# ---- the right answers ----


def test_answers_are_held_against_the_engine_alone():
    right = Truth({0: (1, 2, 3), 1: (4,)})
    good = [told(ids=(1, 2, 3)), told(ask=1, ids=(4,)), told("aborted"), told("left"), told("failed", status=500)]
    assert truth.problems(good, right) == []
    (problem,) = truth.problems([*good, told(ids=(1, 9, 3))], right)
    assert "request 0 differs from token 1 on" in problem
    assert truth.problems([told(ids=(1, 2))], right) and truth.problems([told(ids=(1, 2, 3, 4))], right)
    assert truth.problems([told(ask=7, ids=(1,))], right)


def test_two_tokens_that_are_as_likely():
    right = Truth({0: (1, 2, 3)}, {0: {(1, 9, 5)}})
    other = told(ids=(1, 9, 5))
    assert truth.problems([other], right) == [] and truth.tied([other, told(ids=(1, 2, 3))], right) == 1
    # Neither a third token, nor another place, nor anything else behind it.
    for wrong in ((1, 8, 5), (9, 2, 3), (1, 2, 9), (1, 9, 6)):
        assert truth.problems([told(ids=wrong)], right) and not truth.tied([told(ids=wrong)], right), wrong
    assert truth.not_judged([other, told(ids=(1, 9, 6))], right) == []


class Engine:
    """Answers with what follows from the ids before, and has two tokens as likely after some of them."""

    def __init__(self, ties: dict[tuple[int, ...], int]) -> None:
        self.ties = ties

    def answer(self, url: str, one: Ask) -> dict:
        ids, likeliest = list(one.ids), []
        for _ in range(one.answer):
            other = self.ties.get(tuple(ids))
            ids.append(sum(ids))
            likeliest.append([[-1.0, ids[-1], None], [-1.0 if other else -2.0, other or 0, None]])
        return {"output_ids": ids[len(one.ids) :], "meta_info": {"output_top_logprobs": likeliest}}


def test_what_follows_a_tie_is_asked_for(monkeypatch):
    """Also a tie behind a tie; and one at the last token, behind which there is nothing."""
    engine = Engine({(1, 1): 7, (1, 1, 7): 5, (1, 1, 2, 4): 6})
    monkeypatch.setattr(truth, "_answer", engine.answer)
    cluster = SimpleNamespace(router_url="http://alone")
    right = truth.ask(cluster, [Ask((3,), 3), Ask((1, 1), 3)], 1)
    assert right.answers == {0: (3, 6, 12), 1: (2, 4, 8)} and not right.loose
    assert right.also == {1: {(7, 9, 18), (7, 5, 14), (2, 4, 6)}}
    both = Truth()
    both.add(right, 5)
    assert truth.problems([told(ask=6, ids=(7, 5, 14))], both) == []
    assert truth.problems([told(ask=6, ids=(7, 5, 1))], both)
    # More ways than are asked for: what begins as one of those is neither right nor wrong.
    monkeypatch.setattr(truth, "WAYS", 1)
    few = truth.ask(cluster, [Ask((1, 1), 3)], 1)
    assert few.also == {0: {(7, 9, 18)}} and few.loose == {0: ((2, 4, 6), (7, 5))}
    unknown = told(ids=(7, 5, 1))
    assert truth.problems([unknown, told(ids=(7, 9, 18))], few) == [] and truth.problems([told(ids=(7, 8, 1))], few)
    (text,) = truth.not_judged([unknown], few)
    assert text.startswith("1 answers")


def test_what_is_as_likely():
    assert truth._as_likely([[-1.0, 5, None], [-1.00005, 6, None]], 5) == 6
    assert truth._as_likely([[-1.0, 5, None], [-1.00005, 6, None]], 6) == 5
    assert truth._as_likely([[-1.0, 5, None], [-1.001, 6, None]], 5) is None
    assert truth._as_likely(None, 5) is None and truth._as_likely([[-1.0, 5, None]], 5) is None


def test_the_engine_alone_drafts_nothing():
    options = ["--page-size", "64", "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "4", "--tp", "2"]
    assert deploy._without_drafts(options) == ["--page-size", "64", "--tp", "2"]


def test_an_engine_that_does_not_answer():
    class Nobody:
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            router_url = f"http://127.0.0.1:{port.getsockname()[1]}"

    with pytest.raises(PdRadixError, match="right answers"):
        truth.ask(Nobody(), [Ask((1,), 2)], 1)


# ---- growth ----


def life_of(
    pick: np.random.Generator, worker: str, life: int, asked: np.ndarray, leak: float = 0.0, kib: float = 0.0,
    jitter: float = 1.5, rises: int = 1,
) -> list[Sample]:  # fmt: skip
    """One look a second. leak: descriptors lost for each request served, of two workers; kib: of memory.

    What is in flight comes and goes as it was seen to (a spread of 1.5 descriptors, alike from one second to the
    next); pools of connections are made at some moment (``rises``)."""

    def noise(spread: float, alike: float) -> np.ndarray:
        found, last = [], pick.normal(0, spread)
        for step in pick.normal(0, spread * np.sqrt(1 - alike**2), len(asked)):
            last = alike * last + step
            found.append(last)
        return np.array(found)

    served = (asked - asked[0]) / 2
    descriptors = 200 + noise(jitter, 0.5) + np.floor(served * leak)
    memory = 2_900_000 + noise(300, 0.9) + served * kib + 8000 * (1 - np.exp(-served / 50))
    for _ in range(rises):
        at = pick.integers(0, len(asked))
        descriptors[at:] += 14
        memory[at:] += 9000
    rows = zip(asked, descriptors, memory, strict=True)
    return [Sample(worker, life, int(a), float(i), round(d), 60, int(m)) for i, (a, d, m) in enumerate(rows)]


def storm_samples(requests: int, lives: int, seed: int = 0, **how) -> list[Sample]:
    """Two decode workers that are started again ``lives - 1`` times in the same ``requests``, 13 of them a second."""
    pick = np.random.default_rng(seed)
    ends = np.linspace(0, requests, lives + 1)
    return [
        sample
        for worker in ("decode-0", "decode-1")
        for life in range(lives)
        for sample in life_of(pick, worker, life, np.arange(ends[life], ends[life + 1], 13.0), **how)
    ]


def growths(samples: list[Sample]) -> dict[str, growth.Growth]:
    return {one.what: one for one in growth.judge(samples)}


@pytest.mark.parametrize("seed", range(4))
def test_one_descriptor_lost_in_250_requests_is_found_by_a_run_of_10000(seed: int):
    found = growths(storm_samples(10_000, 4, seed, leak=1 / 250))
    assert found["descriptors"].grows and not found["threads"].grows
    (problem,) = growth.problems(list(found.values()))
    assert problem.startswith("decode: descriptors grow with the requests served: one in ")
    # In an hour of calm, with one life and a look every five seconds, too.
    pick = np.random.default_rng(seed)
    soaked = life_of(pick, "decode-0", 0, np.arange(0, 10_000, 70.0), leak=1 / 125)
    assert growths(soaked)["descriptors"].grows


@pytest.mark.parametrize("seed", range(8))
def test_pools_that_are_made_once_are_no_growth(seed: int):
    for requests, lives in ((1000, 1), (3000, 2), (10_000, 4)):
        found = growth.judge(storm_samples(requests, lives, seed, rises=2))
        assert growth.problems(found) == [], (requests, lives)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("what", "lump"), [("descriptors", 40.0), ("threads", 20.0), ("rss_kib", 50_000.0)])
def test_a_leak_in_three_lumps_is_no_three_pools(what: str, lump: float, seed: int):
    """It fits three steps of the level, whose sum is what tells it from pools that are made once."""
    pick = np.random.default_rng(seed)
    sound = life_of(pick, "decode-0", 0, np.arange(0, 10_000, 13.0), rises=0)
    leaky = [
        dataclasses.replace(one, **{what: round(getattr(one, what) + lump * sum(n > at for at in (250, 400, 550)))})
        for n, one in enumerate(sound)
    ]
    assert growth.problems(growth.judge(sound)) == []
    (problem,) = growth.problems(growth.judge(leaky))
    assert problem.startswith(f"decode: {growth._NAMES[what]}") and "in steps" in problem
    assert [one.risen > 2 * lump for one in growth.judge(leaky)] == [one.what == what for one in growth.judge(leaky)]


def test_what_a_run_of_10000_can_say_and_a_short_one_cannot():
    long = growths(storm_samples(10_000, 4))
    assert all(one.judged for one in long.values()) and growth.not_judged(list(long.values())) == []
    assert long["descriptors"].resolution < 1 / 250 and long["rss_kib"].resolution < 24
    short = growths(storm_samples(1000, 1))
    assert not short["descriptors"].judged
    assert "times as many requests would show it" in growth.not_judged(list(short.values()))[0]
    # A worker that is seen every few seconds for a minute, and loses one for each.
    lost = growths(storm_samples(1000, 1, leak=1.0)[::4])["descriptors"]
    assert lost.grows and "descriptors grow with the requests served: 1.0 a request" in growth.problems([lost])[0]
    # One for every tenth request is seen even there; and nothing in a run that has only begun.
    assert growths(storm_samples(1000, 1, leak=1 / 10))["descriptors"].grows
    begun = growth.judge(storm_samples(300, 1))
    assert not any(one.grows or one.judged for one in begun)
    assert "too few requests" in growth.not_judged(begun)[0] and "not known" in str(begun[0])


def test_a_run_without_a_sample_has_not_judged_growth():
    assert growth.judge([]) == [] and growth.not_judged([]) == ["growth of anything: no worker was looked at"]


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_judged_too(seed: int):
    found = growths(storm_samples(5000, 2, seed, kib=24.0))
    assert found["rss_kib"].grows and "KiB a request" in growth.problems(list(found.values()))[0]
    assert not growths(storm_samples(5000, 2, seed))["rss_kib"].grows


def test_a_role_is_not_judged_by_the_other():
    prefill = [dataclasses.replace(sample, worker="prefill-" + sample.worker[-1]) for sample in storm_samples(5000, 1)]
    found = growth.judge([*storm_samples(5000, 1, leak=1 / 20), *prefill])
    assert [problem.partition(":")[0] for problem in growth.problems(found)] == ["decode"]


def test_a_watch_looks_at_who_is_there():
    mine = Process("decode", "decode-0", "", None, [], {}, pid=os.getpgid(0), ready_s=1.0)
    starting = Process("decode", "decode-1", "", None, [], {}, pid=mine.pid)
    away: set[str] = set()
    watch = Watch([mine, starting], lambda: 7, lambda: away, every_s=0.02).start()
    end = time.monotonic() + 20
    while len(watch.samples) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    away.add("decode-0")
    time.sleep(0.2)
    seen = len(watch.samples)
    time.sleep(0.2)
    samples = watch.stop()
    assert seen >= 3 and len(samples) <= seen + 1
    assert {(s.worker, s.life, s.asked) for s in samples} == {("decode-0", mine.pid, 7)}
    assert all(s.descriptors > 3 and s.rss_kib > 1000 and s.threads > 0 for s in samples)
