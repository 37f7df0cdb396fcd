"""Several tokenizer processes: what has to reach all of them, and reaches one, is refused on a worker of a pair."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from engine_classes import engine_class
from fastapi import HTTPException
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from starlette.testclient import TestClient

ENGINE = engine_class(TokenizerWorker)
# Of the calls that the HTTP server makes of a tokenizer process: those that change what each process has for itself.
REFUSED = {
    "pause_generation": {},
    "continue_generation": {},
    "update_weights_from_disk": {"model_path": "m"},
    "update_weights_from_tensor": {"serialized_named_tensors": []},
    "update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "update_weights_from_ipc": {"zmq_handles": {}},
    "load_lora_adapter": {"lora_name": "a", "lora_path": "p"},
    "unload_lora_adapter": {"lora_name": "a"},
    "load_lora_adapter_from_tensors": {"lora_name": "a", "config_dict": {}, "serialized_tensors": ""},
}


def worker(mode: DisaggregationMode) -> Any:
    """A tokenizer process that has not been started."""
    made = object.__new__(TokenizerWorker)
    made.disaggregation_mode, made.server_args = mode, SimpleNamespace(tokenizer_worker_num=2)
    return made


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
@pytest.mark.parametrize("call", REFUSED)
def test_what_has_to_reach_all_processes_is_refused(monkeypatch, call, mode):
    """The requests of the others waited for ever, or ran through the update."""
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=worker(mode)))
    reply = TestClient(http_server.app).post(f"/{call}", json=REFUSED[call])
    assert reply.status_code == 400
    assert f"{call} would reach one of 2 tokenizer processes" in reply.text and "--tokenizer-worker-num" in reply.text


def test_a_server_by_itself_is_as_in_the_engine():
    seen = []

    async def pause(self, obj):
        seen.append(obj)

    aggregated = worker(DisaggregationMode.NULL)
    for call in REFUSED:
        assert getattr(TokenizerWorker, call).__wrapped__ is getattr(ENGINE, call)
    aggregated.is_pause, aggregated.is_pause_cond = True, asyncio.Condition()
    aggregated.send_to_scheduler = SimpleNamespace(send_pyobj=lambda obj: pause(aggregated, obj))
    asyncio.run(aggregated.continue_generation("go on"))
    assert seen == ["go on"] and not aggregated.is_pause
    with pytest.raises(HTTPException):
        asyncio.run(worker(DisaggregationMode.DECODE).continue_generation("go on"))
