"""`pd-radix trace`: what workers remember of a request that has ended, put together."""

from __future__ import annotations

import json

import pytest
from test_top import workers

from sglang_pd_radix.tools import cli, trace


def record(rid: str, role: str, **times: float) -> dict:
    return {
        "rid": rid, "room": 7, "role": role, "retractions": 0, "finish_reason": {"type": "length"}, "times": times,
        "prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 0,
        "cached_tokens_details": {"decode_prefix": 6, "transferred": 3} if role == "decode" else None,
    }  # fmt: skip


@pytest.fixture
def pair():
    with workers(2) as (prefill, decode):
        # Each has made a rid of its own.
        first = {"requests": [record("p", "prefill", received=100.0, running=100.25)]}
        second = {"requests": [record("d", "decode", received=100.001, admitted=100.5)]}
        for question in ("rid=p", "room=7"):
            prefill.answers[f"/ended_requests?{question}"] = first
        for question in ("rid=d", "room=7"):
            decode.answers[f"/ended_requests?{question}"] = second
        prefill.answers["/ended_requests?rid=d"] = decode.answers["/ended_requests?rid=p"] = {"requests": []}
        yield prefill, decode


@pytest.mark.parametrize("rid", ["p", "d"])
def test_both_workers_tell_in_the_order_of_time(pair, capsys, rid):
    prefill, decode = pair
    assert cli.main(["trace", rid, prefill.address, decode.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("p on prefill") and "decode held 6, 3 transferred; length" in lines[1]
    events = [line.split(None, 3) for line in lines[5:]]
    assert [event[0] for event in events] == ["0.0", "1.0", "250.0", "500.0"]
    assert [event[1] for event in events] == ["+0.0", "+1.0", "+249.0", "+250.0"]
    assert [event[2] for event in events] == ["prefill", "decode", "prefill", "decode"]
    assert "its prompt is being computed" in lines[7] and "it is matched and admitted" in lines[8]


def test_as_json(pair, capsys):
    prefill, decode = pair
    assert cli.main(["trace", "d", prefill.address, decode.address, "--json"]) == 0
    assert [one["worker"] for one in json.loads(capsys.readouterr().out)] == [prefill.address, decode.address]


def test_nobody_knows(pair, capsys):
    prefill, decode = pair
    prefill.answers["/ended_requests?rid=x"] = {"requests": []}
    assert cli.main(["trace", "x", prefill.address, decode.address]) == 1
    assert "no worker remembers x" in capsys.readouterr().err
    del prefill.answers["/ended_requests?rid=x"]
    assert cli.main(["trace", "x", prefill.address, "127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert f"{trace.VARIABLE} is not set there" in said and "does not answer" in said
    prefill.answers["/ended_requests?rid=x"] = "<html>log in</html>"
    assert cli.main(["trace", "x", prefill.address]) == 1
    assert "something else answers there" in capsys.readouterr().err


def test_who_could_not_be_asked_is_told(pair, capsys):
    prefill, decode = pair
    del decode.answers["/ended_requests?rid=p"]
    assert cli.main(["trace", "p", prefill.address, decode.address]) == 0
    said = capsys.readouterr()
    assert "p on prefill" in said.out and f"http://{decode.address}: {trace.VARIABLE} is not set there" in said.err
    assert cli.main(["trace", "d", prefill.address, decode.address]) == 0
    prefill.answers["/ended_requests?rid=x"] = {"requests": []}
    assert cli.main(["trace", "x", prefill.address, decode.address]) == 1
    assert "no worker remembers x: it still runs, or others have ended since" in (said := capsys.readouterr().err)
    assert f"http://{decode.address}: " in said


ODD = [
    {"role": None}, {"prompt_tokens": "gone"}, {"retractions": "gone"}, {"finish_reason": "length"}, {"room": [7]},
    {"times": {"received": None}}, {"times": {"received": 1e300}}, {"times": [1.0]}, {"cached_tokens_details": [1]},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_record_of_another_version_is_left_out(pair, capsys, odd):
    prefill, decode = pair
    for one in decode.answers["/ended_requests?room=7"]["requests"]:
        one |= odd
        for name in [name for name, value in odd.items() if value == "gone"]:
            del one[name]
    assert cli.main(["trace", "p", prefill.address, decode.address]) == 0
    said = capsys.readouterr()
    assert "p on prefill" in said.out and "on decode" not in said.out
    assert f"http://{decode.address}: something else answers there" in said.err


def test_a_terminal_gets_nothing_to_obey(pair, capsys):
    prefill, decode = pair
    (one,) = prefill.answers["/ended_requests?rid=p"]["requests"]
    one |= {"rid": "p\x1b]0;title\x07\n", "finish_reason": {"type": "abort", "message": "no\x1b[2Jway"}}
    one["times"]["received"] = 100.9996
    assert cli.main(["trace", "p", prefill.address, decode.address]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "\\x1b]0;title" in said and "00.1000" not in said
