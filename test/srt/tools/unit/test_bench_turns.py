"""`pd-radix bench`: which side goes first, and what becomes of answers that are not the same. No server is started."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import forced
from sglang_pd_radix.tools.bench import deploy, measure, parted, report, turns, workload

SHOW = SimpleNamespace(now=lambda text: None, done=lambda text: None)


def a_workload(requests=3, answer=3):
    sizes = dataclasses.replace(workload.Distinct(), requests=requests, prompt=4, answer=answer)
    return sizes.make("e", workload.Tokens(range(400, 1900), 0))


def a_run(variant, number, texts, prompts=None):
    figures = dict.fromkeys([*(f.key for f in report.FIGURES), "reused_tokens", "prompt_tokens"], 1.0)
    figures |= {"sent_bytes": 100, "prompt_pages": 1, "least_pages": 1}
    given = prompts or [[n] for n in range(len(texts))]
    return measure.Run(variant, number, figures, [{}], [0.1], list(texts), given)


class Turns:
    """`turns.measure_all` with runs that are given: ``answers`` by side and number, else all alike."""

    def __init__(self, monkeypatch, answers=None, sides=("off", "on")):
        self.asked, self.told = [], answers or {}
        monkeypatch.setattr(turns, "run_once", self.run_once)
        made = deploy.variants([deploy.OFF, *map(deploy.Side, sides[1:])])
        self.deployment = SimpleNamespace(variants=made)

    def run_once(self, deployment, load, given, variant, number, page_size):
        self.asked.append((variant.name, number, given.requests))
        return a_run(variant.name, number, self.told.get((variant.name, number), ["x", "y", "z"]))

    def measure(self, runs, exact=True):
        return turns.measure_all(self.deployment, None, a_workload(40), runs, 16, SHOW, exact)


# ---- the order ----


@pytest.mark.parametrize("sides", [("off", "on"), ("off", "on", "other")])
def test_each_side_goes_first_in_every_other_run(monkeypatch, sides):
    made = Turns(monkeypatch, sides=sides)
    entry = made.measure(4)
    measured = [(name, number) for name, number, _ in made.asked if number]
    forth, back = list(sides), list(reversed(sides))
    expected = [(name, n) for n, names in enumerate((forth, back, forth, back), 1) for name in names]
    assert measured == expected
    assert [(run["variant"], run["number"]) for run in entry["runs"]] == expected
    assert [run["turn"] for run in entry["runs"]] == [*range(1, len(sides) + 1)] * 4
    for one in sides:
        for other in sides:
            first = [measured.index((one, n)) < measured.index((other, n)) for n in range(1, 5) if one != other]
            assert sum(first) in (0, 2) and (one == other or sum(first) == 2)


def test_every_side_is_warmed_up_alike(monkeypatch):
    made = Turns(monkeypatch, sides=("off", "on", "other"))
    made.measure(1)
    warm = [(name, asked) for name, number, asked in made.asked if number == 0]
    assert warm == [(name, turns.WARM_UP_REQUESTS) for name in ("off", "on", "other")]
    assert made.asked[:3] == [(name, 0, turns.WARM_UP_REQUESTS) for name, _ in warm], "before anything is measured"


# ---- answers that are not the same ----


def test_answers_that_differ_are_found_once_for_each_text():
    texts = [["a b", "c"], ["a b", "c"], ["a x", "c"], ["a x", "d"], ["a y", "c"]]
    order = (("off", 1), ("on", 1), ("on", 2), ("off", 2), ("on", 3))
    runs = [a_run(*which, given) for which, given in zip(order, texts, strict=True)]
    found = parted.find(runs)
    assert [(p.number, p.seen, p.texts) for p in found] == [
        (1, (("on", 2), ("off", 2)), ("a b", "a x")),
        (1, (("on", 3),), ("a b", "a y")),
        (2, (("off", 2),), ("c", "d")),
    ]
    assert found[0].first == ("off", 1) and found[2].prompt == [1]


def test_runs_of_fewer_requests_are_compared_as_far_as_they_go():
    """A request's answers are held against that of the first run that asked it."""
    runs = [a_run("off", 1, ["a"]), a_run("on", 1, ["a", "b", "c"]), a_run("off", 2, ["x", "y"])]
    assert [(p.number, p.first, p.seen, p.texts) for p in parted.find(runs)] == [
        (1, ("off", 1), (("off", 2),), ("a", "x")),
        (2, ("on", 1), (("off", 2),), ("b", "y")),
    ]


def test_what_follows_in_a_chat_on_an_answer_that_differs_is_left_out():
    one = a_run("off", 1, ["a", "b"], [[1], [1, 2]])
    other = a_run("on", 1, ["x", "y"], [[1], [1, 9]])
    assert [p.number for p in parted.find([one, other])] == [1]


class Again:
    """A deployment and a load generator for `parted.look`; ``logprobs`` says what each side's worker thinks."""

    def __init__(self, monkeypatch, logprobs, tokens=None, status=200):
        self.used, self.asked, self._logprobs = [], [], logprobs
        self._tokens, self._status = tokens, status
        monkeypatch.setattr(forced, "http", self.http)
        self.variants = deploy.variants()
        self.cluster = SimpleNamespace(check=lambda: None)

    def use(self, variant):
        self.used.append(variant.name)

    def url(self, variant):
        return variant.name

    def encode(self, texts):
        return [[ord(c) for c in text] for text in texts]

    def http(self, url, body, timeout):
        self.asked.append((url, body))
        side = url.partition("/")[0]
        count = body["sampling_params"]["max_new_tokens"]
        tokens = self._tokens or [ord(c) for c in "abxy"]
        meta = {
            "output_token_logprobs": [[-1.0, token, None] for token in tokens[:count]],
            "output_top_logprobs": [[[lp, token, None] for token, lp in self._logprobs[side].items()]] * count,
        }
        return self._status, json.dumps({"meta_info": meta}).encode()


def look(again, answer=4):
    partings = [parted.Parting(7, [1, 2, 3], ("off", 1), (("on", 2),), ("abcd", "abxd"))]
    said = []
    (note,) = parted.look(again, again, a_workload(7, answer), partings, said.append)
    return note, said


def test_both_tokens_are_asked_for_on_both_sides(monkeypatch):
    again = Again(
        monkeypatch,
        {"off": {ord("c"): -2.5, ord("x"): -2.500004}, "on": {ord("c"): -2.500001, ord("x"): -2.5}},
    )
    note, said = look(again)
    assert (note["request"], note["prompt_tokens"], note["token"]) == (7, 3, 3)
    assert note["tokens"] == [ord("c"), ord("x")] and note["seen"] == [["on", 2]]
    assert again.used == ["off", "on"] and [url for url, _ in again.asked] == ["off/generate", "on/generate"]
    for _, body in again.asked:
        assert body["input_ids"] == [1, 2, 3] and body["sampling_params"]["max_new_tokens"] == 3
    assert note["asked_again"]["off"]["logprobs"] == [-2.5, -2.500004]
    assert parted.apart(note) == pytest.approx(4e-6) and parted.explained(note) and not parted.problems([note])
    assert said == [f"(e) {parted.told(note)}"]
    assert "on run 2 parts from that of off run 1 at token 3" in said[0] and "4.0e-06 nats apart" in said[0]


@pytest.mark.parametrize(
    "on, tokens, says",
    [
        ({ord("c"): -1.0, ord("x"): -1.01}, None, "1.0e-02 nats apart"),
        ({ord("c"): -1.0}, None, "one of the two tokens is not among the 5 likeliest"),
        ({ord("c"): -1.0, ord("x"): -1.0}, [ord("a"), ord("q"), ord("x")], "another answer from token 2 on"),
    ],
)
def test_what_rounding_does_not_explain_fails(monkeypatch, on, tokens, says):
    again = Again(monkeypatch, {"off": {ord("c"): -1.0, ord("x"): -1.0}, "on": on}, tokens)
    note, _ = look(again)
    assert not parted.explained(note)
    (problem,) = parted.problems([note])
    assert says in problem and "request 7" in problem


def test_a_text_that_does_not_say_its_tokens_is_not_asked_for(monkeypatch):
    again = Again(monkeypatch, {})
    note, (said,) = look(again, answer=5)
    assert not again.asked and not parted.explained(note) and "cannot be read off its text" in said


def test_a_worker_that_does_not_answer_again_is_named(monkeypatch):
    with pytest.raises(PdRadixError, match="request 7, asked again on off: off/generate answered HTTP 500"):
        look(Again(monkeypatch, {"off": {}, "on": {}}, status=500))


def test_what_is_no_answer_when_asked_again_is_named(monkeypatch):
    again = Again(monkeypatch, {"off": {}, "on": {}})
    for reply in (b"<html>", b'{"error": "no worker"}', b'{"meta_info": {}}'):
        monkeypatch.setattr(forced, "http", lambda *a, reply=reply, **k: (200, reply))
        with pytest.raises(PdRadixError, match="request 7, asked again on off"):
            look(again)


def test_only_some_are_looked_at_and_the_others_are_told(monkeypatch):
    again = Again(monkeypatch, dict.fromkeys(("off", "on"), {ord("b"): -1.0, ord("x"): -1.0}))
    one = a_run("off", 1, ["ab"] * (parted.MOST_LOOKED_AT + 2))
    other = a_run("on", 1, ["ax"] * (parted.MOST_LOOKED_AT + 2))
    many = a_workload(parted.MOST_LOOKED_AT + 2, 2)
    said = []
    notes = parted.look(again, again, many, parted.find([one, other]), said.append)
    assert len(notes) == parted.MOST_LOOKED_AT + 2 and len(again.asked) == 2 * parted.MOST_LOOKED_AT
    assert [parted.explained(note) for note in notes] == [True] * parted.MOST_LOOKED_AT + [False] * 2
    assert "only the first 20 are asked for again" in parted.told(notes[-1])
    assert len(parted.left_out(notes)) == 2 and not parted.problems(notes), "all that was looked at is explained"
    notes[3]["asked_again"]["on"]["logprobs"] = [-1.0, -2.0]
    assert len(parted.problems(notes)) == 3, "then the others may be wrong as well"
    # In bfloat16 thousands part: those that are not looked at have one line together.
    assert len(said) == parted.MOST_LOOKED_AT + 1
    assert said[-1].endswith(
        "2 more answers, to 2 requests, are others than those of off run 1; only the first 20 are asked for again"
    )


def test_where_answers_are_judged_more_are_looked_at_and_not_told_one_by_one(monkeypatch):
    again = Again(monkeypatch, dict.fromkeys(("off", "on"), {ord("b"): -1.0, ord("x"): -1.0}))
    count, most = parted.MOST_LOOKED_AT + 5, parted.MOST_LOOKED_AT + 3
    runs, said = [a_run("off", 1, ["ab"] * count), a_run("on", 1, ["ax"] * count)], []
    notes = parted.look(again, again, a_workload(count, 2), parted.find(runs), said.append, most)
    assert sum(map(parted.explained, notes)) == most and len(parted.left_out(notes)) == 2
    assert len(said) == parted.MOST_LOOKED_AT + 1 and said[-1].endswith("; 3 of them were asked for again")


def test_the_run_is_named_only_where_all_others_are_held_against_it():
    """Request i is held against the first run that asked it: the later ones were asked by the second run on."""
    least = parted.MOST_LOOKED_AT
    runs = [
        a_run("off", 1, ["a"] * (least + 1)),
        a_run("on", 1, ["b"] * (least + 5)),
        a_run("off", 2, ["c"] * (least + 5)),
    ]
    looks = [parted._noted(parting, least) for parting in parted.find(runs)]
    assert {tuple(note["first"]) for note in looks[least:]} == {("off", 1), ("on", 1)}
    assert " are others than those first given; " in parted.sentences(looks)[-1]


@pytest.mark.parametrize("exact, apart, problems", [(True, 1e-6, 0), (True, 0.1, 1), (False, 0.1, 0)])
def test_the_report_of_a_workload_has_what_was_looked_at(monkeypatch, exact, apart, problems):
    made = Turns(monkeypatch, {("on", 2): ["x", "b", "z"]})
    note = {
        "request": 2,
        "prompt_tokens": 4,
        "first": ["off", 1],
        "seen": [["on", 2]],
        "token": 1,
        "asked_again": {"on": {"token": 5, "logprobs": [-1.0, -1.0 - apart]}},
    }
    monkeypatch.setattr(parted, "look", lambda *a: [note] if [p.number for p in a[3]] == [2] else math.nan)
    entry = made.measure(2, exact)
    assert entry["differences"] == [note] and len(entry["problems"]) == problems
    assert [run["different_answers"] for run in entry["runs"]] == [0, 0, 1, 0]
    assert report.answers(entry)[0] == "Answers identical in all runs: 159 of 160."
    assert "parts from that of off run 1 at token 1" in report.answers(entry)[1]
