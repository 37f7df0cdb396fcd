"""`pd-radix trace`: what workers remember of a request that has ended, put together."""

from __future__ import annotations

import asyncio
import json
import pickle
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability import req_time_stats, request_life
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats
from test_top import workers

from sglang_pd_radix.tools import cli, trace

# ---- what a worker remembers ----


@pytest.fixture(autouse=True)
def asked_anew():
    """Whether anything is remembered is asked once in a process."""
    request_life.remembers.cache_clear()
    yield
    request_life.remembers.cache_clear()


def scheduled() -> SchedulerReqTimeStats:
    times = SchedulerReqTimeStats()
    for seconds, name in enumerate(("scheduler_recv", "decode_prealloc_queue_entry", "completion"), 1):
        setattr(times, f"{name}_time", float(seconds))
    return times


def test_stamps_come_through_the_detokenizer(monkeypatch):
    """Its process knows nothing of metrics, and unpickles and pickles them."""
    monkeypatch.setenv(request_life.VARIABLE, "5")
    monkeypatch.setattr(req_time_stats, "global_diff_realtime_monotonic", 100.0)
    there = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(scheduled()))))
    assert there.life == {"scheduled": 101.0, "handshake_begun": 102.0, "completed": 103.0}


def test_nothing_is_sent_where_nothing_is_remembered(monkeypatch):
    monkeypatch.delenv(request_life.VARIABLE, raising=False)
    assert scheduled().__getstate__() == {}
    monkeypatch.setenv(request_life.VARIABLE, "5")
    request_life.remembers.cache_clear()
    assert set(scheduled().__getstate__()) == {"life"}


def test_every_stamp_is_the_engines():
    assert all(hasattr(SchedulerReqTimeStats, name) for name in request_life.SCHEDULER_STAGES)
    assert all(hasattr(APIServerReqTimeStats, name) for name in request_life.API_STAGES)
    stages = {*request_life.SCHEDULER_STAGES.values(), *request_life.API_STAGES.values()}
    assert stages == set(trace.STAGES)


@pytest.mark.parametrize("given", ["-1", "many", "1.5", "9" * 10, "9" * 5000])
def test_what_is_no_number_is_refused(monkeypatch, given):
    monkeypatch.setenv(request_life.VARIABLE, given)
    with pytest.raises(ValueError, match="give the number of ended requests"):
        request_life.remembered()


def test_as_many_as_may_be_asked_for_can_be_remembered(monkeypatch):
    monkeypatch.setenv(request_life.VARIABLE, "9" * 9)
    assert request_life.EndedRequests(request_life.remembered(), "decode").find("a", None) == []


def state(room: int | None = 7) -> SimpleNamespace:
    times = APIServerReqTimeStats()
    times.created_time = 0.5
    return SimpleNamespace(obj=SimpleNamespace(bootstrap_room=room), time_stats=times, finished=True, out_list=[])


def test_the_last_ones_are_found():
    ended = request_life.EndedRequests(3, "decode")
    for n, rid in enumerate(("old", "a", "HEALTH_CHECK_1", "b_0", "b_1")):
        ended.note(rid, state(n), {"prompt_tokens": n}, {"completed": 9.0}, 10.0)
    assert [one["rid"] for one in ended.find("b", None)] == ["b_0", "b_1"]
    (one,) = ended.find("a", None)
    assert one["times"] == {"received": 10.5, "completed": 9.0} and one["room"] == 1 and one["prompt_tokens"] == 1
    assert ended.find(None, 4) == ended.find("b_1", None)
    assert ended.find("old", None) == ended.find(None, 2) == ended.find(None, None) == []
    assert [one["rid"] for one in ended.last(2)] == ["b_1", "b_0"]
    assert len(ended.last(10**30)) == 3 and ended.last(-1) == []


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_a_worker_says_which_it_is(role):
    ended = request_life.EndedRequests(1, "null" if role == "aggregated" else role)
    ended.note("a", state(), {}, {}, 0.0)
    assert ended.last(1)[0]["role"] == role


def test_the_route_tells_of_one_request_or_of_the_last(monkeypatch):
    here = manager(monkeypatch, 3)
    for rid in ("a", "b"):
        here.ended.note(rid, state(), {}, {}, 0.0)

    def rids(**question) -> list[str]:
        return [one["rid"] for one in asyncio.run(here.tell_ended(**question))["requests"]]

    assert (rids(rid="a"), rids(last=5), rids(last=1), rids()) == (["a"], ["b", "a"], ["b"], [])


def manager(monkeypatch, most: int) -> TokenizerManager:
    """One whose engine ends what it is told of, and no more."""
    found = object.__new__(TokenizerManager)
    found.rid_to_state = {"a": state()}
    found.ended = request_life.EndedRequests(most, "decode") if most else None

    def end(self, recv_obj) -> None:
        for rid in getattr(recv_obj, "rids", None) or [recv_obj.rid]:
            self.rid_to_state.pop(rid).out_list.append({"meta_info": {"finish_reason": {"type": "x"}}})

    monkeypatch.setattr(RefusedRequests, "_handle_batch_output", end)
    monkeypatch.setattr(RefusedRequests, "_handle_abort_req", end)
    return found


@pytest.mark.parametrize("how", ["output", "abort"])
@pytest.mark.parametrize("most", [0, 3])
def test_a_request_that_ends_is_remembered(monkeypatch, how, most):
    here = manager(monkeypatch, most)
    if how == "output":
        times = [SimpleNamespace(life={"completed": 3.0})]
        here._handle_batch_output(SimpleNamespace(rids=["a"], time_stats=times))
    else:
        here._handle_abort_req(AbortReq(rid="a"))
    if not most:
        return
    (one,) = here.ended.find("a", None)
    assert one["finish_reason"] == {"type": "x"} and ("completed" in one["times"]) == (how == "output")


# ---- what is made of it ----


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
