"""The verdicts of `benchmark/faults` on storms that are made up: what each finds, and what it lets pass."""

from __future__ import annotations

import dataclasses
import itertools
import random
import socket
from types import SimpleNamespace

import pytest
from faults import blame, books, deploy, judge, truth
from faults.blame import Window
from faults.deploy import Done
from faults.schedule import Event, Shape, events
from faults.traffic import Ask, Told
from faults.truth import Truth

from sglang_pd_radix.errors import PdRadixError


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


def test_a_tree_that_holds_less_than_in_calm():
    asks = [Ask(tuple(range(100 * i, 100 * i + 40)), 4) for i in range(2)]

    def parts(*hits: int | None) -> dict[str, float]:
        answers = [told(ask=n % 2, worker="decode-0", hit=hit, ids=(1,)) for n, hit in enumerate(hits)]
        return judge.held_parts(answers, asks, ["decode-0", "decode-1"])

    calm = parts(0, 0, 32, 32)
    assert calm == {"decode-0": 0.4} and judge.held_problems("in calm", calm, {}) == []
    (found,) = judge.held_problems("in calm", parts(0, 0, 0, 0), {})
    assert found == "in calm: the tree of decode-0 held 0% of its prompts"
    assert judge.held_problems("after", {"decode-0": 0.3, "decode-1": 0.0001}, calm) == []
    for forgets in (parts(0, 0, 0, None), parts(0, 0, 32, 0)):
        (found,) = judge.held_problems("after", forgets, calm)
        assert found.startswith("after: the tree of decode-0 held ") and found.endswith("and 40% in calm")


def test_a_process_that_has_more_memory_than_before():
    before, after = (books.Books("decode-0", 1, rss_kib=kib) for kib in (500_000, 700_000))
    (found,) = judge.process_problems(before, after, 0)
    assert found == "decode-0: 488 MiB of memory before and 684 after"
    assert not judge.process_problems(before, dataclasses.replace(after, pid=2), 0), "another life has its own"


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
