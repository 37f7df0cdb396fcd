"""`pd-radix bench --slo`: promises, arrivals by a clock, and the search for a rate, on a server that is a formula."""

from __future__ import annotations

import dataclasses
import heapq
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.bench import command, deploy, goodput, measure, parted, workload
from sglang_pd_radix.tools.bench.rates import PRECISION, Search, Trial

TOKENS = workload.Tokens(range(400, 1900), 0)
SHOW = SimpleNamespace(now=lambda text: None, done=lambda text: None)
SLO = goodput.Slo(2.0, 0.03)


def trial(rate, kept, requests=100):
    return Trial(rate, requests, kept, rate, 0.1, 0.2, 0.01, 0.02)


def made(key="e", **sizes):
    return dataclasses.replace(workload.KINDS[key](), **sizes).make(key, TOKENS)


# ---- promises ----


def test_a_promise():
    slo = goodput.Slo.parse("itl=30,ttft=500")
    assert slo == goodput.Slo(0.5, 0.03) and str(slo) == "TTFT 500 ms, ITL 30 ms"
    assert slo.kept(0.5, 0.03) and not slo.kept(0.51, 0.03) and not slo.kept(0.5, 0.031)
    options = ("--disaggregation-decode-itl-target", "27", "--disaggregation-decode-ttft-target", "450")
    assert slo.side == deploy.Side("target", True, options)


@pytest.mark.parametrize("text", ["", "ttft=5", "ttft=5,itl=x", "ttft=5,itl=0", "ttft=5,itl=nan", "ttft=5,itl=1,p=2"])
def test_no_promise(text):
    with pytest.raises(PdRadixError, match="--slo"):
        goodput.Slo.parse(text)


# ---- arrivals ----


@given(rate=st.floats(0.1, 500), seconds=st.floats(1, 60))
def test_requests_come_at_the_rate_and_wait_for_nobody(rate, seconds):
    asked = goodput.open_loop(made(requests=200, prompt=4), rate, seconds, TOKENS)
    (requests,) = asked.rounds
    times = [request.arrival_s for request in requests]
    assert times[0] == 0 and times == sorted(times) and asked.concurrency is None
    assert len(times) == min(200, max(goodput.LEAST_REQUESTS, math.ceil(rate * seconds)))
    assert times[-1] * rate == pytest.approx(len(times) - 1)


def test_arrivals_by_chance_are_the_same_for_all_and_not_even():
    asked = made(requests=200, prompt=4)
    slow, fast = (goodput.open_loop(asked, rate, 1000, TOKENS).rounds[0] for rate in (1, 10))
    assert [r.ids for r in slow] == [r.ids for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([10 * r.arrival_s for r in fast])
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(slow, slow[1:], strict=False)]
    # Of an exponential distribution as much as 1/e are above the mean, and the deviation is the mean.
    assert 0.28 < sum(gap > 1 for gap in gaps) / len(gaps) < 0.46


def test_a_trace_keeps_its_times_but_for_the_pace():
    asked = made("f", requests=40, speed=4.0)
    before = [r.arrival_s for r in asked.rounds[0]]
    after = [r.arrival_s for r in goodput.open_loop(asked, 7.0, 1000, TOKENS).rounds[0]]
    factor = after[-1] / before[-1]
    assert after == pytest.approx([factor * at for at in before]) and after[-1] * 7 == pytest.approx(39)


def test_rounds_become_one_and_a_chat_has_no_rate():
    asked = goodput.open_loop(made("aw", requests=20, prefixes=4, at_once=2), 1000, 10, TOKENS)
    assert len(asked.rounds) == 1 and asked.requests == 20 and [len(warm) for warm in asked.warm] == [4]
    with pytest.raises(PdRadixError, match="chat"):
        goodput.open_loop(made("c"), 1, 1, TOKENS)


# ---- a server ----


def one_by_one(per_s):
    """A server that answers so many requests a second, one after the other."""

    def run_once(deployment, load, asked, variant, number, page_size):
        (requests,) = asked.rounds
        free, ttft = 0.0, []
        for request in requests:
            free = max(free, request.arrival_s) + 1 / per_s
            ttft.append(free - request.arrival_s)
        figures = {"requests_per_s": len(requests) / free}
        itl = [0.01] * len(ttft)
        return measure.Run(variant.name, number, figures, [], ttft, [], [], tpot_s=itl)

    return run_once


def measured_alone(monkeypatch, run_once, asked, seconds=30.0):
    monkeypatch.setattr(goodput, "run_once", run_once)
    made_of = deploy.variants([deploy.OFF])
    deployment = SimpleNamespace(variants=made_of)
    return goodput.measure(deployment, None, asked, goodput.Plan(SLO, seconds), TOKENS, 16, SHOW, exact=True)


@pytest.mark.parametrize("requests, seconds", [(80, 30), (1000, 30), (4000, 30), (4000, 2)])
def test_a_burst_that_is_over_before_its_queue_costs_anything_is_no_rate(requests, seconds, monkeypatch):
    """80 requests at 1024/s are asked within the TTFT that is promised, whatever comes after them."""
    found = measured_alone(monkeypatch, one_by_one(40.0), made(requests=requests, prompt=4), seconds)
    (row,) = goodput.table(found)[1]
    if requests == 80:
        most = 79 / (8 * SLO.ttft_s)
        assert found["goodput"]["off"] == {"0.9": most, "0.99": None} and row[1] == "at least 4.94"
        assert row[4:] == ["fewer than 100 requests", "", ""]
        # One request takes 25 ms, and 10 ms a token.
        assert 25 <= float(row[2]) < 100 and row[3] == "10.0"
        # Nothing is wrong: it is told, and does not fail.
        note, why = found["notes"]
        assert why.startswith("off: of 99% nothing is known") and "--slo-seconds" in why
        assert "too few requests for 16 s" in note and "--set e.requests=" in note and not found["problems"]
        assert f"- Note: {note}" in goodput.markdown({"setting": {}, "workloads": [found]})
    else:
        assert 30 < found["goodput"]["off"]["0.9"] < 40 * PRECISION and not found["problems"]
        assert "at least" not in row[1]


def test_a_workload_without_requests_for_any_rate(monkeypatch):
    found = measured_alone(monkeypatch, one_by_one(40.0), made(requests=1, prompt=4))
    assert found["trials"] == {"off": []} and "too few requests" in found["problems"][0]
    assert goodput.table(found)[1] == [["off", "not measured", "", "", "not measured", "", ""]]


def serve(requests, slots, fixed=0.01, per_request=0.001, prefill=0.02):
    """Times to the first token and between the others, of a server with ``slots`` places and a step that grows."""
    waiting, running, times = list(requests), [], {}
    now, ready = 0.0, 0.0
    while waiting or running:
        while waiting and waiting[0].arrival_s <= now and len(running) < slots:
            request = waiting.pop(0)
            ready = max(ready, now) + prefill
            heapq.heappush(running, (ready, id(request), request))
            times[id(request)] = [ready]
        decoding = [entry for entry in running if entry[0] <= now]
        if not decoding:
            comes = [request.arrival_s for request in waiting[:1] if len(running) < slots]
            now = min(comes + [entry[0] for entry in running[:1]])
            continue
        now += fixed + per_request * len(decoding)
        for entry in decoding:
            times[id(entry[2])].append(now)
            if len(times[id(entry[2])]) >= entry[2].answer:
                running.remove(entry)
        heapq.heapify(running)
    found = [times[id(request)] for request in requests]
    ttft = [at[0] - request.arrival_s for at, request in zip(found, requests, strict=True)]
    return ttft, [(at[-1] - at[0]) / (len(at) - 1) for at in found], max(at[-1] for at in found)


class Served:
    """`goodput.measure` over sides of which each has its places; with the target as many as keep 30 ms."""

    slots = {"off": 4, "on": 64, "target": 18, "aggregated": 18}

    def __init__(self, monkeypatch, sides=(deploy.OFF, deploy.ON, SLO.side)):
        monkeypatch.setattr(goodput, "run_once", self.run_once)
        made_of = deploy.variants(sides)
        self.deployment = SimpleNamespace(variants=made_of)
        self.problems = []

    def run_once(self, deployment, load, asked, variant, number, page_size):
        (requests,) = asked.rounds
        ttft, itl, ended = serve(requests, self.slots[variant.name])
        figures = {"requests_per_s": len(requests) / ended}
        return measure.Run(variant.name, number, figures, [], ttft, [], [], problems=self.problems, tpot_s=itl)

    def measure(self, exact=True, rates=(), requests=400):
        asked = made(requests=requests, prompt=4, answer=40)
        return goodput.measure(
            self.deployment, None, asked, goodput.Plan(SLO, 20.0, rates=rates), TOKENS, 16, SHOW, exact
        )


def test_the_goodput_of_three_sides(monkeypatch):
    """4 places of 40 tokens at 14 ms make 7 requests a second; 64 of 74 ms break the promise, 18 of 28 ms do not."""
    found = Served(monkeypatch).measure()
    at_90 = {name: rates["0.9"] for name, rates in found["goodput"].items()}
    assert 4 < at_90["off"] < 7.5
    assert at_90["target"] > 2 * at_90["off"] and at_90["target"] >= at_90["on"]
    assert all(rates["0.99"] <= rates["0.9"] for rates in found["goodput"].values())
    assert found["problems"] == []


def test_rates_that_are_given_are_those_measured(monkeypatch):
    asked = [("off", 2.0), ("target", 8.0), ("off", 1.0), ("off", 16.0)]
    found = Served(monkeypatch).measure(rates=asked)
    rates = {name: [t["rate"] for t in trials] for name, trials in found["trials"].items()}
    assert rates == {"off": [2.0, 1.0, 16.0], "on": [], "target": [8.0]}
    assert [share["0.9"] for share in found["goodput"].values()] == [2.0, None, 8.0]
    assert any("rates were given" in note for note in found["notes"]) and not found["problems"]
    # Of off a rate is known that is too high.
    assert [row[1] for row in goodput.table(found)[1]] == ["2.00 to below 16", "not measured", "at least 8.00"]
    searched = Served(monkeypatch).measure()
    assert not any("rates were given" in note for note in searched["notes"])
    # To the precision of the search it is known.
    assert not any("to below" in cell for row in goodput.table(searched)[1] for cell in row)


def test_a_rate_that_is_given_and_has_too_few_requests_is_told(monkeypatch):
    """160 s at 2 requests/s are 320; it may be kept only because fewer came."""
    notes = Served(monkeypatch).measure(rates=[("off", 2.0)], requests=30)["notes"]
    assert any("too few requests" in note for note in notes)


def answering(run_once, word):
    """``run_once`` with an answer to each request, which begins with the ``word`` of its side and the run's number."""

    def run(deployment, load, asked, variant, number, page_size):
        found = run_once(deployment, load, asked, variant, number, page_size)
        (requests,) = asked.rounds
        texts = [f"{word(variant.name, number)} {i}" for i in range(len(requests))]
        return dataclasses.replace(found, texts=texts, prompts=[request.ids for request in requests])

    return run


def test_answers_that_were_not_asked_for_again_are_a_note(monkeypatch):
    """More part than are asked for again, and all that were are explained."""

    def look(deployment, load, workload, partings, tell, most):
        assert most == parted.MOST_JUDGED
        looks = [parted._noted(parting, most) for parting in partings]
        for note in looks[:-3]:
            del note["why"]
            note |= {"token": 1, "tokens": [1, 2], "asked_again": {"on": {"token": 1, "logprobs": [-1.0, -1.0]}}}
        return looks

    served = Served(monkeypatch)
    monkeypatch.setattr(goodput, "run_once", answering(served.run_once, lambda name, number: name == "on"))
    monkeypatch.setattr(parted, "look", look)
    found = served.measure()
    assert not found["problems"] and "3 more answers part and were not asked for again" in found["notes"]


def noted(partings):
    """What `parted.look` makes of them where asking again shows that it is no rounding."""
    asked_again = {"on": {"token": 5, "logprobs": [-1.0, -3.0]}}
    told = {"prompt_tokens": 4, "token": 1, "asked_again": asked_again, "why": "the others are not"}
    return [{**told, "request": p.number, "first": list(p.first), "seen": [list(s) for s in p.seen]} for p in partings]


@pytest.mark.parametrize("word", [lambda name, number: name == "on", lambda name, number: name == "off" and number > 1])
def test_answers_that_are_not_the_same_at_all_rates_fail(word, monkeypatch):
    """Of a side, or of one rate: request i is the same everywhere."""
    served, looked = Served(monkeypatch), []
    monkeypatch.setattr(goodput, "run_once", answering(served.run_once, word))
    monkeypatch.setattr(parted, "look", lambda *a: looked.append(a[2].requests) or noted(a[3]))
    found = served.measure()
    assert looked == [400] and len(found["differences"]) >= goodput.LEAST_REQUESTS
    assert len(found["problems"]) == parted.MOST_LOOKED_AT + 1 and "more answers, to" in found["problems"][-1]
    name = "on run 1" if word("on", 1) else "off run 2"
    assert found["problems"][0].startswith("answers are not identical: request 1 (4 tokens): the answer of " + name)
    assert "parts from that of off run 1 at token 1" in found["problems"][0]
    assert f"FAILED: {found['problems'][0]}" in goodput.markdown({"setting": {}, "workloads": [found]})
    # Where a type rounds they part, and nobody asks.
    rounds = served.measure(exact=False)
    assert len(looked) == 1 and rounds["problems"] == rounds["differences"] == []
    assert "answers are not compared" in rounds["notes"][0]


def test_answers_that_are_the_same_are_not_asked_for_again(monkeypatch):
    served = Served(monkeypatch)
    # What warms a side up is not measured, nor compared.
    monkeypatch.setattr(goodput, "run_once", answering(served.run_once, lambda name, number: number > 0))
    monkeypatch.setattr(parted, "look", lambda *a: pytest.fail("nothing parts"))
    found = served.measure()
    assert found["problems"] == found["differences"] == found["notes"] == []


def test_answers_that_cannot_be_asked_for_again_fail_all_the_same(monkeypatch):
    served = Served(monkeypatch)
    monkeypatch.setattr(goodput, "run_once", answering(served.run_once, lambda name, number: name))

    def look(*args):
        raise PdRadixError("decode-1 has ended")

    monkeypatch.setattr(parted, "look", look)
    (problem,) = served.measure()["problems"]
    assert "requests are not identical, and could not be asked for again: decode-1 has ended" in problem


def failing(run_once, fails):
    """``run_once``, of which a request fails where ``fails`` says so of the side, the run's number and the rate."""

    def run(deployment, load, asked, variant, number, page_size):
        (requests,) = asked.rounds
        if fails(variant.name, number, (len(requests) - 1) / requests[-1].arrival_s):
            raise measure.RequestFailed("request 7 of 20 failed: Service Unavailable")
        return run_once(deployment, load, asked, variant, number, page_size)

    return run


def test_a_request_that_fails_ends_the_search_of_its_side_alone(monkeypatch):
    served = Served(monkeypatch)
    whole = served.measure()
    fails = failing(served.run_once, lambda name, number, rate: number > 0 and name == "on" and rate > 10)
    monkeypatch.setattr(goodput, "run_once", fails)
    found = served.measure()
    assert [t["rate"] for t in found["trials"]["on"]] == [8] and found["goodput"]["on"] == {"0.9": 8, "0.99": 8}
    assert [found["goodput"][name] == whole["goodput"][name] for name in ("off", "target")] == [True, True]
    assert goodput.table(found)[1][1][1] == "8.00 to below 16" and found["failed_at"] == {"on": 16}
    (problem,) = found["problems"]
    assert problem.startswith("on, 16 requests/s: request 7 of 20 failed: Service Unavailable")
    assert problem in goodput.markdown({"setting": {}, "workloads": [found]})


def test_refused_requests_are_not_kept(monkeypatch):
    side = deploy.Side.parse("refuse", "--disaggregation-decode-ttft-target 2000,refuse")
    served = Served(monkeypatch, (deploy.OFF, side))
    monkeypatch.setitem(served.slots, "refuse", 64)
    assert [one.refuses for one in served.deployment.variants] == [False, True]

    def half_refused(*args):
        run = served.run_once(*args)
        half = slice(len(run.ttft_s) // 2)
        return dataclasses.replace(run, ttft_s=run.ttft_s[half], tpot_s=run.tpot_s[half], refused=len(run.ttft_s[half]))

    monkeypatch.setattr(goodput, "run_once", half_refused)
    found = served.measure(rates=[("refuse", 2.0)])
    (seen,) = found["trials"]["refuse"]
    assert seen["requests"] == 2 * seen["refused"] and seen["kept"] == 0.5
    assert "50% of 40 requests within both (1.00/s), 50% refused" in goodput.markdown(
        {"setting": {}, "workloads": [found]}
    )


def test_a_side_that_serves_nothing_leaves_the_others(monkeypatch):
    served = Served(monkeypatch)
    monkeypatch.setattr(goodput, "run_once", failing(served.run_once, lambda name, number, rate: name == "on"))
    found = served.measure()
    assert found["trials"]["on"] == [] and found["goodput"]["off"]["0.9"]
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["on, warming up"]
    monkeypatch.setattr(goodput, "run_once", failing(served.run_once, lambda *_: True))
    nothing = served.measure()
    assert len(nothing["problems"]) == 3
    assert "FAILED: on, warming up" in goodput.markdown({"setting": {}, "workloads": [nothing]})


def test_a_load_generator_that_ends_says_nothing_of_a_side(monkeypatch):
    served = Served(monkeypatch)

    def ends(*args):
        if args[4] > 0 and args[3].name == "on":
            raise PdRadixError("the load generator ended")
        return served.run_once(*args)

    monkeypatch.setattr(goodput, "run_once", ends)
    found = served.measure()
    assert found["trials"]["on"] == [] and "the load generator ended" in found["problems"][0]
    # Not "below" a rate at which it was asked nothing.
    assert not found["failed_at"] and goodput.table(found)[1][1][1] == "not measured"


def test_the_report_says_all_of_it(monkeypatch):
    served = Served(monkeypatch)
    served.problems = ["decode-0 holds 3 tokens"]
    found = served.measure()
    document = {"setting": {"command": "pd-radix bench --slo", "model": "m"}, "workloads": [found]}
    text = goodput.markdown(document)
    for name in ("off", "on", "target"):
        assert f"| {name} | {found['goodput'][name]['0.9']:.2f} |" in text
    assert "FAILED: off, " in text and "holds 3 tokens" in text


def test_a_rate_at_which_a_request_failed_is_too_high(monkeypatch):
    """Whatever was measured before it, and of what was asked for after it nothing is known."""
    served = Served(monkeypatch)
    monkeypatch.setattr(
        goodput, "run_once", failing(served.run_once, lambda name, number, rate: number and 3 < rate < 5)
    )
    given = [("on", 2.0), ("on", 8.0), ("on", 4.0), ("on", 3.9), ("off", 4.0)]
    found = served.measure(rates=given)
    assert found["failed_at"] == {"on": 4.0, "off": 4.0}
    assert [row[1] for row in goodput.table(found)[1]] == ["below 4", "2.00 to below 4", "not measured"]
    assert found["goodput"]["on"]["0.9"] == 2.0


def test_of_few_requests_the_column_of_99_percent_is_empty_and_says_why():
    search = Search()
    for one in (trial(2.0, 1.0, 60), trial(4.0, 0.98, 99), trial(5.0, 0.5, 150)):
        search.told(one)
    entry = goodput.entry_of(made(requests=20, prompt=4), SLO, {"on": search}, [])
    (row,) = goodput.table(entry)[1]
    assert (row[1], row[4]) == ("4.00 to below 5", "below 5") and entry["goodput"]["on"]["0.99"] is None
    search.trials.pop()
    entry = goodput.entry_of(made(requests=20, prompt=4), SLO, {"on": search}, [])
    (row,) = goodput.table(entry)[1]
    assert (row[1], row[4:]) == ("at least 4.00", ["fewer than 100 requests", "", ""])
    search.told(trial(4.5, 1.0))
    assert goodput.table(goodput.entry_of(made(requests=20, prompt=4), SLO, {"on": search}, []))[1][0][4] == (
        "at least 4.50"
    )


# ---- a load generator that is late ----


def sending(per_s, server):
    """``server`` behind a load generator that sends at most so many requests a second, and takes TTFT from then on."""

    def run_once(deployment, load, asked, *more):
        (requests,) = asked.rounds
        free, sent = 0.0, []
        for request in requests:
            free = max(free, request.arrival_s)
            sent.append(dataclasses.replace(request, arrival_s=free))
            free += 1 / per_s
        run = server(deployment, load, dataclasses.replace(asked, rounds=[sent]), *more)
        return dataclasses.replace(run, late_s=[b.arrival_s - a.arrival_s for a, b in zip(requests, sent, strict=True)])

    return run_once


def test_a_rate_that_was_not_sent_is_not_kept(monkeypatch):
    asked = made(requests=4000, prompt=4)
    found = measured_alone(monkeypatch, sending(50.0, one_by_one(100.0)), asked)
    # Late by a fiftieth of a second where two come at once, and by ever more above 50/s.
    assert 40 < found["goodput"]["off"]["0.9"] < 50 * PRECISION
    (note,) = found["notes"]
    assert "the load generator sent a tenth of them later than by" in note and "200 are allowed" in note
    assert not found["problems"]
    late = [t for t in found["trials"]["off"] if not t["on_time"]]
    assert late and all(t["kept"] == 1 for t in late) and min(t["rate"] for t in late) > 40
    assert "sent too late: by " in goodput.markdown({"setting": {}, "workloads": [found]})
    # One that is fast enough, or late by less than matters.
    fast = measured_alone(monkeypatch, sending(500.0, one_by_one(100.0)), asked)
    assert fast["problems"] == fast["notes"] == []


def test_how_late_requests_are_sent():
    def told(due, start):
        output = {"tokens": 2, "text": "x", "start_s": start, "ttft_s": 0.1, "latency_s": 0.2, "itl_s": [0.1]}
        return measure.Asked.of(workload.Request((1, 2), 2, arrival_s=due), [1, 2], output)

    late = measure.sent_late([told(1.5, 101.5), told(1.0, 101.0), told(None, 150.0), told(2.0, 102.25)])
    assert late == [0.0, 0.0, 0.25] and measure.sent_late([told(None, 1.0)]) == []


# ---- options ----


def options(*given):
    return cli.build_parser("bench").parse_args(["bench", *given])


def test_what_does_not_go_with_it():
    for more in (["--slo-seconds", "0"], ["--breakdown"]):
        with pytest.raises(PdRadixError, match="--slo"):
            command.run(options("--slo", "ttft=500,itl=30", *more))
