"""Workload (i) of `pd-radix bench` with clients that send long prompts all the time. No server of the engine starts."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from types import SimpleNamespace

import pytest
from bench_documents import a_document, run_entry

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import asked, least, measure, report, steady, workload

TOKENS = workload.Tokens(range(400, 1900), 0)
SIZES = {"clients": 2, "turns": 3, "document": 9, "question": 4, "answer": 2, "others": 3, "prompt": 20, "steady": 1}


def make(**sizes):
    entry = dataclasses.replace(workload.BusyChat(), **{**SIZES, **sizes})
    entry.check("i")
    return entry.make("i", TOKENS)


# ---- what they ask ----


def test_the_others_ask_all_the_time_and_not_turn_by_turn():
    made = make()
    assert [[r.beside for r in turn] for turn in made.rounds] == [[False, False]] * 3 and made.concurrency == 2
    assert made.title == "chat: 2 clients, 3 turns, beside 3 clients that send prompts of 20 tokens"
    assert make(others=1).title.endswith("beside 1 client that sends prompts of 20 tokens")
    assert made.steady and made.steady.clients == 3 and made.beginning(16).steady == made.steady
    assert made.notes and not make(steady=0).notes
    assert make(steady=0).steady is None and make(steady=0).rounds[0][0].beside
    assert made.longest == 9 + 4 + 4 + 3 * 2 and make(prompt=50).longest == 52


def test_each_of_their_prompts_is_new_and_the_same_for_all_sides():
    one, other = make().steady, make().steady
    prompts = [one.prompt(client, number) for client in range(3) for number in range(5)]
    assert prompts == [other.prompt(client, number) for client in range(3) for number in range(5)]
    assert {len(prompt) for prompt in prompts} == {20} and len({prompt[:8] for prompt in prompts}) == 15
    again = dataclasses.replace(workload.BusyChat(), **SIZES).make("i", workload.Tokens(range(400, 1900), 1))
    assert again.steady.prompt(0, 0) != one.prompt(0, 0)


@pytest.mark.parametrize("value, said", [("2", "must be 0 or 1"), ("-1", "must be at least 0"), ("x", "takes int")])
def test_they_are_there_or_not(value, said):
    with pytest.raises(PdRadixError, match=said):
        workload.apply_settings({"i": workload.BusyChat()}, [f"i.steady={value}"])


# ---- how they ask ----


class Gateway:
    """Answers after 10 ms, or with what ``replies`` has for the n-th request of all."""

    def __init__(self, monkeypatch, replies=None, answer_s=0.01):
        self.seen, self.under_way, self._lock, self._replies = [], 0, threading.Lock(), replies or {}
        self._answer_s = answer_s
        monkeypatch.setattr(steady, "http", self.http)
        monkeypatch.setattr(steady, "AHEAD_S", 0.05)

    def http(self, url, body, timeout):
        with self._lock:
            self.under_way += 1
            self.seen.append((url, body))
            number = len(self.seen)
        time.sleep(self._answer_s)
        with self._lock:
            self.under_way -= 1
        good = 200, json.dumps({"text": "ab", "meta_info": {"completion_tokens": 2}}).encode()
        return self._replies.get(number, good)


def clients(check=lambda: None, **sizes):
    return steady.SteadyClients(make(**sizes).steady, "http://router", check)


def test_each_sends_its_next_prompt_when_the_last_is_answered(monkeypatch):
    gateway = Gateway(monkeypatch)
    with clients() as made:
        assert gateway.seen, "prefill is busy when the first turn begins"
        first = made.fresh()
        time.sleep(0.05)
        assert made.fresh() and gateway.under_way <= 3
        made.stop()
        assert not gateway.under_way and len(gateway.seen) == len(made.asked)
        assert len(first) < len(made.asked)
    (url, body), *_ = gateway.seen
    assert url == "http://router/generate" and "stream" not in body
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    sent = sorted(tuple(body["input_ids"]) for _, body in gateway.seen)
    assert len(set(sent)) == len(sent) and sorted(one.prompt for one in made.asked) == sent
    figures = made.figures()
    assert figures["steady_requests"] == len(sent) and 0.01 <= figures["steady_p50_s"] < 5
    assert figures["steady_per_s"] > 0
    count = len(gateway.seen)
    time.sleep(0.05)
    assert len(gateway.seen) == count, "they are gone"


@pytest.mark.parametrize(
    "reply, said",
    [
        ((503, b"no worker"), "HTTP 503: no worker"),
        ((0, b"connection refused"), "failed: connection refused"),
        ((200, b'{"meta_info": {"completion_tokens": 1}}'), "it got 1 tokens of 2: it was cut off"),
        ((200, b"<html>"), "it got 0 tokens of 2"),
    ],
)
def test_a_request_that_fails_fails_the_run(monkeypatch, reply, said):
    Gateway(monkeypatch, {2: reply})
    with clients() as made, pytest.raises(asked.RequestFailed, match=said):
        made.stop()
    with pytest.raises(asked.RequestFailed, match="a request of the steady clients failed: "):
        made.check()


def test_a_server_that_has_ended_is_told_while_they_are_waited_for(monkeypatch):
    Gateway(monkeypatch, answer_s=0.5)
    monkeypatch.setattr(steady, "GRACE_S", 0.01)

    def check():
        raise PdRadixError("prefill-0 died")

    with clients(check) as made, pytest.raises(PdRadixError, match="prefill-0 died"):
        made.stop()


# ---- a run beside them ----


class Deployment:
    """Workers that count all pages of what was asked, and a load generator whose turns take 0.1 s."""

    def __init__(self, gateway):
        self.gateway, self.told = gateway, []
        self.when_counted, self.ends = [], iter(range(10, 99))

    def check(self):
        pass

    def use(self, variant):
        pass

    def url(self, variant):
        return "http://router"

    def info(self, variant):
        return {"disable_overlap_schedule": False}

    def counters(self, variant):
        self.when_counted.append(self.gateway.under_way)
        names = ("prompt_tokens", "reused_tokens", "blocked", "prefill_cpu_s", "decode_cpu_s", "cpu_s")
        pages = sum(-(-len(body["input_ids"]) // 4) for _, body in self.gateway.seen)
        return dict.fromkeys(names, 6.0 * len(self.when_counted)) | {"sent_bytes": 100.0 * pages}

    def used_peak(self, variant):
        return 9.0

    def problems(self, variant):
        assert not self.gateway.under_way, "they are gone before the pools are looked at"
        return []

    def run(self, job, check):
        for _ in job["requests"]:
            time.sleep(0.05)
            check()
        start = next(self.ends)
        times = [{"start_s": start, "ttft_s": 0.1 * start, "latency_s": 0.1 * start + 1, "itl_s": [1.0]}]
        outputs = [{**times[0], "text": "ab", "ids": [7, 8], "tokens": 2, "error": None} for _ in job["requests"]]
        return {"outputs": outputs}


def run_beside(monkeypatch, gateway, **sizes):
    monkeypatch.setattr(measure, "Watch", lambda *a: SimpleNamespace(start=lambda: None, stop=lambda: []))
    made = Deployment(gateway)
    variant = SimpleNamespace(name="off", aggregated=False)
    return made, measure.run_once(made, made, make(**sizes), variant, 1, 4)


def test_they_ask_from_before_the_first_turn_until_the_last_is_answered(monkeypatch):
    gateway = Gateway(monkeypatch)
    made, run = run_beside(monkeypatch, gateway)
    assert made.when_counted[0] == made.when_counted[-1] == 0, "none before, and all answered after it"
    figures = run.figures
    count = figures["steady_requests"]
    assert count == len(gateway.seen) > 6
    # Requests/s, first tokens and answers are the chat's own.
    assert len(run.texts) == len(run.ttft_s) == 6 and figures["requests_per_s"] == 6 / sum(
        r["duration_s"] for r in run.rounds
    )
    assert figures["prefill_cpu_s"] == pytest.approx(6.0 * 3 / (6 + count))
    # Their pages are all sent, so a page has as many bytes as without them.
    own = least.pages_of([prompt for prompt in run.prompts], 4)
    assert figures["prompt_pages"] == own + 5 * count
    assert figures["sent_bytes"] == 500 * count
    assert figures["prompt_tokens"] == sum(map(len, run.prompts)), "of which a part is reused, and of theirs nothing"
    assert figures["first_ttft_p50_s"] == pytest.approx(1.0)
    assert figures["later_ttft_p50_s"] == pytest.approx(1.15) and math.isnan(figures["later_ttft_p99_s"])


def test_a_run_ends_with_what_one_of_them_says(monkeypatch):
    gateway = Gateway(monkeypatch, {5: (500, b"out of memory")})
    with pytest.raises(asked.RequestFailed, match="HTTP 500: out of memory"):
        run_beside(monkeypatch, gateway)


def test_without_them_a_run_has_no_figures_of_theirs(monkeypatch):
    _, run = run_beside(monkeypatch, Gateway(monkeypatch), steady=0)
    assert not [name for name in run.figures if name.startswith("steady")]
    assert {"first_ttft_p50_s", "later_ttft_p99_s"} <= run.figures.keys()
    assert run.figures["first_ttft_p50_s"] == pytest.approx(1.0), "of the clients' own, not of the others'"


def test_turns_are_told_apart():
    def one(ttft, beside=False):
        return asked.Asked([1], 2, "x", 0.0, ttft, ttft + 1, [1.0], beside)

    later = [one(9.0, True), *(one(n / 10) for n in range(100))]
    figures = measure.figures_of_turns([[one(9.0, True), one(1.0)], later[:50], later[50:]])
    assert (figures["first_ttft_p50_s"], figures["later_ttft_p50_s"]) == (1.0, pytest.approx(4.95))
    # Of 100 values there is a p99, of 1 there is none.
    assert figures["later_ttft_p99_s"] == pytest.approx(9.801) and math.isnan(figures["first_ttft_p99_s"])
    assert math.isnan(measure.figures_of_turns([[one(1.0)]])["later_ttft_p50_s"])


def test_the_report_says_how_many_were_answered():
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 6, 400)]
    for run in runs:
        run["figures"] |= {figure.key: 0.125 for figure in report.CHAT_FIGURES}
        run["figures"] |= {"steady_requests": 14.0, "steady_per_s": 0.5, "steady_p50_s": 2.5}
    document = a_document(True, runs=runs, key="i")
    text = report.markdown(document)
    assert "| long prompts beside, time p50, ms | 2500 | 2500 | 1.000 | 1.000 |" in text
    assert "| long prompts beside, answered | their time p50, ms |" in text and "| 14 | 2500 |" in text
    assert "long prompts beside" not in report.markdown(a_document(True))
    for run in runs:
        run["figures"]["later_ttft_p50_s"] = math.nan  # of a chat of one turn
    assert "| 125 (125) | – |" in report.markdown(a_document(True, runs=runs, key="i"))
