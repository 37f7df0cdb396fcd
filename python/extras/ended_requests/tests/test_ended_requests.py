"""What workers remember of a request that has ended."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import runpy
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability import req_time_stats, request_life
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats

from sglang_pd_radix.tools import trace


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


@pytest.mark.parametrize(("variable", "ours"), [("", False), ("100", True)])
def test_where_nothing_is_remembered_messages_are_the_engines(monkeypatch, variable, ours):
    """What is pickled for each message of each request goes through no function of ours then."""
    monkeypatch.setenv(request_life.VARIABLE, variable)
    # As at a worker's start.
    made = runpy.run_path(inspect.getfile(SchedulerReqTimeStats.__getstate__))["SchedulerReqTimeStats"]
    assert ("__getstate__" in vars(made)) == ours
