"""A deployment of one small HTTP server, for `pd-radix demo`: its decode cache has a few lines, and can err."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sglang_pd_radix.tools import chat_run, workers
from sglang_pd_radix.tools.chat_judge import Comparison, compare
from sglang_pd_radix.tools.chat_load import Workload
from sglang_pd_radix.tools.cluster.process import Process

PAGE, PAGE_BYTES = 4, 4096
SMALL = Workload(clients=3, turns=3, document=20, question=5, answer=4)


class Words:
    """A tokenizer: a word is a token. ``rewrites``: its template changes every earlier answer in every turn."""

    chat_template = "words"

    def __init__(self, rewrites: bool = False) -> None:
        self.rewrites, self._words, self._ids = rewrites, [], {}

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {self._words[token]}" for token in ids)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        words = []
        for message in messages:
            said = message["content"].split()
            if self.rewrites and message["role"] == "assistant":
                said = [f"{word}/{len(messages)}" for word in said]
            words += [message["role"], *said, "end"]
        return [self._id(word) for word in [*words, "assistant"]]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


class Deployment:
    """Router, one prefill and one decode worker behind one port. A message is as many tokens as words, and two more."""

    def __init__(self, cached: bool, **faults: Any) -> None:
        self.cached, self.faults = cached, faults
        self.overlapped = faults.get("overlapped", True)
        self.model_path, self.log_dir = "model", Path("logs")
        self.checks = 0
        self.words: Words = faults["words"] if "words" in faults else Words()
        self._lock = threading.Lock()
        self._held: list[list[int]] = []
        # Longest remainder that decode computes itself, tokens.
        self.computes: int = faults.get("computes", 0)
        self._decode_counters = {**workers.DECODE_COUNTERS, **(workers.LOCAL_COUNTERS if self.computes else {})}
        self._counts = {name: 0 for name in (*workers.PREFILL_COUNTERS, *self._decode_counters)}
        deployment = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.removeprefix("/prefill").removeprefix("/decode")
                prefill = self.path.startswith("/prefill")
                self._reply(deployment.metrics(prefill) if path == "/metrics" else deployment.info(prefill))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/flush_cache"):
                    deployment.flush()
                    self._reply("")
                elif deployment.faults.get("status"):
                    self._reply("no worker is there", deployment.faults["status"])
                else:
                    scored = self.path.endswith("/generate")
                    self._reply(deployment.scores(body) if scored else deployment.chat(body))

            def _reply(self, text: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.router_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.prefill_urls, self.decode_urls = [self.router_url + "/prefill"], [self.router_url + "/decode"]
        self.processes = [
            Process("prefill", "prefill-0", self.prefill_urls[0], Path(), [], {}),
            Process("decode", "decode-0", self.decode_urls[0], Path(), [], {}),
            Process("router", "router", self.router_url, Path(), [], {}),
        ]

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def check(self) -> None:
        self.checks += 1

    def flush(self) -> None:
        self._held.clear()

    def metrics(self, prefill: bool) -> str:
        lines = ["# HELP sglang:kv_transfer_sent_bytes_total KV bytes"]
        for name, metric in (workers.PREFILL_COUNTERS if prefill else self._decode_counters).items():
            if name != self.faults.get("uncounted"):
                lines.append(f'{metric}{{model_name="m {name}"}} {float(self._counts[name])}')
        return "\n".join(lines)

    def info(self, prefill: bool) -> str:
        size = self.faults.get("pool_size", 1024)
        pool = {"size": size, "available": size - 4, "evictable": 4, "protected": 0, "idle": True}
        pool |= {"req_slots": 8, "free_req_slots": 8, "metadata_buffers": 4, "free_metadata_buffers": 4}
        if not prefill and self.cached:
            pool |= {"locks_taken": 5, "locks_released": 5, "audit": []} | self.faults.get("pool", {})
        if not prefill and self.computes:
            pool["computes_up_to"] = self.computes
        info = {"page_size": PAGE, "dtype": self.faults.get("dtype", "float32"), "device": "cpu"}
        info |= self.faults.get("info", {})
        info["disable_overlap_schedule"] = not self.overlapped
        untold = self.faults.get("untold") == ("prefill" if prefill else "decode")
        # Of decode, what each DP rank says beside.
        ranks = [{}] if prefill else self.faults.get("ranks", [{}])
        states = [{} if untold else {"kv_pool": pool | rank} for rank in ranks]
        return json.dumps({**info, "internal_states": states})

    def chat(self, body: dict[str, Any]) -> str:
        prompt = self.words.apply_chat_template(body["messages"])
        turn = len(body["messages"]) // 2
        words = [f"w{len(prompt)}.{i}" for i in range(body["max_tokens"] - self.faults.get("short", 0))]
        for place in self.faults.get("answers", {}).get(turn, ()):
            words[place] = f"other{place}"
        with self._lock:
            sent, held = self._send(prompt, words)
            self._counts["prompt_tokens"] += len(prompt)
            self._counts["reused_tokens"] += held
            computed = self.computes >= len(prompt) - held and not self.faults.get("asks_prefill")
            self._counts["computed_tokens" if computed else "transferred_tokens"] += len(prompt) - held
            self._counts["sent_bytes"] += 0 if computed else sent * PAGE_BYTES
            self._counts["saved_bytes"] += held // PAGE * PAGE_BYTES
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}]
        for place, word in enumerate(words):
            choice: dict[str, Any] = {"delta": {"content": "" if self.faults.get("silent") else f" {word}"}}
            if body.get("logprobs"):
                logprob = self._logprob(len(prompt), place, word) - self.faults.get("rounds", 0.0)
                choice["logprobs"] = {"content": [{"token": f" {word}", "logprob": logprob, "top_logprobs": []}]}
            events.append({"choices": [choice], "usage": None})
        if self.faults.get("breaks"):
            events = [events[0], {"error": {"message": "KV transfer failed"}}]
        events.append({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(words)}})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _send(self, prompt: list[int], answer: Sequence[str]) -> tuple[int, int]:
        """Pages that are sent, and tokens that decode has; now it has this prompt and the answer to it, too."""
        held = max((_common(prompt, kept) for kept in self._held), default=0) if self.cached else 0
        held = held // PAGE * PAGE
        if not self.faults.get("keeps_no_prompt"):
            kept = answer if self.overlapped else answer[:-1]
            lost = self.faults.get("keeps_no_answer")
            self._held.append([*prompt, *([] if lost else map(self.words._id, kept))])
        return -(-len(prompt) // PAGE) - held // PAGE + self.faults.get("extra_pages", 0), held

    def _logprob(self, prompt_tokens: int, place: int, word: str) -> float:
        """Another word than the one that is due is so much less likely."""
        return -0.5 if word == f"w{prompt_tokens}.{place}" else -0.5 - self.faults.get("behind", 0.3)

    def scores(self, body: dict[str, Any]) -> str:
        """What prefill says of the tokens behind a prompt."""
        length, ids = body["logprob_start_len"] + 1, body["input_ids"]
        if self.faults.get("scores_nothing"):
            return json.dumps({"meta_info": {}})
        told: list[Any] = [[None, ids[length - 1], None]]
        likeliest: list[Any] = [None]
        for place, token in enumerate(ids[length:]):
            own = self._logprob(length, place, self.words.decode([token]).strip())
            told.append([own, token, None])
            likeliest.append([[-0.5, token if own == -0.5 else -1, None]])
        return json.dumps({"meta_info": {"input_token_logprobs": told, "input_top_logprobs": likeliest}})


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Silent:
    def now(self, text: str, work: float = 0) -> None:
        pass

    done = now


def hold(cached: bool, workload: Workload = SMALL, **faults: Any) -> chat_run.Run:
    """The chat on such a deployment. ``words``: its tokenizer, which the demo is given as well if it asks for one."""
    return chat_run.hold(Deployment(cached, **faults), "on" if cached else "off", workload, Silent())  # type: ignore[arg-type]


def compared(workload: Workload = SMALL, **faults: Any) -> Comparison:
    """Both runs, the one with the flag with these faults."""
    common = {name: faults[name] for name in ("dtype", "words", "overlapped") if name in faults}
    return compare(hold(False, workload, **common), hold(True, workload, **faults))
