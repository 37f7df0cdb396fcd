"""LoRA with the flag: adapters have trees of their own, and come and go while requests run."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch
from pd import FLAG, Pair, ask, words
from safetensors.torch import save_file

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

PAGE = 16
MODULES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
PROMPTS = [words(random.Random(seed), length) for seed, length in ((1, 96), (2, 150), (3, 40))]
OPTIONS = ["--page-size", str(PAGE), "--max-lora-rank", "8", "--max-loras-per-batch", "2"]
OPTIONS += ["--enable-lora", "--lora-target-modules", *MODULES]


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> dict[str, str]:
    """Four adapters of random weights, strong enough to change every answer."""
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    heads = {"k_proj": config["num_key_value_heads"], "v_proj": config["num_key_value_heads"]}
    paths = {}
    for seed, name in enumerate("abcd"):
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for module, of in MODULES.items():
                inner = heads.get(module, config["num_attention_heads"]) * head
                wide, out = (inner, hidden) if module == "o_proj" else (hidden, inner)
                key = f"base_model.model.model.layers.{layer}.{of}.{module}"
                weights[f"{key}.lora_A.weight"] = torch.randn(8, wide, generator=generator) * 0.1
                weights[f"{key}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.1
        path = tmp_path_factory.mktemp(f"adapter-{name}")
        save_file(weights, path / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": [*MODULES], "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM"}))
        paths[name] = str(path)
    return paths


def manage(url: str, what: str, **body) -> None:
    reply = requests.post(f"{url}/{what}_lora_adapter", json=body, timeout=120)
    assert reply.status_code == 200 and reply.json()["success"], reply.text


@pytest.fixture(scope="module")
def truth(clusters, model, adapters) -> dict:
    """What the engine says without disaggregation."""
    cluster = clusters.get(model, aggregated=True, common_args=OPTIONS)
    for name, path in adapters.items():
        manage(cluster.router_url, "load", lora_name=name, lora_path=path)
    send = ask(cluster.router_url)
    found = {
        (name, i): send(prompt, 12, lora_path=name)["output_ids"]
        for name in (None, *adapters)
        for i, prompt in enumerate(PROMPTS)
    }
    assert all(len({tuple(found[name, i]) for name in (None, *adapters)}) == 5 for i in range(len(PROMPTS)))
    return found


@pytest.fixture(scope="module")
def pair(clusters, model, adapters, truth):
    paths = [f"{name}={adapters[name]}" for name in "ab"]
    pair = Pair(clusters.get(model, decode_args=[FLAG], common_args=[*OPTIONS, "--lora-paths", *paths]))
    yield pair
    pair.check_idle()


def both(pair: Pair, what: str, **body) -> None:
    for url in (pair.prefill_url, pair.decode_url):
        manage(url, what, **body)


def test_adapters_share_nothing(pair, truth):
    """Trap 14."""
    pair.flush()
    for held in (0, len(PROMPTS[0])):
        for name in (None, "a", "b"):
            answer = pair(PROMPTS[0], 12, lora_path=name)
            assert answer["output_ids"] == truth[name, 0]
            assert answer["meta_info"]["cached_tokens_details"]["decode_prefix"] == held


def test_more_adapters_at_once_than_fit_into_a_batch(pair, truth):
    asks = [(name, i) for name in (None, "a", "b") for i in range(len(PROMPTS)) for _ in range(3)]
    random.Random(1).shuffle(asks)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: pair(PROMPTS[one[1]], 12, lora_path=one[0])["output_ids"], asks))
    assert answers == [truth[one] for one in asks]


def test_adapters_come_and_go_while_requests_run(pair, adapters, truth):
    def serve(name: str | None, rounds: int) -> list:
        return [pair(PROMPTS[i], 12, lora_path=name)["output_ids"] for _ in range(rounds) for i in range(3)]

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(serve, name, 6) for name in (None, "a")]
        both(pair, "load", lora_name="c", lora_path=adapters["c"])
        assert serve("c", 2) == [truth["c", i] for i in range(3)] * 2
        both(pair, "unload", lora_name="c")
        # The same name, another adapter: nothing of the first is left.
        both(pair, "load", lora_name="c", lora_path=adapters["d"])
        answer = pair(PROMPTS[0], 12, lora_path="c")
        assert answer["output_ids"] == truth["d", 0]
        assert answer["meta_info"]["cached_tokens_details"]["decode_prefix"] == 0
        both(pair, "unload", lora_name="c")
        for name, future in zip((None, "a"), running, strict=True):
            assert future.result() == [truth[name, i] for i in range(3)] * 6
    # The engine loads an adapter that it knows again when it is asked for, and that load has a tree of its own too.
    answer = pair(PROMPTS[0], 12, lora_path="c")
    assert answer["output_ids"] == truth["d", 0]
    assert answer["meta_info"]["cached_tokens_details"]["decode_prefix"] == 0
    both(pair, "unload", lora_name="c")
    body = pair.body(PROMPTS[0], 12, lora_path="never loaded")
    for url in (pair.prefill_url, pair.decode_url):
        assert requests.post(url + "/generate", json=body, timeout=60).status_code == 400


def test_an_adapter_of_failed_and_aborted_requests_can_be_unloaded(pair, adapters, truth):
    both(pair, "load", lora_name="d", lora_path=adapters["d"])
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(pair, PROMPTS[1], 400, lora_path="d", rid=f"gone{i}", stream=False) for i in range(6)]
        while not all(future.running() or future.done() for future in running):
            pass
        for url in (pair.prefill_url, pair.decode_url):
            requests.post(url + "/abort_request", json={"abort_all": True}, timeout=30)
        for future in running:
            future.exception()
    too_long = pair.body(words(random.Random(5), 20000), 12, lora_path="d")
    for url in (pair.prefill_url, pair.decode_url):
        assert requests.post(url + "/generate", json=too_long, timeout=60).status_code == 400
    assert pair(PROMPTS[0], 12, lora_path="d")["output_ids"] == truth["d", 0]
    both(pair, "unload", lora_name="d")


def test_samples_of_an_adapter(pair, adapters, truth):
    both(pair, "load", lora_name="d", lora_path=adapters["d"])
    body = pair.body(PROMPTS[1], 12, lora_path="d")
    body["sampling_params"]["n"] = 3
    pair._workers.submit(requests.post, pair.prefill_url + "/generate", json=body, timeout=120)
    answers = requests.post(pair.decode_url + "/generate", json=body, timeout=120).json()
    assert [answer["output_ids"] for answer in answers] == [truth["d", 1]] * 3
    both(pair, "unload", lora_name="d")
