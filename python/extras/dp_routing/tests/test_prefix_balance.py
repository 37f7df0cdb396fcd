"""The choice of a DP rank by prefix: what it remembers, what it chooses, and what it does in the controller."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers import data_parallel_controller as controller
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, GetLoadReqOutput, WatchLoadUpdateReq
from sglang.srt.managers.prefix_balance import BLOCK_TOKENS, SAID_S, HeldPrefixes, PrefixBalance

ALL = [True, True]


def prompt(seed: object, blocks: int) -> list[int]:
    pick = random.Random(str(seed))
    return [pick.randrange(100_000) for _ in range(blocks * BLOCK_TOKENS)]


def balance(ranks: int = 2, pool: int = 100 * BLOCK_TOKENS, **more) -> PrefixBalance:
    return PrefixBalance(ranks, pool, 1, **more)


# ---- what a rank is taken to hold ----


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=40), st.integers(1, 8))
@settings(deadline=None, max_examples=150)
def test_what_is_held_is_bounded_and_has_all_that_comes_before(prompts, most):
    """Against a model: sets of prefixes, of which those unused for longest go, longest first."""
    held = HeldPrefixes(most)
    used: dict[str, int] = {}
    clock = 0
    for text in map("".join, prompts):
        prefixes = [text[:end] for end in range(1, len(text) + 1)]
        expected = next((i for i, prefix in enumerate(prefixes) if prefix not in used), len(prefixes))
        assert held.match([hash(prefix) for prefix in prefixes]) == expected
        held.use([hash(prefix) for prefix in prefixes])
        clock += 1
        used.update(dict.fromkeys(prefixes[:most], clock))
        while len(used) > most:
            del used[min(used, key=lambda prefix: (used[prefix], -len(prefix)))]
        assert len(held) == len(used) <= most
        assert all(prefix[:-1] in used for prefix in used if prefix[:-1])


# ---- the rule ----


@pytest.mark.parametrize(("more", "stays"), [(383, True), (385, False)])
def test_a_prefix_is_left_when_waiting_costs_more_than_sending_it(more, stays):
    chooser, ids = balance(weight=0.5), prompt("p", 3)
    home = chooser.choose(ids, None, ALL, 0.0)
    # 192 tokens to be sent are worth a rank that is 384 tokens fuller than an empty one.
    chooser.report(home, more, 1.0)
    assert (chooser.choose(ids, None, ALL, 2.0) == home) is stays


def test_a_herd_meets_before_its_kv_has_come():
    chooser, shared = balance(weight=0.01), prompt("herd", 20)
    assert len({chooser.choose(shared + prompt(n, 1), None, ALL, 0.0) for n in range(8)}) == 1


def test_what_a_rank_has_not_said_for_long_does_not_keep_requests_away():
    """It says it with its outputs; one that has none may have let go of all since."""
    chooser = balance()
    chooser.report(0, 100 * BLOCK_TOKENS, 1.0)
    assert chooser.loads(1.0 + SAID_S)[0] == 100 * BLOCK_TOKENS
    assert chooser.loads(1.0 + 2 * SAID_S)[0] == 50 * BLOCK_TOKENS
    # It has been told of something: all counts again.
    chooser.given(0, prompt("a", 2), None, 3.0)
    assert chooser.loads(3.0 + SAID_S)[0] == 102 * BLOCK_TOKENS
    # The other one answers, and says so, all the time.
    chosen = []
    for second in range(2, 120):
        chooser.report(1, 0, float(second))
        chosen.append(chooser.choose(prompt(f"{second}", 1), None, ALL, float(second)))
    assert chosen[0] == 1 and 0 in chosen[:90]


def test_ranks_that_are_down_are_not_chosen():
    chooser, ids = balance(), prompt("p", 3)
    home = chooser.choose(ids, None, ALL, 0.0)
    usable = [rank != home for rank in range(2)]
    assert chooser.choose(ids, None, usable, 0.0) == 1 - home
    with pytest.raises(ValueError, match="no rank"):
        chooser.choose(ids, None, [False, False], 0.0)


# ---- the engine's controller ----


class Worker:
    """The socket of a rank."""

    def __init__(self) -> None:
        self.sent: list = []

    def send_pyobj(self, obj) -> None:
        self.sent.append(obj)


@pytest.fixture
def dispatch(monkeypatch):
    """A controller of two ranks that are not started, with the method by prefix."""

    def launched(self, server_args, port_args) -> None:
        self.workers = [Worker(), Worker()]
        self.max_total_num_tokens = 100 * BLOCK_TOKENS

    monkeypatch.setattr(controller.DataParallelController, "launch_dp_schedulers", launched)
    args = SimpleNamespace(
        load_balance_method="longest_prefix",
        dp_size=2,
        node_rank=1,
        enable_dp_attention=False,
        soft_watchdog_timeout=None,
        enable_metrics=False,
        page_size=1,
        enable_hierarchical_cache=False,
    )
    return controller.DataParallelController(args, None, None)


def request(ids: list[int], host: str = "10.0.0.1", routed: int | None = None, extra_key: str | None = None):
    return SimpleNamespace(
        input_ids=ids, bootstrap_host=host, routed_dp_rank=routed, extra_key=extra_key, lora_id=None, bootstrap_room=1
    )


def rank_of(dispatch, req) -> int:
    dispatch.dispatching(req)
    return next(rank for rank, worker in enumerate(dispatch.workers) if worker.sent and worker.sent[-1] is req)


def report(dispatch, rank: int, tokens: int, clock: float = 0.0) -> None:
    at = time.perf_counter() + clock
    load = GetLoadReqOutput(dp_rank=rank, num_reqs=1, num_waiting_reqs=0, num_tokens=tokens, ts_tic=at)
    dispatch._request_dispatcher(WatchLoadUpdateReq(loads=[load]))


def test_the_controller_keeps_to_a_prefix_until_its_rank_is_full_or_flushed(dispatch):
    ids = prompt("p", 10)
    home = rank_of(dispatch, request(ids, routed=1))
    assert home == 1
    report(dispatch, 1, 0)
    assert rank_of(dispatch, request(ids)) == 1
    # Ten blocks to be sent, at half a token for each by which it is fuller.
    report(dispatch, 1, 20 * BLOCK_TOKENS + 1)
    assert rank_of(dispatch, request(ids)) == 0
    # Now both have it; another salt is another prompt, for which only the load counts.
    report(dispatch, 0, 10)
    report(dispatch, 1, 0)
    assert rank_of(dispatch, request(ids, extra_key="salt")) == 1
    dispatch._request_dispatcher(AbortReq(rid="r"))
    assert any(len(held) for held in dispatch.balance.held)
    dispatch._request_dispatcher(FlushCacheReqInput())
    assert not any(len(held) for held in dispatch.balance.held)


def test_warm_ups_go_by_turns_and_are_not_remembered(dispatch):
    ids = prompt("warm", 3)
    ranks = [rank_of(dispatch, request(ids, host=FAKE_BOOTSTRAP_HOST)) for _ in range(4)]
    assert sorted(ranks) == [0, 0, 1, 1]
    assert not any(len(held) for held in dispatch.balance.held)


def test_a_key_of_any_kind_ends_no_controller(dispatch):
    """What the scheduler would refuse is for it to refuse."""
    ids = prompt("p", 10)
    home = rank_of(dispatch, request(ids, extra_key=["a"]))
    assert rank_of(dispatch, request(ids, extra_key=["a"])) == home != rank_of(dispatch, request(ids, extra_key=["b"]))
