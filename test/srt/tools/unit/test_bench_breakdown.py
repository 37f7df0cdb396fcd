"""`pd-radix bench --breakdown`: from what clients saw and workers remember to the tables. No server is started."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from bench_documents import a_document
from test_bench_turns import Turns

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import breakdown, measure, report, turns

# From the client's clock to Unix time.
UNIX = 1000.0


def asked(rid: str | None, ttft_s: float = 0.1, beside: bool = False) -> measure.Asked:
    return measure.Asked([1, 2], 2, "x", 5.0, ttft_s, 0.2, [0.1], beside, rid=rid, unix_s=UNIX)


def record(rid: str, role: str, computed: int | None = None, retractions: int = 0, **ms: float) -> dict:
    """A worker's record: its stamps as ms since the client has sent the request."""
    details = {"decode_prefix": 8} | ({} if computed is None else {"decode_computed": computed})
    return {
        "rid": rid, "room": 7, "role": role, "retractions": retractions, "finish_reason": {"type": "length"},
        "prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 0,
        "cached_tokens_details": details if role == "decode" else None,
        "times": {stage: UNIX + 5.0 + at / 1e3 for stage, at in ms.items()},
    }  # fmt: skip


def sent_by_prefill(rid: str) -> list[dict]:
    return [
        record(
            rid, "decode", received=1, tokenized=2, scheduled=4, handshake_done=7, admitted=11, waiting=70, running=72,
            first_token_taken=73, first_output=80, handed_out=82, answered=200,
        ),
        record(
            rid, "prefill", received=1.5, tokenized=2, scheduled=3, handshake_done=12, waiting=12.5, running=20,
            launched=30, prefilled=60, sending=61, sent=68, answered=95,
        ),
    ]  # fmt: skip


def computed_here(rid: str) -> list[dict]:
    return [
        record(
            rid, "decode", computed=5, received=1, tokenized=2, scheduled=4, handshake_done=7, admitted=11, waiting=12,
            running=20, launched=21, prefilled=60, first_output=65,
        ),
        record(rid, "prefill", received=1.5, tokenized=2, answered=15),
    ]  # fmt: skip


def of_aggregated(rid: str) -> list[dict]:
    times = {"received": 1, "tokenized": 2, "scheduled": 4, "waiting": 5, "running": 20, "launched": 21}
    return [record(rid, "aggregated", **times, prefilled=60, first_output=65)]


def run(variant: str, number: int, lives: list[dict]) -> SimpleNamespace:
    return SimpleNamespace(variant=variant, number=number, lives=lives)


def stages_of(records: list[dict]) -> dict[str, float]:
    """Milliseconds by stage, of one request of which workers remember ``records``."""
    (group,) = breakdown.of([run("on", 1, breakdown.join([asked("a")], records, [1]))])["breakdown"]["groups"]
    return {name: figures["p50_ms"] for name, figures in group["stages"].items()}


# ---- from records to stages ----


def test_stages_of_a_request_that_prefill_sends():
    found = stages_of(sent_by_prefill("a"))
    assert found == {
        "gateway in: client → decode": 1,
        "decode: tokenized": 1,
        "decode: to its scheduler": 2,
        "decode: handshake": 3,
        "decode: queue, until admitted": 4,
        "decode: admitted → its KV has arrived": 59,
        "decode: KV arrived → in a batch": 2,
        "decode: in a batch → first token ready": 8,
        "gateway in: client → prefill": 1.5,
        "prefill: tokenized": 0.5,
        "prefill: to its scheduler": 1,
        "prefill: handshake, until decode has asked": 9,
        "prefill: asked → in its queue": 0.5,
        "prefill: queue, until a step": 7.5,
        "prefill: prepared, and earlier steps": 10,
        "prefill: compute, last step": 30,
        "prefill: computed → KV sent": 8,
        "prefill: KV sent → response": 27,
        "prefill: computed → response": 35,
        "decode admits it → prefill knows": 1,
        "prefill has computed it → decode has its KV": 10,
        "prefill's response after decode's first token": 15,
        "gateway out: first token ready → client": 20,
        "of that, until its HTTP server sends it": 2,
        "of that, after both workers' answers": 5,
        "total (TTFT)": 100,
    }  # fmt: skip


@pytest.mark.parametrize("made", [sent_by_prefill, computed_here, of_aggregated])
def test_stages_of_one_worker_are_the_whole_time(made):
    """Of the worker that has the first token, no moment is counted twice or left out."""
    role = made("a")[0]["role"]
    found = stages_of(made("a"))
    ours = [ms for name, ms in found.items() if name.startswith((f"{role}: ", f"gateway in: client → {role}"))]
    assert sum(ours) + found["gateway out: first token ready → client"] == pytest.approx(100)


def test_a_request_that_decode_computes():
    found = stages_of(computed_here("a"))
    assert found["decode admits it → prefill's response"] == 4
    assert found["prefill's response after decode's first token"] == -50
    assert found["of that, after both workers' answers"] == 35
    assert "prefill: handshake, until decode has asked" not in found and found["decode: queue, until a step"] == 8


def test_a_stamp_that_is_missing_leaves_out_its_stages():
    records = sent_by_prefill("a")
    del records[0]["times"]["handshake_done"], records[1]["times"]["launched"]
    lives = breakdown.join([asked("a"), asked("b")], [*records, *sent_by_prefill("b")], [1, 1])
    (group,) = breakdown.of([run("on", 1, lives)])["breakdown"]["groups"]
    counts = {name: figures["requests"] for name, figures in group["stages"].items()}
    assert group["requests"] == 2 and counts["total (TTFT)"] == 2
    few = {name for name, count in counts.items() if count == 1}
    assert few == {
        "decode: handshake",
        "decode: queue, until admitted",
        "prefill: prepared, and earlier steps",
        "prefill: compute, last step",
    }
    # A prefill that is a release without the package has no record at all.
    assert "prefill: compute, last step" not in stages_of(sent_by_prefill("a")[:1])


def test_requests_without_stages_are_counted():
    retracted = [{**one, "retractions": 1} for one in sent_by_prefill("b")]
    given = [asked("a"), asked("b"), asked("gone"), asked("beside", beside=True)]
    lives = breakdown.join(given, [*sent_by_prefill("a"), *retracted, *sent_by_prefill("beside")], [1, 1, 2, 2])
    found = breakdown.of([run("on", 1, lives)])
    assert [group["requests"] for group in found["breakdown"]["groups"]] == [1]
    assert breakdown.notes(found) == [
        "Stages leave out 1 of 3 requests of on: workers remember no record of it.",
        "Stages leave out 1 of 3 requests of on: it was retracted.",
    ]


def test_of_a_request_that_was_sent_again_the_last_record_counts():
    again = record("a", "decode", received=50)
    (life,) = breakdown.join([asked("a")], [again, *sent_by_prefill("a")], [1])
    assert life["times"]["decode.received"] == again["times"]["received"]


# ---- a run ----


def deployment(monkeypatch, records: list[dict] | None) -> SimpleNamespace:
    """Whose workers remember these; None: of which nobody answers."""

    def ask(urls, question):
        found.asked.append((urls, question))
        if records is None:
            raise PdRadixError("no worker remembers requests")
        return records, {}

    found = SimpleNamespace(worker_urls=lambda variant: [f"http://{variant}"], asked=[])
    monkeypatch.setattr(breakdown, "ask", ask)
    return found


CHAT = SimpleNamespace(requests=4, chat=True, rounds=[["a", "b"], ["a", "b"]], warm=[["w"]])


def test_workers_are_asked_for_all_requests_of_a_run_at_once(monkeypatch):
    here = deployment(monkeypatch, sent_by_prefill("a"))
    lives = breakdown.collect(here, "on", CHAT, [asked(rid) for rid in "abcd"])
    assert here.asked == [(["http://on"], {"last": 5})]
    assert [(life["turn"], life["kind"]) for life in lives] == [
        (1, breakdown.SENT), (1, breakdown.LOST), (2, breakdown.LOST), (2, breakdown.LOST)
    ]  # fmt: skip


def test_without_rids_nobody_is_asked(monkeypatch):
    here = deployment(monkeypatch, [])
    assert breakdown.collect(here, "on", CHAT, [asked(None)] * 4) == [] and here.asked == []
    assert breakdown.of([run("on", 1, [])]) == {}


def test_workers_that_remember_nothing_fail_no_run(monkeypatch):
    lives = breakdown.collect(deployment(monkeypatch, None), "on", CHAT, [asked(rid) for rid in "abcd"])
    assert {life["kind"] for life in lives} == {breakdown.LOST}


# ---- the report ----


def test_the_report_has_the_tables():
    off = breakdown.join([asked("a"), asked("b", 0.3)], sent_by_prefill("a") + sent_by_prefill("b"), [1, 2])
    on = breakdown.join([asked("a"), asked("b", 0.2)], sent_by_prefill("a") + computed_here("b"), [1, 2])
    document = a_document(chat=True, **breakdown.of([run("off", 1, off), run("on", 1, on)]))
    (entry,) = document["workloads"]
    (first, _, _), (later, heading, rows) = breakdown.tables(entry)
    assert first == "Stages until the first token, first turns: p50 / p99, ms" and "turns 2 and later" in later
    assert heading == ["stage", "off: KV from prefill (1)", "on: computed on decode (1)"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["total (TTFT)"] == ["300.0 / –", "200.0 / –"]
    assert by_name["decode: admitted → its KV has arrived"] == ["59.0 / –", "–"]
    text = report.markdown(document)
    assert f"**{later}**" in text and text.count("a p99 needs at least 100 values") == 1
    assert json.loads(report.as_json(document))["workloads"][0]["breakdown"]["groups"]
    many = breakdown.join(
        [asked(str(n)) for n in range(100)], sum(map(sent_by_prefill, map(str, range(100))), []), [2] * 100
    )
    ((_, _, rows),) = breakdown.tables(breakdown.of([run("off", 1, many)]))
    assert dict(map(tuple, rows))["total (TTFT)"] == "100.0 / 100.0"


def test_without_figures_a_report_has_no_tables():
    document = a_document()
    assert breakdown.tables(document["workloads"][0]) == [] == breakdown.notes(document["workloads"][0])
    assert "Stages" not in report.markdown(document) and "breakdown" not in report.as_json(document)


def test_an_entry_has_what_all_runs_remember(monkeypatch):
    made = Turns(monkeypatch)

    def run_once(*args):
        found = made.run_once(*args)
        return dataclasses.replace(found, lives=breakdown.join([asked("a")], of_aggregated("a"), [None]))

    monkeypatch.setattr(turns, "run_once", run_once)
    groups = made.measure(2)["breakdown"]["groups"]
    assert [(group["side"], group["turns"], group["requests"]) for group in groups] == [
        ("off", "all requests", 2),
        ("on", "all requests", 2),
    ]
