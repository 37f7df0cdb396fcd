"""What decode says of a room before prefill's front has sent its request, where that is one of several."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from test_samples import Manager, answers, expanded, run
from test_samples import no_shared_memory as no_shared_memory


class Times:
    """Stamps that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0


class Front(Manager):
    """Batches are sent as the engine sends them; tokens come after ``slow`` seconds."""

    _should_use_batch_tokenization = TokenizerManager._should_use_batch_tokenization
    slow = 0.0

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.PREFILL):
        super().__init__(mode, False)
        self.server_args.weight_version, self.server_args.skip_tokenizer_init = "w", False
        self.is_generation, self.event_loop = True, asyncio.get_running_loop()

    async def _tokenize_one_request(self, obj: Any) -> Any:
        await asyncio.sleep(self.slow)
        self.rid_to_state[obj.rid].time_stats = times = Times()
        return SimpleNamespace(
            rid=obj.rid,
            bootstrap_room=obj.bootstrap_room,
            input_ids=obj.input_ids,
            sampling_params=SimpleNamespace(**obj.sampling_params),
            time_stats=times,
            stream=obj.stream,
        )

    def _send_one_request(self, tokenized_obj: Any) -> None:
        TokenizerManager._send_one_request(self, tokenized_obj)


def of_prefill(room: Any, **more: Any) -> GenerateReqInput:
    return GenerateReqInput(bootstrap_room=room, bootstrap_host="10.0.0.9", bootstrap_port=8998, **more)


def test_a_prompt_of_a_batch_that_decode_computes_costs_the_others_nothing():
    """The engine looks for the states of all of a batch after it has sent it; all failed, and decode was told so."""

    async def test() -> None:
        front = Front()
        front.computed.note(6)
        obj = of_prefill(
            [5, 6, 7],
            input_ids=[[1, 2], [3, 4], [5, 6]],
            sampling_params={"max_new_tokens": 4},
            rid=["a", "b", "c"],
        )
        task = asyncio.ensure_future(answers(front, obj))
        await asyncio.sleep(0.05)
        (batch,) = front.send_to_scheduler.got
        assert not task.done() and [one.rid for one in batch.batch] == ["a", "c"]
        assert set(front.rid_to_state) == {"a", "c"}
        for one in batch.batch:
            front.answer(one)
        told = await task
        assert [answer["meta_info"]["id"] for answer in told] == ["a", "b", "c"]
        assert told[1]["output_ids"] == []

    run(test())


def test_samples_of_a_room_that_is_refused_meanwhile_leave_no_state():
    async def test() -> None:
        front = Front()
        front.slow = 0.05
        obj = of_prefill(5, input_ids=[1, 2], sampling_params={"n": 2}, rid="a")
        task = asyncio.ensure_future(answers(front, obj))
        await asyncio.sleep(0.01)
        front._refuse_room(5, "decode: max_new_tokens is too large")
        with pytest.raises(ValueError, match="max_new_tokens is too large"):
            await task
        assert not front.rid_to_state

    run(test())


def test_an_aggregated_server_takes_anything_for_a_room():
    async def test() -> None:
        front = Front(DisaggregationMode.NULL)
        obj = GenerateReqInput(input_ids=[1, 2], sampling_params={"max_new_tokens": 4}, rid="a", bootstrap_room=[5])
        task = asyncio.ensure_future(answers(front, obj))
        await asyncio.sleep(0.05)
        assert not task.done() and len(front.send_to_scheduler.got) == 1
        task.cancel()

    run(test())


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_a_list_without_an_entry_is_the_clients_error(name):
    with pytest.raises(ValueError, match=f"no entry 0 .*{name}"):
        expanded(text="a", sampling_params={"n": 2}, **{name: []})
