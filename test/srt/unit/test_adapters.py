"""LoRA on decode: a batch has no more adapters than are loaded at once, and each has a tree of its own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation import decode
from sglang.srt.managers.schedule_batch import Req, keep_extra_key
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams


def scheduler(monkeypatch, queue: str, running: str, tree: type = DecodeRadixCache, room: int = 99) -> Scheduler:
    """A request is called by its adapter; the base model is one as well. The engine's method takes ``room`` of them."""
    made = object.__new__(Scheduler)
    made.enable_lora, made.tree_cache = True, object.__new__(tree)
    made.waiting_queue = [SimpleNamespace(lora_id=adapter) for adapter in queue]
    made.running_batch = SimpleNamespace(reqs=[SimpleNamespace(lora_id=adapter) for adapter in running])
    manager = SimpleNamespace(validate_lora_batch=lambda adapters: len(adapters) <= 2)
    made.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))

    made.server_args = SimpleNamespace(disaggregation_decode_max_overtaken=32)
    made.room = room

    def take(self):
        taken, self.waiting_queue = self.waiting_queue[: self.room], self.waiting_queue[self.room :]
        return "".join(req.lora_id for req in taken)

    monkeypatch.setattr(decode.SchedulerDisaggregationDecodeMixin.__base__, "get_new_prebuilt_batch", take)
    return made


@pytest.mark.parametrize(
    ("running", "queue", "taken", "left"),
    [("", "abcab", "abab", "c"), ("a", "bcab", "bab", "c"), ("ab", "ccab", "ab", "cc"), ("", "", "", "")],
)
def test_a_batch_has_no_more_adapters_than_fit(monkeypatch, running, queue, taken, left):
    """The engine looks at that on prefill only; one too many ends the scheduler."""
    made = scheduler(monkeypatch, queue, running)
    assert made.get_new_prebuilt_batch() == taken
    assert [req.lora_id for req in made.waiting_queue] == list(left)


def test_what_does_not_fit_otherwise_stays_before_it(monkeypatch):
    made = scheduler(monkeypatch, "acbab", "", room=2)
    assert made.get_new_prebuilt_batch() == "ac"
    assert [req.lora_id for req in made.waiting_queue] == ["b", "a", "b"]


@pytest.mark.parametrize("most", [0, 1, 32])
@pytest.mark.parametrize(("start", "late"), [("ab", "c"), ("abab", "cdc"), ("aab", "ccc")])
def test_adapters_that_run_do_not_keep_others_out_for_ever(monkeypatch, start, late, most):
    """Two that are loaded, one of which gets a request a step: a third one's turn comes, and then the others' again."""
    made = scheduler(monkeypatch, "", "", room=3)
    made.server_args.disaggregation_decode_max_overtaken = most
    rotation, begun = itertools.cycle(start), []
    for step in range(800):
        # Three places, of which the first comes free in each step; whoever has not begun goes on waiting.
        made.running_batch.reqs = made.running_batch.reqs[1:]
        made.waiting_queue += [SimpleNamespace(lora_id=next(rotation))]
        if step % 100 == 5:
            made.waiting_queue += [SimpleNamespace(lora_id=adapter) for adapter in late]
        made.room = 3 - len(made.running_batch.reqs)
        taken = made.get_new_prebuilt_batch()
        made.running_batch.reqs += [SimpleNamespace(lora_id=adapter) for adapter in taken]
        assert len({req.lora_id for req in made.running_batch.reqs}) <= 2
        begun += [(step, adapter) for adapter in taken]
    found = [step for step, adapter in begun if adapter in late]
    assert len(found) == 8 * len(late)
    # Overtaken as often as may be, by one a step or two, and then until the smaller of two adapters has run out.
    assert all(step % 100 < 5 + 2 * most + 30 for step in found)
    assert {adapter for step, adapter in begun if step > 700} >= {*start, *late}


def test_without_the_flag_it_is_the_engines(monkeypatch):
    made = scheduler(monkeypatch, "abc", "", tree=RadixCache)
    assert made.get_new_prebuilt_batch() == "abc"


def test_an_adapter_is_part_of_the_key():
    """Trap 14; the key of a client's own goes with it."""

    sampling = SamplingParams()

    def key(**options) -> str | None:
        return Req("r", "", [1], sampling, **options).extra_key

    assert key() is None and key(extra_key="k") == "k"
    keep_extra_key(SimpleNamespace(sampling_params=sampling, extra_key="k"))
    assert len({key(), key(lora_id="a"), key(lora_id="b")}) == 3 and key(lora_id="a") == "ka"
