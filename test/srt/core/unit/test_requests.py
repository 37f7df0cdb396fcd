"""What a request, or what others say, costs no worker."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, wait

import pytest
from engine_classes import engine_class
from overlapped_loop import Loop
from sglang.srt.disaggregation.common import prefill_peers
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.observability.metrics_collector import QueueCount
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import prepare_server_args
from test_traps import tokens

from sglang_pd_radix.tools.make_model import make_model


def test_a_prefill_that_does_not_say_which_rank_holds_nobody_up(monkeypatch):
    """Without the cache the engine asks as it does, and waits."""
    code = CommonKVReceiver.query_prefill_dp_ranks.__globals__
    monkeypatch.setitem(code, "_rank_answers", code["RankAnswers"]())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addr = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        for _ in range(50):
            assert CommonKVReceiver.query_prefill_dp_ranks(addr, [5]) == {}
        # The engine waits for five seconds, fifty times.
        assert time.monotonic() - began < 5


def test_the_ranks_of_thousands_are_told_and_those_that_nobody_asks_for_are_forgotten(monkeypatch):
    """Of more than 4096 requests at once all that was told was thrown away before it could be used, again and again."""
    questions: list[Future] = []
    threaded = prefill_peers.in_background
    monkeypatch.setattr(
        prefill_peers, "in_background", lambda *work: questions.append(threaded(*work)) or questions[-1]
    )
    answers = CommonKVReceiver.query_prefill_dp_ranks.__globals__["RankAnswers"]()

    def ask(rooms: range) -> dict[str, int]:
        found = answers.query("a", list(rooms), lambda addr, lacking: {str(room): room % 3 for room in lacking})
        wait(questions)
        return found

    assert ask(range(10_000)) == {} and ask(range(9_000)) == {str(room): room % 3 for room in range(9_000)}
    # The others have been aborted.
    assert ask(range(9_000, 9_001)) == {} and ask(range(9_000, 9_001)) == {"9000": 0} and not answers._queries


@pytest.mark.parametrize("size", ["0", "-16"])
def test_pages_are_pages(tmp_path, size):
    model = make_model(tmp_path / "m")
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu", "--page-size", size])
    with pytest.raises(ValueError, match="--page-size is"):
        args.check_server_args()


@pytest.mark.parametrize("low_first", [False, True])
def test_a_prefill_with_priorities_takes_requests_without_one(monkeypatch, low_first):
    """The engine gives them the least where there is no pair, and sorts by it whatever waits."""
    scheduler, added = object.__new__(Scheduler), []
    scheduler.tree_cache, scheduler.disaggregation_mode = None, DisaggregationMode.PREFILL
    scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = True, low_first
    add = lambda self, req, retracted: added.append(req)  # noqa: E731
    monkeypatch.setattr(engine_class(Scheduler), "_add_request_to_queue", add)
    for rid, priority in (("none", None), ("low", -5), ("high", 5)):
        req = Req(rid, "", [1], SamplingParams(), priority=priority)
        req.time_stats.wait_queue_entry_time = 0.0
        scheduler._add_request_to_queue(req)
    SchedulePolicy._sort_by_priority_and_fcfs(added, 1 if low_first else -1)
    assert [req.rid for req in added] == (["low", "high", "none"] if low_first else ["high", "low", "none"])


@pytest.mark.parametrize("lower_first", [False, True])
@pytest.mark.parametrize("host", [FAKE_BOOTSTRAP_HOST, "10.0.0.1"])
def test_a_request_without_a_priority_has_the_least(host: str, lower_first: bool):
    """As a warm-up has none, and every request of a client that does not know of them."""
    loop = Loop(size=64)
    scheduler = loop.scheduler
    scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = True, lower_first
    scheduler.longest_queue_step = 0.0
    req = Req(
        "without",
        "",
        tokens(1, 8),
        SamplingParams(max_new_tokens=3),
        bootstrap_host=host,
        bootstrap_port=1,
        bootstrap_room=5,
        disagg_mode=DisaggregationMode.DECODE,
    )
    made = loop.arrive(tokens(2, 8), priority=3)
    scheduler._add_request_to_queue(req)
    entries = [decode_req.entry for decode_req in loop.queue.queue]
    assert {decode_req.req for decode_req in loop.queue.queue} == {made.req, req}
    least = max(entries, key=lambda entry: entry.priority)
    assert least is next(dr for dr in loop.queue.queue if dr.req is req).entry
    # As the engine counts a queue, by priority, in each report of a decode step.
    counted = QueueCount.from_reqs(loop.queue.queue, enable_priority_scheduling=True)
    assert counted.total == 2 and counted.by_priority == {3: 1, req.priority: 1}
