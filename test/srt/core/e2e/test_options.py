"""No request ends a worker or costs another its answer (I9): every option of the engine's request classes, through a
pair, with values that are right and wrong. What is refused is refused by both workers."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, Pair, generate_body, words
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(900)

PROMPT = words(random.Random(3), 60)
# Prefill takes prompts of this length, decode does not.
BEYOND_DECODE = words(random.Random(4), 5000)
# Prefill computes it in parts.
BEYOND_CHUNK = words(random.Random(5), 3000)
NAN = math.nan


# A processor travels pickled, and by value only from a program's main module.
MAKE = """
import dill, json

class Raises:
    def __call__(self, logits, custom_param_list=None):
        raise RuntimeError("boom")

class Forces:
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            if len(params["__req__"].output_ids) == params["after"]:
                kept = row[params["token"]].clone()
                row.fill_(-float("inf"))
                # Also where the grammar has masked it.
                row[params["token"]] = kept.nan_to_num(0, 0, 0)
        return logits

print(*(json.dumps({"callable": dill.dumps(made).hex()}) for made in (Raises, Forces)), sep="\\n")
"""
RAISES, FORCES = subprocess.run(
    [sys.executable, "-c", MAKE], capture_output=True, text=True, check=True
).stdout.splitlines()


@pytest.fixture(scope="module", params=["on", pytest.param("off", marks=pytest.mark.thorough)])
def flag(request):
    return [FLAG] if request.param == "on" else []


@pytest.fixture
def cluster(clusters, model, flag):
    if clusters.cluster is not None and clusters.cluster.dead():
        # Each test tells of its own.
        clusters.stop()
    return clusters.get(
        model,
        decode_args=[*flag, "--max-total-tokens", "4096"],
        common_args=["--page-size", "16", "--enable-custom-logit-processor"],
        # Nobody comes for a request whose address of prefill is wrong. And a decode worker without the flag, whose wire
        # is the engine's, is not told of a failure.
        prefill_env={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "12"},
        decode_env={} if flag else {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "12"},
    )


class Door:
    """Sends one body to both workers of a pair, as the router does, but whatever is in it."""

    def __init__(self, cluster):
        self.cluster, self.pair = cluster, Pair(cluster)
        self._workers = ThreadPoolExecutor(8)
        self.truth = self.ask(self.body())[1].json()["output_ids"]

    def body(self, **more) -> dict:
        return {**generate_body(PROMPT, 4), **more}

    def sampling(self, **params) -> dict:
        body = self.body()
        body["sampling_params"].update(params)
        return body

    def post(self, url: str, path: str, body: dict) -> requests.Response:
        # Not `json=`, which refuses NaN.
        headers = {"Content-Type": "application/json"}
        return requests.post(url + path, data=json.dumps(body), headers=headers, timeout=30)

    def ask(
        self, body: dict, path: str = "/generate", decode_only: dict | None = None
    ) -> tuple[requests.Response, requests.Response]:
        """What prefill and decode say. decode_only: options that the body has for decode."""
        many = next((len(body[k]) for k in ("input_ids", "text", "prompt") if _is_batch(body.get(k))), 0)
        rooms = [random.randrange(1, 2**62) for _ in range(many or 1)]
        port = self.pair.cluster.processes[0].bootstrap_port
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": rooms[0]}
        if many:
            at = {"bootstrap_host": ["127.0.0.1"] * many, "bootstrap_port": [port] * many, "bootstrap_room": rooms}
        body = {**at, **body}
        prefill = self._workers.submit(self.post, self.pair.prefill_url, path, body)
        decode = self.post(self.pair.decode_url, path, {**body, **(decode_only or {})})
        return prefill.result(), decode

    def check(self) -> None:
        """Both workers live, and another request gets its answer."""
        assert self.cluster.dead() is None
        assert self.ask(self.body())[1].json()["output_ids"] == self.truth


def _is_batch(prompts) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (list, str))


@pytest.fixture
def door(cluster):
    door = Door(cluster)
    yield door
    door.check()
    door.pair.check_idle()


def refused(replies, message: str) -> None:
    for reply in replies:
        assert reply.status_code == 400 and message in reply.text, (reply.status_code, reply.text)


# ---- what was seen to end a worker ----


def test_prompts_of_a_batch_have_keys_of_their_own(door):
    prefill, decode = door.ask(door.body(input_ids=[PROMPT, PROMPT], extra_key=["a", "b"]))
    assert prefill.status_code == 200
    assert [answer["output_ids"] for answer in decode.json()] == [door.truth] * 2
    refused(door.ask(door.body(extra_key=["a"])), "extra_key")


@pytest.mark.parametrize("token", [-1, 10**6, 2**70])
def test_token_ids_outside_the_vocabulary(door, token):
    refused(door.ask(door.body(input_ids=[*PROMPT, token])), "input_ids")


def test_structured_output(door):
    schema = json.dumps({"enum": ["yes", "no"]})
    _, decode = door.ask(door.sampling(json_schema=schema, ignore_eos=False, max_new_tokens=20))
    assert json.loads(decode.json()["text"]) in ("yes", "no")
    _, decode = door.ask(door.sampling(regex="[0-9]{3}", ignore_eos=False, max_new_tokens=20))
    assert decode.json()["text"].isdecimal() and len(decode.json()["text"]) == 3
    _, decode = door.ask(door.sampling(ebnf='root ::= "yes" | "no"', ignore_eos=False))
    assert decode.json()["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "params", [{"regex": "([0-9"}, {"json_schema": "{nope"}, {"ebnf": "nope"}, {"structural_tag": '{"x": 1}'}]
)
def test_a_grammar_that_cannot_be_compiled(door, params):
    refused(door.ask(door.sampling(**params)), "Failed to compile")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_schema_that_ends_its_compiler(door, path):
    """400,000 levels of nesting ended both workers, 1000 took 52 s."""
    levels = 400_000 if path == "/generate" else 300
    schema = '{"const":' + "[" * levels + "]" * levels + "}"
    if path == "/generate":
        for params in {"json_schema": schema}, {"structural_tag": schema}:
            refused(door.ask(door.sampling(**params)), "at most 100 deep")
        return
    body = {"model": "m", "prompt": PROMPT, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    del body["prompt" if "chat" in path else "messages"]
    given = json.loads(schema)
    for kind in (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": given}},
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": given}},
    ):
        refused(door.ask({**body, "response_format": kind}, path), "at most 100 deep")


def test_a_grammar_that_allows_no_token(door, flag):
    with ThreadPoolExecutor(2) as pool:
        wrong, right = pool.map(door.ask, [door.sampling(ebnf="root ::= root", temperature=1), door.body()])
    # Without the flag decode waits until its time is over.
    refused(wrong if flag else wrong[:1], "No token can be chosen")
    assert wrong[1].status_code >= 400
    assert right[1].json()["output_ids"] == door.truth


def test_alternatives_of_tokens(door):
    ask = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0, "token_ids_logprob": [5, 6]}
    prefill, decode = door.ask(door.body(**ask))
    tops = decode.json()["meta_info"]["output_top_logprobs"]
    assert [len(top) for top in tops] == [3] * 4
    # The most likely is the one that was chosen, also the first, which came from prefill.
    assert [top[0][1] for top in tops] == door.truth == decode.json()["output_ids"]
    assert len(prefill.json()["meta_info"]["input_top_logprobs"]) == len(PROMPT)
    refused(door.ask(door.body(**{**ask, "top_logprobs_num": 129})), "top_logprobs_num")
    refused(door.ask(door.body(**{**ask, "logprob_start_len": 500})), "logprob_start_len")


@pytest.mark.parametrize("top", [0, 1])
def test_logprobs_that_only_decode_is_asked_for(door, top):
    """Of the first token there are those that prefill was asked for; the others were those of the client before."""
    asked = {"return_logprob": True, "top_logprobs_num": 3}
    whole = door.ask(door.body(**asked))[1].json()["meta_info"]
    # Each metadata buffer has another client's.
    others = door.ask(door.body(input_ids=[words(random.Random(7), 9)] * 80, **asked))[1]
    assert others.status_code == 200
    on_prefill = {"return_logprob": True, "top_logprobs_num": top} if top else {}
    for _ in range(3):
        meta = door.ask(door.body(**on_prefill), decode_only=asked)[1].json()["meta_info"]
        first, *rest = meta["output_token_logprobs"]
        tops, *rest_tops = meta["output_top_logprobs"]
        assert first[1] == door.truth[0] and [one[1] for one in rest] == door.truth[1:]
        assert [[one[1] for one in ones] for ones in rest_tops] == [
            [one[1] for one in ones] for ones in whole["output_top_logprobs"][1:]
        ]
        if top:
            assert [tops, first] == [whole["output_top_logprobs"][0][:1], whole["output_token_logprobs"][0]]
        else:
            assert first[0] is None and tops == [[None, door.truth[0], None]]
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = door.ask(body, "/v1/completions", {"logprobs": 3})[1].json()["choices"][0]["logprobs"]
    assert answer["token_logprobs"][0] is None and [*answer["top_logprobs"][0].values()] == [None]
    assert len(answer["top_logprobs"][1]) == 3
    # The engine's form of a chat answer has a place for numbers only.
    body = {"model": "m", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "temperature": 0}
    for more in {}, {"top_logprobs": 2}, {"stream": True}, {"stream": True, "top_logprobs": 2}:
        decode = door.ask({**body, **more}, "/v1/chat/completions", {"logprobs": True})[1]
        assert json.loads(decode.text)["code"] == 400 and "validation error" in decode.text


def test_logprobs_of_chosen_tokens_beside_a_request_without(door):
    asks = [door.body(return_logprob=True, token_ids_logprob=[5, 6]), door.body(return_logprob=True)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(door.ask, asks * 4))
    assert [decode.json()["output_ids"] for _, decode in replies] == [door.truth] * 8


@pytest.mark.parametrize("params", [{}, {"custom_params": {"a": 1}}])
def test_a_logit_processor_that_raises_costs_only_its_own_request(door, flag, params):
    wrong = {**door.sampling(**params), "custom_logit_processor": RAISES}
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(door.ask, [wrong, door.body(), wrong, door.body()]))
    for prefill, decode in replies[::2]:
        refused([prefill, decode] if flag else [prefill], "Raises failed: RuntimeError: boom")
        assert decode.status_code >= 400
    assert [decode.json()["output_ids"] for _, decode in replies[1::2]] == [door.truth] * 2
    refused(door.ask(door.body(custom_logit_processor='{"callable": "00"}')), "cannot be served")


@pytest.mark.parametrize("after", [0, 1, 3], ids=["prefill", "decode", "last"])
@pytest.mark.parametrize("prompt", [PROMPT, BEYOND_CHUNK], ids=["short", "chunked"])
def test_a_token_that_is_forced_and_that_the_grammar_rejects(door, prompt, after):
    """The first is prefill's: the worker ended."""
    forced = {"custom_params": {"token": PROMPT[0], "after": after}, "ignore_eos": False}
    wrong = {**door.sampling(regex="[0-9]{9}", **forced), "custom_logit_processor": FORCES, "input_ids": prompt}
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(door.ask, [wrong, door.body(), wrong, door.body()]))
    for prefill, decode in replies[::2]:
        refused([decode] if after else [prefill, decode], f"grammar of the request rejects token {PROMPT[0]}")
    assert [decode.json()["output_ids"] for _, decode in replies[1::2]] == [door.truth] * 2


def test_a_grammar_that_leaves_no_token_is_the_clients_error(door, flag):
    """Stop tokens are forbidden until there are so many tokens, and the regex allows nothing else."""
    prefill, decode = door.ask(door.sampling(regex="()", min_new_tokens=3, ignore_eos=False))
    refused([prefill, decode] if flag else [prefill], "")


@pytest.mark.parametrize("prompt", [{"input_ids": BEYOND_DECODE}, {"text": "ready " * 5000, "input_ids": None}])
def test_a_prompt_beyond_decodes_limit_is_refused_by_both(door, prompt):
    body = {key: value for key, value in door.body(**prompt).items() if value is not None}
    refused(door.ask(body), "this worker takes fewer than")


def test_the_router_counts_no_refusal_as_a_failure(door):
    url = door.cluster.router_url
    for _ in range(6):
        assert door.post(url, "/generate", door.body(input_ids=BEYOND_DECODE)).status_code == 400
    assert door.post(url, "/generate", door.body()).json()["output_ids"] == door.truth


def test_a_prompt_of_a_batch_that_decode_refuses_ends_the_others(door):
    prefill, decode = door.ask({"text": ["ready", "ready " * 5000], "sampling_params": {"max_new_tokens": 4}})
    refused([decode], "this worker takes fewer than")
    assert prefill.status_code == 400


def test_a_rid_in_use_leaves_nobody_waiting(door):
    body = {**door.sampling(max_new_tokens=300), "rid": "twice"}
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(door.ask, [body, body]))
    # Each worker may have taken another one; then neither is answered, and nobody waits.
    assert any("Duplicate request IDs" in reply.text for pair in replies for reply in pair)


def test_a_stream_interval_of_0_is_none(door):
    for params in ({"stream_interval": 0}, {"stream_interval": "1"}):
        _, decode = door.ask(door.sampling(**params))
        assert decode.json()["output_ids"] == door.truth


# ---- every option ----

# Values that any option may be given.
ANY = [None, "", "x", -1, 0, 1, 1.5, NAN, 10**30, True, [], ["x"], [1], [[1]], {}, {"a": 1}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}

# Besides these; of all options, which the engine names.
SAMPLING: dict[str, list] = {
    "max_new_tokens": [5, 10**9],
    "stop": ["k", ["k", "l"], "", [["k", "l"]]],
    "stop_token_ids": [[5], [10**9], [-1]],
    "stop_regex": ["a+", "(", ["k", "["], "(?<=a*)b"],
    "temperature": [0.7, 1e-7, 1e-5, 1e30, 10**400],
    "top_p": [0.5, 1e-9],
    "top_k": [5, 2**31 - 1, 2**31, 2**63],
    "min_p": [0.5],
    "frequency_penalty": [2, -2],
    "presence_penalty": [2, -2],
    "repetition_penalty": [1e-9, 2],
    "min_new_tokens": [3, 7],
    "n": [2, "2"],
    "json_schema": ["{}", "{", '{"type": "no"}', "$$ANY$$"],
    "regex": ["a+", "(", "(a*)*b"],
    "ebnf": ['root ::= "a"', "root ::= root", "::"],
    "structural_tag": ["{}", "{", '{"structures": [], "triggers": []}', '{"structures": [{}], "triggers": ["a"]}'],
    "custom_params": [{"__req__": 5}],
    "stream_interval": [5],
    "logit_bias": [{"5": 100}, {"5": 1e30}, {"-1": 1}, {"10000000": 1}, {"x": 1}, {"5": NAN}, {"5": -math.inf}],
    "sampling_seed": [5, 2**63 - 1, 2**63],
}
GENERATE: dict[str, list] = {
    "text": [["a", ""]],
    "input_ids": [[10**9], [-1], [2**70], [[1, 2], [3]], [[1, 2], []], [[1], 5]],
    "input_embeds": [[[0.5, 0.5]]],
    "image_data": ["a.png"],
    "video_data": ["a.mp4"],
    "audio_data": ["a.wav"],
    "sampling_params": [[{}, {}], {"no": 1}],
    "return_logprob": [[True]],
    "logprob_start_len": [5, 59, 60, 61],
    "top_logprobs_num": [128, 129, [1]],
    "token_ids_logprob": [[5], [-1], [10**9], [[5], [6]]],
    "session_params": [{"id": "none"}, {"no": 1}],
    "custom_logit_processor": [RAISES, '{"callable": "00"}', "{"],
    "bootstrap_host": ["256.0.0.1", "127.0.0.1:5", "[::"],
    "bootstrap_port": [65536, 2**31],
    "bootstrap_room": [-(2**63), 2**63, 2**64, [5]],
    "routed_dp_rank": [5],
    "disagg_prefill_dp_rank": [5],
    "data_parallel_rank": [5],
    "priority": [5, 2**63],
    "extra_key": ["a", ["a", "b"]],
    "custom_labels": [{"a": "b"}],
    "rid": ["a", ["a"], ["a", "b"]],
}
COMPLETION: dict[str, list] = {
    "prompt": [[5, -1], [10**9], ["a", ""], [[5], [6]], [[]]],
    "best_of": [3],
    "frequency_penalty": [3],
    "logit_bias": [{"5": 100}, {"x": 1}, {"5": NAN}],
    "logprobs": [5, 129],
    "max_tokens": [5, 10**9],
    "n": [2],
    "presence_penalty": [3],
    "seed": [2**63],
    "stop": ["k"],
    "stream_options": [{"include_usage": True}],
    "suffix": ["a"],
    "temperature": [2, 1e-5],
    "top_p": [0.5],
    "top_k": [5, 2**31],
    "min_p": [0.5],
    "min_tokens": [3],
    "json_schema": ["{}", "{"],
    "regex": ["a+", "("],
    "ebnf": ['root ::= "a"', "::"],
    "repetition_penalty": [2],
    "stop_token_ids": [[5], [10**9]],
    "stop_regex": ["a+", "("],
    "session_params": [{"id": "none"}],
    "response_format": [SCHEMA, {"type": "json_object"}, {"type": "structural_tag", "structures": [], "triggers": []}],
    "custom_params": [{"a": 1}],
    "custom_logit_processor": [RAISES, "{"],
    "bootstrap_port": [65536],
    "bootstrap_room": [2**64],
    "routed_dp_rank": [5],
    "disagg_prefill_dp_rank": [5],
    "data_parallel_rank": [5],
    "rid": ["a"],
    "extra_key": ["a", ["a", "b"]],
    "cache_salt": ["a", ["a", "b"]],
    "priority": [2**63],
    "custom_labels": [{"a": "b"}],
}
CHAT: dict[str, list] = {
    **{name: values for name, values in COMPLETION.items() if name in ChatCompletionRequest.model_fields},
    "messages": [[{"role": "user"}], [{"role": "x", "content": "a"}], [{"role": "user", "content": ""}]],
    "top_logprobs": [5, 129],
    "max_completion_tokens": [5, 10**9],
    "tools": [[TOOL], [TOOL, TOOL]],
    "tool_choice": ["none", "required", {"type": "function", "function": {"name": "f"}}],
    "reasoning_effort": ["low"],
    "chat_template_kwargs": [{"a": 1}],
}


def variants(endpoint: str, door: Door, name: str, value):
    """(path, body) of requests in which option ``name`` has ``value``."""
    if endpoint == "sampling":
        # A space comes soon, whatever the length.
        yield "/generate", door.sampling(**{"stop": " ", name: value})
        yield "/generate", {**door.sampling(**{"stop": " ", "temperature": 1, name: value}), "stream": True}
    elif endpoint == "generate":
        for more in ({"return_logprob": True}, {"input_ids": [PROMPT, PROMPT[:9]]}):
            body = {**door.body(**more), name: value}
            if name == "text":
                del body["input_ids"]
            yield "/generate", body
    elif endpoint == "completions":
        yield "/v1/completions", {"model": "m", "prompt": "ready", "max_tokens": 4, "stop": " ", name: value}
    else:
        yield (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stop": " ", name: value},
        )


TABLES = {"sampling": SAMPLING, "generate": GENERATE, "completions": COMPLETION, "chat": CHAT}
NAMES = {
    "sampling": [*inspect.signature(SamplingParams).parameters],
    "generate": [field.name for field in dataclasses.fields(GenerateReqInput)],
    "completions": [*CompletionRequest.model_fields],
    "chat": [*ChatCompletionRequest.model_fields],
}


@pytest.mark.thorough
@pytest.mark.parametrize(("endpoint", "name"), [(endpoint, name) for endpoint in NAMES for name in NAMES[endpoint]])
def test_an_option(door, flag, endpoint, name):
    sent = [
        (value, path, body)
        for value in itertools.chain(TABLES[endpoint].get(name, ()), ANY)
        for path, body in variants(endpoint, door, name, value)
    ]

    def send(path: str, body: dict) -> str:
        """What is wrong with the answers. Which they are is the engine's business."""
        try:
            door.ask(body, path)
        except requests.Timeout as e:
            # Without the flag prefill waits for as long as the engine does for a decode worker that never comes.
            return repr(e) if flag else ""
        except requests.exceptions.ChunkedEncodingError:
            # The engine breaks a stream off for what is no ValueError.
            return ""
        except requests.RequestException as e:
            return repr(e)
        return ""

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda item: send(*item[1:]), sent))
    wrong = [(value, path, got) for (value, path, _), got in zip(sent, replies, strict=True) if got]
    assert not wrong and door.cluster.dead() is None
