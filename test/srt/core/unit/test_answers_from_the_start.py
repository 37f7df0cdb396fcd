"""What an answer has of its first token, which prefill samples, and of all tokens before a retraction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.decode_radix.commit import note_transfer
from sglang.srt.disaggregation.decode_radix.hooks import NO_EVENTS
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.openai.utils import process_cached_tokens_details_from_ret, process_hidden_states_from_ret
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

SHARED = [20 + i for i in range(8)]


# ---- what stays on prefill ----

LISTS = [
    f"{side}_{kind}logprobs{part}"
    for side in ("input", "output")
    for kind in ("token_", "top_", "token_ids_")
    for part in ("", "_val", "_idx")
]


def messages_of(tokens: int, stream: bool, interval: int | None, monkeypatch: Any) -> list[Any]:
    """What a decode worker says of a request whose KV has come. Token n of its answer has the logprob -n."""
    sent: list[Any] = []
    scheduler = object.__new__(Scheduler)
    scheduler.spec_algorithm, scheduler.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.DECODE
    scheduler.dp_rank, scheduler.attn_tp_rank, scheduler.stream_interval = None, 1, 1
    scheduler.get_load = lambda: None
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=sent.append)
    monkeypatch.setattr(Scheduler, "_get_cached_tokens_details", lambda self, req: None)
    params = SamplingParams(max_new_tokens=tokens, stream_interval=interval)
    params.stop_strs = params.stop_regex_strs = []
    req = Req("r", "", [1, 2], params, return_logprob=True, token_ids_logprob=[77], stream=stream)
    req.transfer_prefix_len = 0
    for n in range(1, tokens + 1):
        req.output_ids.append(n)
        req.output_token_logprobs_val.append(-float(n))
        req.output_token_logprobs_idx.append(n)
        if n == 1:
            note_transfer(req, NO_EVENTS)
        else:
            req.output_token_ids_logprobs_val.append([-float(n)])
            req.output_token_ids_logprobs_idx.append([77])
        if n == tokens:
            req.finished_reason, req.finished_len = FINISH_LENGTH(length=n), n
        scheduler.stream_output_generation([req], True)
    return [message for message in sent if message.rids]


@pytest.mark.parametrize("stream, interval", [(False, None), (True, None), (True, 10)])
def test_each_logprob_of_token_ids_logprob_is_its_own_tokens(stream, interval, monkeypatch):
    """The first token's stays on prefill."""
    manager = object.__new__(TokenizerManager)
    manager.server_args = SimpleNamespace(skip_tokenizer_init=True)
    state = SimpleNamespace(obj=SimpleNamespace(top_logprobs_num=0, token_ids_logprob=[77]), **{k: [] for k in LISTS})
    meta: dict[str, Any] = {}
    for message in messages_of(120, stream, interval, monkeypatch):
        manager.convert_logprob_style(meta, state, 0, [77], False, message, 0)
    first, *others = meta["output_token_ids_logprobs"]
    assert first is None
    assert others == [[(-float(n), 77, None)] for n in range(2, 121)]


@pytest.mark.parametrize("tokens, said", [(1, []), (2, [2.0]), (3, [3.0])])
def test_hidden_states_are_their_own_tokens(tokens, said):
    """The prompt's stay on prefill."""
    req = Req("r", "", [1, 2], SamplingParams(max_new_tokens=tokens), return_hidden_states=True)
    req.transfer_prefix_len = 0
    note_transfer(req, NO_EVENTS)
    req.hidden_states += [[float(n)] for n in range(2, tokens + 1)]
    assert req.hidden_states == [[], *([float(n)] for n in range(2, tokens + 1))]
    ret = {"meta_info": {"hidden_states": req.hidden_states}}
    assert process_hidden_states_from_ret(ret, SimpleNamespace(return_hidden_states=True)) == said


def test_openais_endpoints_hand_on_what_prefill_held_alone():
    """As docs/reference.md says of ``sglext.cached_tokens_details``."""
    details = {"device": 0, "host": 0, "decode_prefix": 960, "transferred": 40}
    asked = SimpleNamespace(return_cached_tokens_details=True)
    said = process_cached_tokens_details_from_ret({"meta_info": {"cached_tokens_details": details}}, asked)
    assert said.model_dump() == {"device": 0, "host": 0}
