"""EAGLE with the decode tree: bigram keys, and draft KV that is as good as the target's (traps 34 and 35)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import msgspec
import pytest
import test_prefix_watch
from engine_classes import args_of, engine_class
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import LoopEnds
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.common.drafts import describe_draft
from sglang.srt.disaggregation.decode_radix import overlap_guard
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch
from sglang.srt.managers import undrafted_kv
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from speculating_loop import SpeculatingLoop
from test_overlap_guard import Play, scripts

from sglang_pd_radix.tools.make_model import DRAFT, ModelShape, make_model

# The engine's own classes, under the patch set's.
EngineReq, EngineBatch, EngineScheduler = engine_class(Req), engine_class(ScheduleBatch), engine_class(Scheduler)


VERSIONS = pytest.mark.parametrize("overlap", [True, False], ids=["v2", "v1"])


@pytest.mark.parametrize(
    "overlap, page_size, examples",
    [
        (True, 1, 8),
        (False, 4, 8),
        *(pytest.param(*cell, 60, marks=pytest.mark.thorough) for cell in itertools.product([True, False], [1, 4])),
    ],
)
@pytest.mark.timeout(600)
def test_whatever_happens_no_draft_starts_from_another_s_kv(overlap, page_size, examples):
    """Traps 28, 29 and 35: two writers of a page, stale draft KV in the tree or under a request, another's state.

    And whoever is admitted comes to an end: alone, each has room for its answer and what is drafted behind it.
    """
    behind = drafted = 0

    @given(script=scripts, size=st.sampled_from([48, 64]))
    @settings(max_examples=examples, deadline=None)
    def play(script, size):
        nonlocal behind, drafted
        loop = SpeculatingLoop(True, overlap, size=size, page_size=page_size, reserved=0, max_reqs=4)
        Play(loop, script).run()
        assert not [req.rid for req in loop.told if "Out of memory" in getattr(req.to_finish, "message", "")]
        behind += len(loop.asked_behind)
        drafted += loop.states_seen

    play()
    assert drafted > 20
    assert behind or not overlap or examples < 60, "nobody was admitted while a step was in flight"


def ask(loop: SpeculatingLoop, prompts: list[list[int]], max_new: int = 9, together: bool = True) -> list:
    """Have prompts answered, one after another or all at once. Returns the requests' `DecodeRequest`."""
    made: list = []

    def between() -> None:
        while len(made) < len(prompts) and (together or len(loop.told) == len(made)):
            made.append(loop.arrive(prompts[len(made)], max_new=max_new))
            loop.handshake(made[-1])
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if len(loop.told) == len(prompts) and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200, "the loop does not come to an end"

    loop.run(between)
    loop.check_answers()
    loop.check()
    return made


@VERSIONS
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_turn_finds_what_the_turn_before_left(overlap, page_size):
    """Trap 34: all of a prompt but its last token, whole pages; and of an answer all that was drafted from."""
    loop = SpeculatingLoop(True, overlap, size=96, page_size=page_size)
    prompt = [1, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 2, 1]
    first, again = ask(loop, [prompt, prompt], together=False)
    assert first.req.transfer_prefix_len == 0
    assert again.req.transfer_prefix_len == (len(prompt) - 1) // page_size * page_size
    loop.told.clear()
    longer = prompt + first.req.output_ids + [2, 1]
    (turn,) = ask(loop, [longer])
    known = len(prompt) + len(first.req.output_ids_through_stop)
    # The last token of the answer has no KV, and that of what the last step accepted only v2's draft model has.
    assert known - 1 - (not overlap) * 4 - page_size <= turn.req.transfer_prefix_len <= known


def test_without_its_draft_s_kv_the_end_of_an_answer_stays_out_of_the_tree(monkeypatch):
    """Trap 35 as the engine's own tree has it, without overlap."""
    ask(SpeculatingLoop(True, False, size=96, page_size=1), [[1, 2, 1, 1]])
    monkeypatch.setattr(undrafted_kv, "keep_undrafted_out", lambda *args: None)
    with pytest.raises(AssertionError, match="stale draft KV in the tree"):
        ask(SpeculatingLoop(True, False, size=96, page_size=1), [[1, 2, 1, 1]])


RETRACTING = [[1, 2, 1, 1, 2, 2], [2, 1, 1, 2, 1, 1], [2, 2, 2, 1, 2, 1]]


@VERSIONS
@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_a_retracted_request_drafts_on_from_where_it_was(monkeypatch, flag, overlap):
    """Its drafts' KV and state come back with it; the engine leaves both behind, and drops a step of v2."""

    def play(length: int = 24) -> list:
        loop = SpeculatingLoop(flag, overlap, size=64, page_size=1, reserved=0)
        return [decode_req.req for decode_req in ask(loop, RETRACTING, max_new=length)]

    assert sum(req.retraction_count for req in play()) > 0
    for owner, engine, name in (
        (Req, EngineReq, "offload_kv_cache"),
        (ScheduleBatch, EngineBatch, "release_req"),
        *([(Scheduler, EngineScheduler, "update_running_batch")] if overlap else []),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="stale draft KV|another state"):
            patch.setattr(owner, name, getattr(engine, name))
            play()


@VERSIONS
@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_what_a_draft_starts_from_is_read_before_the_buffer_is_another_s(monkeypatch, flag, overlap):
    """One request waits for a place to run while the next one's metadata comes into the buffer that it had."""

    def play() -> list:
        loop = SpeculatingLoop(flag, overlap, size=96, page_size=1)
        loop.scheduler.max_running_requests = 1
        used: list[int] = []
        complete = loop.complete

        def noted(decode_req, *args):
            used.append(decode_req.kv_receiver.aux_index)
            complete(decode_req, *args)

        loop.complete = noted
        loop.meta_alloc.free_slots = type(loop.meta_alloc.free_slots)(list(loop.meta_alloc.free_slots)[:1])
        ask(loop, RETRACTING)
        return used

    assert play() == [0, 0, 0]
    commit = decode.DecodeTransferQueue._commit_transfer_to_req

    def views(queue, decode_req):
        done = commit(queue, decode_req)
        if done:
            decode_req.req.hidden_states_tensor = queue.metadata_buffers.output_hidden_states[0]
        return done

    monkeypatch.setattr(decode.DecodeTransferQueue, "_commit_transfer_to_req", views)
    with pytest.raises(AssertionError, match="drafts from another state"):
        play()


@pytest.mark.parametrize("page_size", [1, 4])
def test_several_slots_of_a_request_that_has_ended_are_in_use_one_step_later(monkeypatch, page_size):
    """Trap 28 with overlapped speculation: its step in flight may write to all that was allocated for it."""

    def play() -> SpeculatingLoop:
        loop = SpeculatingLoop(True, True, size=48, page_size=page_size, reserved=0, watermark=0)
        requests = ({"prompt": prompt, "max_new": 4} for prompt in ([1, 2, 1, 1], [2] * 40))
        return loop.run_in_turn(*requests, wrong="two writers")

    sound = play()
    assert not sound.wrong and len(sound.told) == 2
    # Neither was lost on the way: a fence that fails costs its request.
    assert all(not isinstance(req.finished_reason, FINISH_ABORT) for req in sound.told)
    monkeypatch.setattr(overlap_guard, "make_guard", lambda *args: overlap_guard.OPEN)
    assert play().wrong


@pytest.mark.parametrize("overlap", [True, False], ids=["v2", "v1"])
def test_a_draft_is_taken_for_what_it_is(monkeypatch, overlap):
    """One of another width: beside hidden states that all requests of a step have left, the engine cannot put those of
    the next. And one that is part of another model, wherever it lies."""
    monkeypatch.setattr(EngineScheduler, "init_cache_with_memory_pool", lambda self: None)
    tree = SimpleNamespace()
    monkeypatch.setattr(DecodeRadixCache, "take_over", lambda cache: tree)

    def runner(hidden_size: int, architecture: str) -> SimpleNamespace:
        hf = SimpleNamespace(architectures=[architecture])
        config = SimpleNamespace(hidden_size=hidden_size, hf_config=hf)
        return SimpleNamespace(mambaish_config=None, is_hybrid_swa=False, token_to_kv_pool=None, model_config=config)

    scheduler = object.__new__(Scheduler)
    args = {"speculative_algorithm": "EAGLE", "model_path": "target", "speculative_draft_model_path": "draft"}
    scheduler.server_args = args_of(disaggregation_decode_enable_radix_cache=True, **args)
    scheduler.enable_overlap = overlap
    scheduler.tp_worker = SimpleNamespace(model_runner=runner(256, "LlamaForCausalLM"))

    def start(*draft) -> None:
        scheduler.tree_cache, drafts = object.__new__(RadixCache), runner(*draft)
        scheduler.tree_cache.disable = False
        apart = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=drafts))
        scheduler.draft_worker = apart if overlap else SimpleNamespace(model_runner=drafts)
        scheduler.init_cache_with_memory_pool()

    with pytest.raises(ValueError, match=r"another hidden size \(128\) than the model's \(256\)"):
        start(128, "LlamaForCausalLMEagle3")
    for part in ("DeepseekV3ForCausalLMNextN", "MiMoMTP"):
        with pytest.raises(ValueError, match=rf"part of a model \(MTP\).*{part}"):
            start(256, part)
    start(256, "LlamaForCausalLMEagle3")
    assert scheduler.tree_cache is tree
    # In the model itself, which one it may be has been looked at with the options.
    scheduler.server_args.speculative_draft_model_path = "target"
    start(256, "Qwen3NextForCausalLMMTP")
    assert scheduler.tree_cache is tree


def test_drafts_are_compared_by_what_they_are(tmp_path):
    """Those that have other sizes would write over what is not theirs, or propose tokens that nobody knows."""

    def args(path, algorithm="EAGLE3", model="target"):
        return SimpleNamespace(
            speculative_algorithm=algorithm,
            speculative_draft_model_path=path and str(path),
            speculative_draft_model_revision=None,
            model_path=model,
            trust_remote_code=True,
        )

    drafts = [make_model(tmp_path / str(heads), ModelShape("eagle3", heads=heads)) / DRAFT for heads in (16, 8)]
    said = [describe_draft(args(path)) for path in drafts]
    assert said[0] != said[1] and "num_attention_heads 16" in said[0]
    assert said[0].startswith("LlamaForCausalLMEagle3, ") and "draft_vocab_size" in said[0]
    assert describe_draft(args(None)) == describe_draft(args("target")) == "the model's own"
    # None at all, and one that says nothing.
    assert describe_draft(args(drafts[0], None)) == describe_draft(args(tmp_path / "none")) == ""


def test_with_drafts_events_have_the_tokens_of_pages():
    """The tree goes by pairs of tokens; nobody who listens could read those."""
    loop, prompt = SpeculatingLoop(True, True, size=96, page_size=4), [1, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 2, 1]
    loop.tree.enable_kv_cache_events, loop.tree.kv_event_queue = True, []
    ask(loop, [prompt])
    events = loop.tree.take_events()
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events)), type=KVEventBatch)
    stored = [event for event in told.events if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored[:3]] == [prompt[:4], prompt[4:8], prompt[8:12]]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "test",
    [
        test_prefix_watch.test_a_herd_is_compared_as_it_arrives_and_not_again,
        test_prefix_watch.test_strangers_in_the_place_of_a_herd_hide_none_of_it,
        test_prefix_watch.test_prompts_that_share_a_page_cost_that_page,
        test_prefix_watch.test_those_who_wait_for_what_is_evicted_are_moved_unread,
    ],
)
def test_what_pairs_of_prompts_that_wait_cost(test, page):
    test(page, True)


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_what_is_known_of_pairs_is_what_a_comparison_would_find(page):
    test_prefix_watch.test_what_is_known_of_prompts_that_wait_is_what_a_comparison_would_find(page, True)


def test_what_pairs_share_is_found_from_wherever_it_is_looked_for():
    test_prefix_watch.test_what_two_prompts_share_is_found_from_wherever_it_is_looked_for(True)
