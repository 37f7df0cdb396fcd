"""A tokenizer manager without a server, and what it sends to its scheduler."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class Scheduler:
    """What a tokenizer manager sends to it; answers what it is told to."""

    def __init__(self):
        self.got: list = []

    def send_pyobj(self, message):
        self.got.append(message)

    @property
    def requests(self) -> list:
        return [message for message in self.got if isinstance(message, SimpleNamespace)]

    @property
    def aborts(self) -> list[str]:
        return [message.rid for message in self.got if isinstance(message, AbortReq)]


class Manager(TokenizerManager):
    """A tokenizer manager that has what it looks at requests with."""

    def __init__(self, mode: DisaggregationMode, flag: bool, context_len: int = 100):
        self.disaggregation_mode, self.refused_rooms = mode, refusal.RefusedRooms()
        self.own_states: dict = {}
        self.event_loop, self.send_to_scheduler, self.rid_to_state = None, Scheduler(), {}
        self.server_args = SimpleNamespace(
            disaggregation_bootstrap_port=8998,
            disaggregation_decode_enable_radix_cache=flag,
            disaggregation_transfer_backend="nixl",
            dp_size=1,
            language_only=False,
            tokenizer_worker_num=1,
            enable_trace=False,
            enable_lora=False,
            incremental_streaming_output=False,
            enable_tokenizer_batch_encode=False,
            enable_dynamic_batch_tokenizer=False,
            allow_auto_truncate=False,
            enable_dp_attention=False,
            keyed=False,
            enable_deterministic_inference=False,
            enable_return_hidden_states=False,
            enable_custom_logit_processor=False,
        )
        self.model_config, self.mm_processor = SimpleNamespace(vocab_size=50), None
        self.max_req_input_len, self.context_len = 100, context_len
        self.num_reserved_tokens, self.validate_total_tokens = 0, False
        self.request_logger = SimpleNamespace(
            log_received_request=lambda *args: None, log_finished_request=lambda *args, **kwargs: None
        )
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.is_pause, self.is_pause_cond, self.tokenizer = False, asyncio.Condition(), object()
        self.model_update_lock = SimpleNamespace(reader_lock=_nothing())
        self.enable_metrics = self.enable_priority_scheduling = False

    def auto_create_handle_loop(self):
        pass

    async def _tokenize_one_request(self, obj):
        self._validate_one_request(obj, obj.input_ids)
        params = SimpleNamespace(**obj.sampling_params)
        state = self.rid_to_state[obj.rid]
        return SimpleNamespace(
            rid=obj.rid,
            bootstrap_room=obj.bootstrap_room,
            sampling_params=params,
            time_stats=state.time_stats,
            stream=obj.stream,
        )

    def _should_use_batch_tokenization(self, batch_size, requests):
        return False

    def _send_one_request(self, tokenized_obj):
        # What the engine's sends, without its clocks.
        tokenized_obj.time_stats = SimpleNamespace(
            set_api_server_dispatch_time=int, set_api_server_dispatch_finish_time=int
        )
        super()._send_one_request(tokenized_obj)

    def answer(self, message, **meta) -> None:
        state = self.rid_to_state.pop(message.rid)
        info = {"id": message.rid, "finish_reason": {"type": "length"}, **meta}
        state.out_list.append({"text": "x", "meta_info": info})
        state.finished = True
        state.event.set()


def _nothing():
    @asynccontextmanager
    async def nothing():
        yield

    class Lock:
        def __aenter__(self):
            self.held = nothing()
            return self.held.__aenter__()

        def __aexit__(self, *error):
            return self.held.__aexit__(*error)

    return Lock()


def body(n: int = 3, prompts=([1, 2], [3, 4]), **more) -> GenerateReqInput:
    return GenerateReqInput(
        **{
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"n": n},
            "bootstrap_host": ["127.0.0.1"] * len(prompts),
            "bootstrap_port": [more.pop("port", 8998)] * len(prompts),
            "bootstrap_room": [11, 12][: len(prompts)],
            **more,
        }
    )


async def until(condition, task: asyncio.Future) -> None:
    """What ``task`` brings about."""
    while not condition():
        if task.done():
            task.result()
        await asyncio.sleep(0)


async def answers(manager: Manager, obj):
    async for out in manager.generate_request(obj):
        return out


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


MODES = [(DisaggregationMode.PREFILL, False), (DisaggregationMode.DECODE, True)]


class Registry:
    def __init__(self):
        self.held: list = []

    async def get_unregistered_loras(self, names):
        return []

    async def acquire(self, names):
        ids = [name and f"id of {name}" for name in ([names] if isinstance(names, str) else names)]
        self.held += [uid for uid in ids if uid]
        return ids if isinstance(names, list) else ids[0]

    async def release(self, ids):
        for uid in [ids] if isinstance(ids, str) else ids:
            if uid:
                self.held.remove(uid)


def with_adapters(manager: Manager) -> Manager:
    manager.server_args.enable_lora, manager.server_args.max_loaded_loras = True, None
    manager.lora_registry = Registry()
    return manager
