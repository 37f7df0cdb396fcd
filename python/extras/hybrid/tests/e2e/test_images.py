"""Qwen3.5, with and without images: what it says is what the aggregated engine and transformers say.

An image is to the tree what the engine makes of it, tokens that no text has and that differ from image to image; their
places are counted by M-RoPE in another way than they stand in the prompt. The text's tests are those of test_oracle.py,
with the engine's default strategy for states and pages of 1, and with `extra_buffer` and pages of 64.
"""

from __future__ import annotations

import base64
import io
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
import torch
from e2e_fixtures import aggregated_answers
from pd import FLAG, TP2, Pair, conversations, counter, log_of
from test_hybrid import EXTRA_BUFFER, SLOTS, with_states
from test_oracle import (  # noqa: F401
    off,
    on,
    test_abort_at_every_stage,
    test_conversations_through_the_router,
    test_conversations_with_the_flag,
    test_conversations_without_the_flag,
    test_every_hit_length,
)
from test_speculative_pairs import CHAIN, V1, V2

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

# Of 32 x 32 pixels one becomes a token.
WIDTH, HEIGHT = 320, 256
IMAGE_TOKENS = WIDTH // 32 * (HEIGHT // 32)
ENGLISH = "the house was near a river and people came to see what could be found under its old walls again".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "seeing", ModelShape(arch="qwen3.5")))


@pytest.fixture(scope="module")
def truth(clusters, model):
    answers = aggregated_answers(clusters, model)
    url = clusters.cluster.router_url
    return answers | {"images": several_with_images(lambda messages, *more: chat(url, messages, *more))}


@pytest.fixture(scope="module", params=[1, 64])
def page(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    return with_states(clusters, model, backend, page)


# ---- talking about images ----


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def picture(seed: int) -> dict:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels(seed)).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(rnd: random.Random, count: int) -> dict:
    return {"type": "text", "text": " ".join(rnd.choice(ENGLISH) for _ in range(count))}


def question(seed: int, image: int) -> list[dict]:
    rnd = random.Random(seed)
    return [{"role": "user", "content": [text(rnd, 90), picture(image), text(rnd, 20)]}]


def chat_reply(url: str, messages: list[dict], max_new: int = 12, **more) -> requests.Response:
    body = {"model": "any", "messages": messages, "max_tokens": max_new, "temperature": 0, "ignore_eos": True, **more}
    return requests.post(url + "/v1/chat/completions", json=body, timeout=120)


def chat(url: str, messages: list[dict], max_new: int = 12, **more) -> dict:
    reply = chat_reply(url, messages, max_new, **more)
    reply.raise_for_status()
    return reply.json()


def pair_chat(pair: Pair):
    """`chat` with one prefill and one decode worker."""

    def send(messages: list[dict], max_new: int = 12) -> dict:
        more = {name: value for name, value in pair.body([], 1).items() if name.startswith("bootstrap")}
        first = pair._workers.submit(chat, pair.prefill_url, messages, max_new, **more)
        answer = chat(pair.decode_url, messages, max_new, **more)
        first.result()
        return answer

    return send


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def with_images(send, client: int, turns: int = 3, max_new: int = 12) -> list[str]:
    """A conversation whose turns have an image each but the second; two clients each share their words, not images."""
    rnd = random.Random(client // 2)
    messages = question(client // 2, 100 + client)
    answers = []
    for turn in range(turns):
        answers.append(said(send(messages, max_new)))
        more = [text(rnd, 10), *([picture(200 + 10 * turn + client)] if turn else [])]
        messages = [*messages, {"role": "assistant", "content": answers[-1]}, {"role": "user", "content": more}]
    return answers


def several_with_images(send, clients: int = 4) -> list[list[str]]:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda client: with_images(send, client), range(clients)))


# ---- the tests ----


def test_conversations_with_images(on, off, cluster, truth):  # noqa: F811
    """With the flag, without it, through the router; images of the same size under the same words are told apart."""
    assert len({tuple(answers) for answers in truth["images"]}) == 4
    for pair in (on, off):
        pair.flush()
        assert several_with_images(pair_chat(pair)) == truth["images"]
        # Again, with all of it in the tree or nothing.
        assert several_with_images(pair_chat(pair)) == truth["images"]

    def through_gateway(messages: list[dict], *more: int) -> dict:
        # It sends nobody a model that no worker serves.
        return chat(cluster.router_url, messages, *more, model=cluster.model_path)

    assert several_with_images(through_gateway) == truth["images"]


def test_an_image_is_a_hit_and_another_is_not(on, page):  # noqa: F811
    on.flush()
    send, name = pair_chat(on), "sglang:decode_prefix_hit_tokens_total"

    def ask(messages: list[dict]) -> tuple[int, int]:
        """Tokens of the prompt, and those that decode held."""
        hit = counter(on.decode_url, name)
        usage = send(messages)["usage"]
        return usage["prompt_tokens"], int(counter(on.decode_url, name) - hit)

    length, held = ask(question(1, 1))
    assert held == 0 and length > IMAGE_TOKENS + 110
    assert ask(question(1, 1)) == (length, length // page * page)
    # The words before the image are the same, the image is not, nor is what comes after it.
    before = ask(question(1, 2))
    assert before[0] == length and 0 < before[1] <= length - IMAGE_TOKENS - 20 and before[1] % page == 0
    assert ask(question(1, 2)) == (length, length // page * page)
    assert ask(question(1, 1)) == (length, length // page * page)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_an_image_that_one_worker_cannot_read(on, worker, n):  # noqa: F811
    """As when each fetches it for itself: the other is told, and the client need not wait for its time-out."""
    good, bad = question(1, 1), question(1, 1)
    # All of it is in the error.
    bad[0]["content"][1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    more = {name: value for name, value in on.body([], 1).items() if name.startswith("bootstrap")}
    start = time.monotonic()
    first = on._workers.submit(chat_reply, on.prefill_url, bad if worker == "prefill" else good, n=n, **more)
    told = {"decode": chat_reply(on.decode_url, bad if worker == "decode" else good, n=n, **more)}
    told["prefill"] = first.result()
    assert time.monotonic() - start < 20
    assert told.pop(worker).status_code == 500
    (other,) = told.values()
    assert other.status_code >= 400 and "AAAA" in other.text and len(other.text) < 3000


def test_the_truth_is_what_transformers_says(truth, model):
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    reference = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(model)

    def answer(messages: list[dict], image: int) -> str:
        # What the chat template calls an image is not what a client calls it.
        contents = [[{**p, "type": p["type"].removesuffix("_url")} for p in m["content"]] for m in messages]
        asked = [{**m, "content": content} for m, content in zip(messages, contents, strict=True)]
        prompt = processor.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[prompt], images=[Image.fromarray(pixels(image))], return_tensors="pt")
        with torch.no_grad():
            found = reference.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
        return processor.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :])

    for client, answers in enumerate(truth["images"]):
        assert answer(question(client // 2, 100 + client), 100 + client).strip() == answers[0].strip()


def test_answers_survive_eviction_and_retraction(clusters, model, truth, backend):
    """Decode 0 has the flag, decode 1 not; their pools hold about three of the long answers."""
    few = ["--num-reserved-decode-tokens", "16", "--max-total-tokens", "1024"]
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *SLOTS]
    workers = {"prefill_args": EXTRA_BUFFER, "decode": 2, "decode_args": [[*few, FLAG, *EXTRA_BUFFER], few]}
    cluster = clusters.get(model, common_args=common, backend=backend, **workers)
    for decode in (0, 1):
        pair = Pair(cluster, decode=decode)
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert "Retract requests" in log_of(cluster, pair.decode_url)
        assert several_with_images(pair_chat(pair)) == truth["images"]
        pair.check_idle()


@pytest.mark.parametrize(
    "version, arch", [(V1, "qwen3.5-mtp"), (V2, "qwen3.5-moe-mtp")], ids=["v1 dense", "v2 with experts"]
)
def test_images_and_drafts(clusters, tmp_path_factory, backend, version, arch):
    """With the draft in the model, whose tokens are also those of images; as many of its proposals are accepted."""
    model = str(make_model(tmp_path_factory.mktemp("model") / "drafting", ModelShape(arch=arch)))
    alone = clusters.get(model, aggregated=True, common_args=["--page-size", "1"]).router_url
    expected = several_with_images(lambda messages, *more: chat(alone, messages, *more))
    cluster = clusters.get(
        model,
        prefill_args=EXTRA_BUFFER,
        decode=2,
        decode_args=[[FLAG, *EXTRA_BUFFER], ["--disable-radix-cache"]],
        decode_env=version,
        prefill_env=V2,
        common_args=["--speculative-algorithm", "EAGLE", *CHAIN, "--page-size", "64", *SLOTS],
        backend=backend,
    )
    accepted = []
    for decode in (0, 1):
        pair = Pair(cluster, decode=decode)
        assert several_with_images(pair_chat(pair)) == expected
        counts = []
        for image in (1, 2, 1):
            # As /generate is asked, which says how many were accepted.
            content = question(1, image)[0]["content"]
            prompt = content[0]["text"] + "<|vision_start|><|image_pad|><|vision_end|>" + content[2]["text"]
            for _ in range(2):
                more = {"text": prompt, "image_data": [content[1]["image_url"]["url"]], "input_ids": None}
                answer = pair([], 24, **more)
                counts.append((answer["text"], answer["meta_info"]["spec_accept_histogram"]))
                prompt += answer["text"] + " and then"
        accepted.append(counts)
        pair.check_idle()
    assert accepted[0] == accepted[1]
    drafts = [sum(histogram[1:]) for _, histogram in accepted[0]]
    assert sum(drafts) > len(drafts), "the draft must be good enough to show when it gets worse"


def test_tensor_parallel_sizes(clusters, model, truth, backend):
    common = ["--page-size", "64", "--chunked-prefill-size", "512", *SLOTS, *EXTRA_BUFFER, *TP2]
    cluster = clusters.get(model, backend=backend, decode_args=[FLAG], common_args=common)
    pair = Pair(cluster)
    for _ in range(2):
        assert conversations(pair) == truth["conversations"]
        assert several_with_images(pair_chat(pair)) == truth["images"]
    pair.check_idle()
