"""The engine's own regression kits for caches, structured output and aborts, against a pair with the flag.

They are written for one server that answers /generate, /server_info and /flush_cache. They ask for batches, and those
for regular expressions and grammars for n = 3. `Front` is that server: it gives each request to both workers of the
pair, as the router does, and says the page size, which the router does not know.
Data sets come from here, no kit asks the network for any. What a kit takes from its own model is bounded: weights drawn
at random close no string by themselves.
"""

from __future__ import annotations

import json
import random
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from pd import FLAG, Pair, words
from sglang.test import kl_test_utils
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

PAGE = 16
VOCAB = 4096


class Front:
    """One address for a pair."""

    def __init__(self, pair: Pair):
        self.pair, self.process = pair, self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):
                self.answer(handler, 200, {"page_size": PAGE, "disable_radix_cache": False})

            def do_POST(handler):
                body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or b"{}")
                self.answer(handler, *self.post(handler.path, body))

            def log_message(handler, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def poll(self):
        """As of a process: None while both workers live."""
        return self.pair.cluster.dead()

    def answer(self, handler, status: int, content) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def post(self, path: str, body: dict):
        urls = (self.pair.prefill_url, self.pair.decode_url)
        if path == "/flush_cache":
            self.pair.flush()
            return 200, {}
        if path == "/abort_request":
            for url in urls:
                requests.post(url + path, json=body, timeout=30)
            return 200, {}
        prefill, decode = self.both(path, body)
        if path != "/generate" or body.get("stream") or not decode.ok:
            return decode.status_code, decode.content
        return 200, merged(prefill, decode)

    def both(self, path: str, body: dict):
        """What prefill and decode say to one request, with a room for each of its prompts."""
        prompts = body.get("text") or body.get("input_ids") or [0]
        size = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
        at = {
            "bootstrap_host": ["127.0.0.1"] * size,
            "bootstrap_port": [self.pair.cluster.processes[0].bootstrap_port] * size,
            "bootstrap_room": [random.randrange(1, 2**62) for _ in range(size)],
        }
        body = {**body, **(at if size > 1 else {name: values[0] for name, values in at.items()})}
        found: list[requests.Response] = []
        prefill = threading.Thread(
            target=lambda: found.append(requests.post(self.pair.prefill_url + path, json=body, timeout=300))
        )
        prefill.start()
        decode = requests.post(self.pair.decode_url + path, json=body, timeout=300)
        prefill.join()
        return found[0], decode


def merged(prefill: requests.Response, decode: requests.Response):
    """Decode's answers with the logprobs of the prompts, which prefill has."""
    answers = decode.json()
    if not prefill.ok:
        return answers
    pairs = zip(prefill.json(), answers, strict=True) if isinstance(answers, list) else [(prefill.json(), answers)]
    for first, answer in pairs:
        for name in ("input_token_logprobs", "input_top_logprobs"):
            if name in answer["meta_info"]:
                answer["meta_info"][name] = first["meta_info"][name]
    return answers


@pytest.fixture(scope="module")
def front(clusters, model):
    cluster = clusters.get(
        model,
        decode_args=[FLAG],
        common_args=["--page-size", str(PAGE), "--constrained-json-disable-any-whitespace"],
    )
    front = Front(Pair(cluster))
    yield front
    front.server.shutdown()
    front.pair.check_idle()


def test_cache_hit(front, model, tmp_path):
    """What decode held counts: a turn's cached tokens are the turn before and its answer, to the page."""
    rnd = random.Random(1)
    talk = [{"conversations": [{"value": " ".join(rnd.choices(WORDS, k=600))}] * 2} for _ in range(40)]
    data = tmp_path / "talk.json"
    data.write_text(json.dumps(talk))
    result = cache_hit_kit.run_multiturn_cache_hit_test(front.url, model, num_clients=4, dataset_path=str(data))
    assert result["overall"]["cache_hit_rate"] > 0.5


WORDS = ["ready", "hello", "one", "two", "three", "stone", "water", "letter"]


def test_radix_cache(front, monkeypatch):
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", small_tree)
    radix_cache_server_kit.run_radix_attention_test(front.url)


def small_tree(make=radix_cache_server_kit.gen_radix_tree):
    """The kit's tree with fewer and shorter nodes, of tokens that this model has."""
    random.seed(2)
    nodes = make(num_nodes=60, chunk_len=64)
    return [{**node, "input_ids": [token % VOCAB for token in node["input_ids"]]} for node in nodes]


class _Kit(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _at(self, front, model):
        type(self).base_url, type(self).model, type(self).process = front.url, model, front.process


class TestKLDivergence(_Kit, KLDivergenceMixin):
    kl_div_thres = 1e-3
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 48

    @pytest.fixture(autouse=True)
    def _data(self, monkeypatch):
        prompts = [words(random.Random(seed), 200) for seed in range(8)]
        monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda *args, **kwargs: prompts)


class TestRegex(_Kit, RegexConstrainedMixin):
    # Strings without an end.
    test_regex_generate_complex_json = test_regex_generate_custom_log_format = None


class TestEBNF(_Kit, EBNFConstrainedMixin):
    # As above.
    test_ebnf_generate_complex_json = test_ebnf_generate_custom_log_format = None


class TestJSON(_Kit, JSONConstrainedMixin):
    json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
                "population": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )


class TestAbort(_Kit, AbortAllMixin):
    # What waits in a queue of decode is answered with an error, so as many as run at once.
    abort_all_num_requests = 8
    abort_all_max_new_tokens = 1500
