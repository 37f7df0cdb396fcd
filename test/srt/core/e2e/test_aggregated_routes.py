"""An aggregated server without any flag answers every route as it does without the package.

Status and content of what is served, and the status of what is not: there the package may say more, and has a 400 for
what is the client's fault where the engine has a 500, ends, or never answers.

One engine without the patch set is asked, then one with it: every route and method of the first, with nothing, with
what is no JSON, with JSON of other types, and those that generate with what they are for and with what they refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_pd_radix.tools.cluster import Cluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

BARE = {"SGLANG_PD_RADIX": "0", "PYTHONPATH": str(Path(__file__).parent / "bare_engine")}
# Of two servers one after the other these differ: what they tell of themselves or of a clock.
OWN = {
    "id", "rid", "created", "created_at", "completed_at", "timestamp", "modified_at", "session_id", "decode_throughput",
    "total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "e2e_latency", "request_id",
}  # fmt: skip
OWN_ENDS = ("_time", "_ts", "_latency", "_duration", "throughput", "_port", "_pid")
# What a server says about itself: only which fields there are, and the package may add some.
ITSELF = "fields"
TELL_OF_IT = ("/get_server_info", "/server_info", "/get_load", "/v1/loads", "/openapi.json", "/metrics")
# Not asked: they end a server, or need what is not there, with or without the package.
LEFT_OUT = {
    "/start_profile": "writes a trace", "/stop_profile": "nothing was started",
    "/release_memory_occupation": "ends a server without a memory saver",
    "/resume_memory_occupation": "ends a server without a memory saver",
    "/slow_down": "slows all that follows down",
    "/init_weights_send_group_for_remote_instance": "waits for others",
    "/init_weights_update_group": "waits for others",
    "/send_weights_to_remote_instance": "waits for others",
    "/freeze_gc": "is seen by nobody",
    "/dump_expert_distribution_record": "ends a server without a recorder",
    "/start_expert_distribution_record": "ends a server without a recorder",
    "/stop_expert_distribution_record": "ends a server without a recorder",
}  # fmt: skip
PROMPT = {"text": "the cat sat on the mat", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
PROMPT_IDS = {"sampling_params": {"temperature": 0, "max_new_tokens": 2}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4, "temperature": 0}
ODD: list[Any] = [{}, [], {"nonsense": 1}, {"text": 5}, {"messages": "x", "model": "m"}, {"model": "m", "prompt": {}}]


def sampling(**options: Any) -> dict[str, Any]:
    return {**PROMPT, "sampling_params": {**PROMPT["sampling_params"], **options}}


GENERATE = [
    PROMPT, {**PROMPT, "stream": True}, sampling(n=2), sampling(temperature=-1), sampling(top_p=2), sampling(n=0),
    sampling(max_new_tokens=-1), sampling(max_new_tokens=0), sampling(stop=["a", "b"]), sampling(stop=5),
    sampling(regex="[ab]+"), sampling(json_schema="{"), sampling(unheard_of=1), sampling(min_new_tokens=9),
    sampling(logit_bias={"5": 1.0}), sampling(stop_token_ids=["x"]), sampling(custom_params={"a": 1}),
    {**PROMPT, "text": ""}, {**PROMPT, "text": ["a b", "c d"]}, {**PROMPT, "text": []}, {**PROMPT, "input_ids": [5]},
    {**PROMPT_IDS, "input_ids": [400, 401]},
    {"input_ids": [-1]}, {"input_ids": [10**9]}, {"input_ids": []}, {"input_ids": ["x"]},
    {**PROMPT_IDS, "input_ids": [[400], [401]]}, {**PROMPT, "return_logprob": True, "logprob_start_len": 0},
    {**PROMPT, "return_logprob": True, "top_logprobs_num": 2},
    {**PROMPT, "return_logprob": True, "logprob_start_len": 10**6}, {**PROMPT, "top_logprobs_num": "x"},
    {**PROMPT, "lora_path": "none"}, {**PROMPT, "priority": 3}, {**PROMPT, "extra_key": "k"}, {**PROMPT, "rid": "r-1"},
    {**PROMPT, "rid": ["a", "b"]}, {**PROMPT, "bootstrap_room": 3}, {**PROMPT, "bootstrap_host": "127.0.0.1"},
    {**PROMPT, "custom_labels": {"a": "b"}}, {**PROMPT, "return_hidden_states": True}, {**PROMPT, "session_params": {}},
    {**PROMPT, "image_data": "x"}, {**PROMPT, "data_parallel_rank": 7}, {**PROMPT, "routed_dp_rank": 0},
]  # fmt: skip
COMPLETIONS = [
    {"model": "m", "prompt": "the cat", "max_tokens": 4, "temperature": 0},
    {"model": "m", "prompt": ["a", "b"], "max_tokens": 2, "temperature": 0, "n": 2, "logprobs": 1, "echo": True},
    {"model": "m", "prompt": [400, 401], "max_tokens": 2, "temperature": 0, "stream": True},
    {"model": "m", "prompt": "x", "max_tokens": -4}, {"model": "m", "prompt": "x", "n": 0},
    {"model": "m", "prompt": ""},
    {"model": "m", "prompt": "x", "suffix": "y", "temperature": 0},
    {"model": "m", "prompt": "x", "best_of": 2, "temperature": 0},
    {"model": "m", "prompt": "x", "logit_bias": {"x": 1}}, {"model": "m", "prompt": "x", "top_k": "many"},
]  # fmt: skip
CHATS = [
    CHAT, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}, {**CHAT, "n": 2},
    {**CHAT, "logprobs": True, "top_logprobs": 2}, {**CHAT, "max_tokens": 0}, {**CHAT, "temperature": "warm"},
    {**CHAT, "messages": []}, {**CHAT, "messages": [{"role": "nobody", "content": "x"}]},
    {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {**CHAT, "response_format": {"type": "json_object"}}, {**CHAT, "response_format": {"type": "nothing"}},
    {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {**CHAT, "tool_choice": "required"}, {**CHAT, "cache_salt": "s"}, {**CHAT, "priority": "high"},
    {**CHAT, "rid": "x"}, {**CHAT, "custom_logit_processor": "x"},
]  # fmt: skip
MESSAGES = {"model": "m", "max_tokens": 4, "messages": CHAT["messages"], "temperature": 0}
BODIES: dict[str, list[Any]] = {
    "/generate": GENERATE,
    "/vertex_generate": [{"instances": [{"text": "a"}]}, {"instances": [{"text": "a"}], "parameters": {"stream": 1}}],
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/invocations": CHATS[:3],
    "/v1/responses": [{"model": "m", "input": "hello", "max_output_tokens": 4, "temperature": 0}, {"input": 4}],
    "/v1/messages": [MESSAGES, {**MESSAGES, "stream": True}, {**MESSAGES, "max_tokens": "x"}],
    "/v1/messages/count_tokens": [{"model": "m", "messages": CHAT["messages"]}],
    "/v1/embeddings": [{"model": "m", "input": "x"}, {"model": "m", "input": []}],
    "/v1/score": [{"model": "m", "query": "x", "items": ["a", "b"], "label_token_ids": [400, 401]}, {"query": "x"}],
    "/v1/rerank": [{"model": "m", "query": "x", "documents": ["a", "b"]}],
    "/v1/classify": [{"model": "m", "input": "x"}],
    "/v1/tokenize": [{"model": "m", "prompt": "x y"}, {"model": "m", "prompt": 5}],
    "/v1/detokenize": [{"model": "m", "tokens": [400, 401]}, {"model": "m", "tokens": ["x"]}],
    "/encode": [{"text": "x"}], "/classify": [{"text": "x"}],
    "/api/chat": [{**CHAT, "stream": False, "options": {"num_predict": 4, "temperature": 0}}],
    "/api/generate": [{"model": "m", "prompt": "x", "stream": False, "options": {"num_predict": 4, "temperature": 0}}],
    "/api/show": [{"model": "m"}],
    "/open_session": [{"capacity_of_str_len": 100, "session_id": "s"}, {"capacity_of_str_len": "x"}],
    "/close_session": [{"session_id": "s"}, {"session_id": "never"}],
    "/abort_request": [{"rid": "never"}, {"abort_all": True}],
    "/pause_generation": [{"mode": "nothing"}],
    "/get_weights_by_name": [{"name": "never", "truncate_size": 2}],
    "/update_weights_from_disk": [{"model_path": "/never"}],
    "/update_weight_version": [{"new_version": "2"}, {"new_version": 2}],
    "/load_lora_adapter": [{"lora_name": "x", "lora_path": "/never"}],
    "/unload_lora_adapter": [{"lora_name": "x"}],
    "/parse_function_call": [{"text": "x", "tools": [], "tool_call_parser": "none"}],
    "/separate_reasoning": [{"text": "x", "reasoning_parser": "none"}],
    "/set_internal_state": [{"server_args": {}}, {"server_args": {"pp_max_micro_batch_size": 1}}],
    "/hicache/storage-backend": [{"hicache_storage_backend": "file"}],
}  # fmt: skip


def routes(url: str) -> list[tuple[str, str]]:
    """Method and path of each route, by what the server says of itself."""
    paths = requests.get(url + "/openapi.json", timeout=30).json()["paths"]
    return sorted((method.upper(), path) for path, methods in paths.items() for method in methods)


# What the engine by itself does not survive, or never answers.
ENDED, SILENT = "the server has ended", "no answer"
WAIT_S = 15


def answers(cluster: Cluster, asked: list[tuple[str, str]]) -> dict[str, Any]:
    """What is said to each route, by method, path and body; a server that has ended is started again."""
    found: dict[str, Any] = {}

    def ask(method: str, path: str, name: str, **content: Any) -> None:
        at = cluster.router_url + re.sub(r"\{[^}]*\}", "never", path)
        try:
            found[f"{method} {path} {name}"] = said(requests.request(method, at, timeout=WAIT_S, **content), path)
        except requests.Timeout:
            found[f"{method} {path} {name}"] = SILENT
        except requests.ConnectionError:
            found[f"{method} {path} {name}"] = ENDED
            cluster.kill("engine")
            cluster.restart("engine")

    for method, path in asked:
        if path in LEFT_OUT:
            continue
        ask(method, path, "nothing")
        if method == "GET" or path in ("/flush_cache", "/clear_hicache_storage_backend"):
            continue
        ask(method, path, "no JSON", data="no {JSON")
        for body in [*BODIES.get(path, ()), *ODD]:
            ask(method, path, json.dumps(body), json=body)
        # Whatever it was, what follows is served.
        requests.post(cluster.router_url + "/continue_generation", json={}, timeout=30)
    return found


def said(reply: requests.Response, path: str) -> Any:
    """Status, type and content, less what differs between any two servers."""
    kind = reply.headers.get("content-type", "").split(";")[0]
    if kind == "text/event-stream":
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        return [reply.status_code, kind, streamed([_json(event) for event in events if event != "[DONE]"])]
    content = _json(reply.text)
    if path in TELL_OF_IT and reply.status_code == 200:
        return [200, ITSELF, sorted(content) if isinstance(content, dict) else []]
    return [reply.status_code, kind, less_own(content)]


def streamed(events: list[Any]) -> Any:
    """What has come in all, and how it ended: how many tokens come at a time is a matter of time."""
    last = events[-1] if events else None
    if isinstance(last, dict) and "meta_info" in last:
        # Each has all that the one before had.
        return less_own(last)
    return ["".join(pieces(events)), less_own(last)]


def pieces(told: Any) -> Iterator[str]:
    """The text in events of a stream, in order."""
    if isinstance(told, list):
        for one in told:
            yield from pieces(one)
    elif isinstance(told, dict):
        for key, value in told.items():
            if key in ("content", "text") and isinstance(value, str):
                yield value
            else:
                yield from pieces(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def less_own(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            key: "own" if key in OWN or key.endswith(OWN_ENDS) else less_own(value) for key, value in content.items()
        }
    if isinstance(content, list):
        return [less_own(value) for value in content]
    if isinstance(content, float):
        return round(content, 3)
    if isinstance(content, str):
        # Names of requests, and addresses of objects.
        return re.sub(r"\b[0-9a-f]{32}\b|0x[0-9a-f]+|:\d{4,5}\b", "own", content)
    return content


def goes_for(bare: Any, package: Any) -> bool:
    """Whether the package may answer like that where the engine by itself answers so."""
    if bare in (ENDED, SILENT) or bare == package:
        return True
    if package in (ENDED, SILENT):
        return False
    (status, kind, content), (status_here, _, content_here) = bare, package
    if status == 200 == status_here and kind == ITSELF:
        return set(content) <= set(content_here)
    return status >= 400 and status_here in ((status, 400) if status == 500 else (status,))


def test_every_route_answers_as_without_the_package(model, tmp_path):
    found, options = [], ["--page-size", "16", "--max-total-tokens", "8192", "--served-model-name", "m"]
    for name, env in (("bare", BARE), ("package", {})):
        logs = tmp_path / name
        with Cluster(model, aggregated=True, common_args=options, env=env, log_dir=logs, timeout_s=280) as cluster:
            asked = routes(cluster.router_url)
            found.append((asked, answers(cluster, asked)))
    (routes_bare, bare), (routes_package, package) = found
    assert len(bare) > 300 and sum(told[0] == 200 for told in bare.values()) > 60
    assert routes_bare == routes_package
    differ = {asked: (told, package[asked]) for asked, told in bare.items() if not goes_for(told, package[asked])}
    assert not differ, json.dumps(differ, indent=1)
