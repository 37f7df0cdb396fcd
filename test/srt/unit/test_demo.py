"""The demo against a deployment of one small HTTP server, whose decode cache is a few lines and can be made to err."""

from __future__ import annotations

import argparse
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import demo
from sglang_pd_radix.tools.chat_load import ChatError, Chats, Workload, common_words, stream_chat
from sglang_pd_radix.tools.cluster import RADIX_FLAG

PAGE, PAGE_BYTES = 4, 4096
SMALL = Workload(clients=3, turns=3, document=20, question=5, answer=4)


class Deployment:
    """Router, one prefill and one decode worker behind one port. A message is as many tokens as words, and two more."""

    def __init__(self, cached: bool, **faults: Any) -> None:
        self.cached, self.faults = cached, faults
        self.overlapped = faults.get("overlapped", True)
        self.model_path, self.log_dir = "model", Path("logs")
        self.checks = 0
        self._lock = threading.Lock()
        self._held: list[list[str]] = []
        self._counts = {name: 0 for name in (*demo.PREFILL_COUNTERS, *demo.DECODE_COUNTERS)}
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
                    self._reply(deployment.chat(body))

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
            SimpleNamespace(role="prefill", name="prefill-0", url=self.prefill_urls[0]),
            SimpleNamespace(role="decode", name="decode-0", url=self.decode_urls[0]),
            SimpleNamespace(role="router", name="router", url=self.router_url),
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
        for name, metric in (demo.PREFILL_COUNTERS if prefill else demo.DECODE_COUNTERS).items():
            if name != self.faults.get("uncounted"):
                lines.append(f'{metric}{{model_name="m {name}"}} {float(self._counts[name])}')
        return "\n".join(lines)

    def info(self, prefill: bool) -> str:
        pool = {"size": 64, "available": 60, "evictable": 4, "protected": 0, "idle": True}
        if not prefill and self.cached:
            pool |= {"locks_taken": 5, "locks_released": 5, "audit": []} | self.faults.get("pool", {})
        info = {"page_size": PAGE, "dtype": self.faults.get("dtype", "float32"), "device": "cpu"}
        info["disable_overlap_schedule"] = not self.overlapped
        return json.dumps({**info, "internal_states": [{"kv_pool": pool}]})

    def chat(self, body: dict[str, Any]) -> str:
        prompt = [w for m in body["messages"] for w in (m["role"], *m["content"].split(), "end")] + ["assistant"]
        if self.faults.get("rewrites"):  # a template that changes every earlier word
            prompt = [f"{word}{len(body['messages'])}" for word in prompt]
        words = [f"w{len(prompt)}.{i}" for i in range(body["max_tokens"] - self.faults.get("short", 0))]
        if self.faults.get("answers") and len(body["messages"]) > 1:
            words[2] = "other"
        with self._lock:
            held = max((_common(prompt, kept) for kept in self._held), default=0) if self.cached else 0
            held = held // PAGE * PAGE
            self._held.append([*prompt, *(words if self.overlapped else words[:-1])])
            pages = -(-len(prompt) // PAGE) - held // PAGE
            self._counts["prompt_tokens"] += len(prompt)
            self._counts["reused_tokens"] += held
            self._counts["transferred_tokens"] += len(prompt) - held
            self._counts["sent_bytes"] += (pages + self.faults.get("extra_pages", 0)) * PAGE_BYTES
            self._counts["saved_bytes"] += held // PAGE * PAGE_BYTES
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}]
        for word in words:
            choice: dict[str, Any] = {"delta": {"content": f" {word}"}}
            if body.get("logprobs"):
                # The word that a fault puts there is the second likeliest, by so much.
                expected = {"token": word, "logprob": -0.5}
                other = {"token": "other", "logprob": -0.5 - self.faults.get("behind", 0.3)}
                choice["logprobs"] = {"content": [{**expected, "top_logprobs": [expected, other]}]}
            events.append({"choices": [choice], "usage": None})
        if self.faults.get("breaks"):
            events = [events[0], {"error": {"message": "KV transfer failed"}}]
        events.append({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(words)}})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Silent:
    def now(self, text: str) -> None:
        pass

    done = now


def _hold(cached: bool, workload: Workload = SMALL, **faults: Any) -> demo.Run:
    return demo.hold(Deployment(cached, **faults), "on" if cached else "off", workload, Silent())  # type: ignore[arg-type]


def _compare(**faults: Any) -> demo.Comparison:
    return demo.compare(_hold(False, dtype=faults.get("dtype", "float32")), _hold(True, **faults))


# ---- the workload ----


def test_texts_depend_on_seed_client_and_turn_only() -> None:
    small, large = Workload(clients=1, document=10, question=3), Workload(clients=9, turns=8, document=10, question=3)
    assert small.user_text(0, 1) == large.user_text(0, 1)
    assert len(small.user_text(0, 0).split()) == 10 and len(small.user_text(0, 1).split()) == 3
    texts = {large.user_text(client, turn) for client in range(-1, 9) for turn in range(8)}
    assert len(texts) == 80
    assert Workload(seed=1, document=10).user_text(0, 0) != small.user_text(0, 0)
    # Pinned: figures in the documentation are those of this text.
    assert small.user_text(0, 1) == Workload().user_text(0, 1)[: len(small.user_text(0, 1))]


def test_words_are_plain() -> None:
    assert len(set(common_words())) == 256
    assert all(word.isalpha() and word.islower() for word in common_words())


@pytest.mark.parametrize("size", ["clients", "turns", "document", "question", "answer"])
def test_impossible_sizes_are_refused_by_name(size: str) -> None:
    with pytest.raises(PdRadixError, match=f"--{size} 0: must be at least"):
        Workload(**{size: 0}).check()


def test_each_turn_carries_the_whole_history() -> None:
    with Deployment(cached=False) as deployment:
        chats = Chats(deployment.router_url, "model", SMALL)
        sizes = [[reply.prompt_tokens for reply in chats.turn()] for _ in range(3)]
    # Document, then answer and question with two tokens each around them; one token opens the answer.
    assert sizes == [[23] * 3, [23 + 5 + 8] * 3, [23 + 5 + 8 + 13] * 3]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"status": 503}, "HTTP 503: no worker is there"),
        ({"breaks": True}, "broke off with an error: .*KV transfer failed"),
        ({"short": 1}, "made 3 tokens of 4"),
    ],
)
def test_a_request_that_fails_says_why(faults: dict[str, Any], message: str) -> None:
    with Deployment(cached=False, **faults) as deployment:
        with pytest.raises(ChatError, match=message):
            stream_chat(deployment.router_url, "model", [{"role": "user", "content": "hello"}], 4)
        with pytest.raises(ChatError, match="client 1, turn 1"):
            Chats(deployment.router_url, "model", SMALL).turn()


def test_nobody_there() -> None:
    with Deployment(cached=False) as deployment:
        url = deployment.router_url
    with pytest.raises(ChatError, match="did not answer"):
        stream_chat(url, "model", [], 4)


# ---- the figures ----


def test_least_pages_by_hand() -> None:
    # 10 tokens are 3 pages of 4. Then decode holds 10 + 5 - 1 = 14 tokens, 3 whole pages, of the 19 (5 pages) after.
    assert demo.least_pages([[(10, 5)], [(19, 5)]], 4, False) == 3 + 2
    assert demo.pages_of_prompts([[(10, 5)], [(19, 5)]], 4) == 3 + 5
    # With 16 + 5 - 1 = 20 held, a page-aligned prompt of 20 needs nothing more.
    assert demo.least_pages([[(16, 5)], [(20, 5)]], 4, False) == 4
    assert demo.least_pages([[(10, 5), (7, 5)], [(19, 5), (13, 5)]], 1, False) == 10 + 7 + 5 + 2
    assert demo.least_pages([], 4, False) == 0


def test_overlapped_steps_keep_one_token_more_of_each_answer() -> None:
    # 11 + 5 = 16 tokens are 4 whole pages; without the last token of the answer they would be 3.
    assert demo.least_pages([[(11, 5)], [(19, 5)]], 4, True) == 3 + 1
    assert demo.least_pages([[(11, 5)], [(19, 5)]], 4, False) == 3 + 2
    # Prefill makes the first token: an answer of one takes no step.
    assert demo.kept_of_answer(1, True) == demo.kept_of_answer(1, False) == 0


def test_counters_are_summed_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="a b} 7"} 3.0\na_total_more 9\nb_total 4e+08\n'
    assert demo.parse_counters(text, {"a": "a_total", "b": "b_total", "c": "c_total"}) == {"a": 5.0, "b": 4e8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"available": 59}, "59 free and 4 evictable tokens do not make its pool of 64"),
        ({"protected": 4}, "4 tokens are locked"),
        ({"locks_released": 4}, "5 locks were taken and 4 released"),
        ({"audit": ["one KV slot stands in the tree twice"]}, "one KV slot stands in the tree twice"),
        ({"idle": False}, "not idle"),
    ],
)
def test_pool_problems(change: dict[str, Any], message: str) -> None:
    pool = {"size": 64, "available": 60, "evictable": 4, "protected": 0, "idle": True}
    pool |= {"locks_taken": 5, "locks_released": 5, "audit": []}
    assert demo.pool_problems("decode-0", pool, True) == []
    (problem,) = demo.pool_problems("decode-0", pool | change, True)
    assert problem.startswith("decode-0") and message in problem


@pytest.mark.parametrize("missing", ["locks_taken", "locks_released", "audit"])
def test_a_tree_that_is_not_told_of_is_not_a_sound_one(missing: str) -> None:
    plain = {"size": 64, "available": 60, "evictable": 4, "protected": 0, "idle": True}
    pool = plain | {"locks_taken": 0, "locks_released": 0, "audit": []}
    # Prefill and a decode worker without the flag have neither.
    assert demo.pool_problems("prefill-0", plain, False) == []
    del pool[missing]
    assert demo.pool_problems("decode-0", pool, True) == [f"decode-0 does not tell its {missing}"]


@pytest.mark.parametrize("flag", [True, False])
def test_only_the_run_with_the_flag_must_tell_of_a_tree(flag: bool) -> None:
    run = _hold(flag, pool={"audit": ["a fault"]} if flag else {})
    assert run.problems == (["decode-0: a fault"] if flag else [])
    assert [sorted(pool) for pool in run.pools.values()][1].count("audit") == flag


# ---- the two runs ----


@pytest.mark.parametrize(("overlapped", "on_pages"), [(False, 6 + 3 + 4), (True, 6 + 2 + 4)])
def test_a_sound_cache_passes(capsys: pytest.CaptureFixture[str], overlapped: bool, on_pages: int) -> None:
    comparison = _compare(overlapped=overlapped)
    assert comparison.failures == comparison.differences == []
    assert comparison.page_bytes == PAGE_BYTES
    assert comparison.over_least == 1.0
    assert comparison.on.turns[0].reused_tokens == 0
    assert comparison.off.total("prompt_tokens") == comparison.on.total("prompt_tokens") == 3 * (23 + 36 + 49)
    assert comparison.bytes_ratio == pytest.approx((6 + 9 + 13) / on_pages)
    assert comparison.off.total("saved_bytes") == 0 < comparison.on.total("saved_bytes")
    demo.print_report(comparison, "a title")
    shown = capsys.readouterr().out
    assert f"MiB on: {28 / on_pages:.2f}x" in shown and "1.000 times the least possible" in shown
    assert "9 of 9 identical" in shown and "sound on 4 workers" in shown and "FAILED" not in shown
    assert len([line for line in shown.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ")]) == 3
    document = json.loads(json.dumps(demo.as_document(comparison, SMALL, {"backend": "nixl"})))
    assert document["identical"] and document["sent_bytes_on_over_least"] == 1.0
    assert document["runs"]["on"]["turns"][2]["turn"] == 3
    assert document["runs"]["off"]["totals"]["sent_bytes"] == comparison.off.total("sent_bytes")


def test_other_answers_fail_and_show_where(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = _compare(answers=True)
    assert comparison.failures[0] == "6 answers are not identical"
    assert comparison.differences[0].startswith("turn 2, client 1: the answers part after 13 characters, off ")
    assert comparison.differences[0].endswith('off "...w36.0 w36.1 w36.2 w36.3", on "...w36.0 w36.1 other w36.3"')
    demo.print_report(comparison, "a title")
    shown = capsys.readouterr().out
    assert (
        "3 of 9 identical" in shown and "FAILED:   6 answers are not identical" in shown and "turn 3, client 3" in shown
    )


def test_in_half_precision_answers_are_judged_by_what_rounding_does() -> None:
    """The chat is held once more with the flag off. A word that was as likely is a note, one that was not a failure."""
    alike = demo.compare(_hold(False, dtype="bfloat16", behind=1e-5), _hold(True, answers=True, dtype="bfloat16"))
    assert len(alike.differences) == 6 and len(alike.off.again) == SMALL.turns and not alike.on.again
    assert not any("log-prob" in failure for failure in alike.failures)
    assert any("3 conversations part, and 0 conversations of two runs" in note for note in alike.notes)
    wrong = _compare(answers=True, dtype="bfloat16")
    assert any("3 answers differ by more" in failure for failure in wrong.failures)


@pytest.mark.parametrize(("moved", "failed"), [(0.15, False), (0.05, True)])
def test_what_an_engines_own_prefix_cache_rounds_is_rounding_too(moved: float, failed: bool) -> None:
    """``moved``: what keeping answers does to log-probabilities there; with the flag their words are 0.3 behind."""
    off, on = _hold(False, dtype="bfloat16"), _hold(True, answers=True, dtype="bfloat16")
    engine = [
        [
            dataclasses.replace(
                reply,
                answer=dataclasses.replace(
                    reply.answer, logprobs=tuple(value - moved for value in reply.answer.logprobs)
                ),
            )
            for reply in turn.replies
            if reply.answer
        ]
        for turn in off.turns
    ]
    assert len(demo.rounding_of(off, on).beyond) == 3
    rounding = demo.rounding_of(off, on, engine)
    assert rounding.limit == pytest.approx(3 * moved) and bool(rounding.beyond) == failed
    comparison = demo.compare(off, on, engine)
    told = next(text for text in comparison.failures + comparison.notes if "log-probabilities" in text)
    assert "by one engine with its own prefix cache" in told and (told in comparison.failures) == failed


def test_a_gpu_gives_answers_that_do_not_depend_on_the_batch_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.cpu_host, "active", lambda: False)
    made = demo.engine_options([], SMALL, True)
    assert "--enable-deterministic-inference" in made and made[-2:] == ["--attention-backend", "triton"]
    assert "--enable-deterministic-inference" in demo.engine_options(["--attention-backend", "fa3"], SMALL, False)
    assert "--enable-deterministic-inference" not in demo.engine_options(["--attention-backend", "x"], SMALL, False)
    # In float32 nothing has to be done for it, and the engine's default backend has no float32.
    monkeypatch.setenv("SGLANG_TORCH_LAYERS", "1")
    exact = ["--dtype", "float32", "--attention-backend"]
    assert demo.engine_options([], SMALL, True)[-4:] == [*exact, "triton"]
    assert demo.engine_options([*exact, "x"], SMALL, False)[:4] == [*exact, "x"]
    assert "--enable-deterministic-inference" not in demo.engine_options([], SMALL, False)


@pytest.mark.parametrize("faults", [{"extra_pages": 1}, {"rewrites": True}])
def test_sending_too_much_fails(faults: dict[str, Any]) -> None:
    comparison = _compare(**faults)
    assert comparison.over_least > 1.05
    assert any("times the least possible was sent, above 1.05" in failure for failure in comparison.failures)


def test_a_leaking_pool_fails() -> None:
    comparison = _compare(pool={"locks_released": 4})
    assert comparison.failures == ["flag on: decode-0: 5 locks were taken and 4 released"]


def test_reuse_with_the_flag_off_fails() -> None:
    comparison = demo.compare(_hold(True), _hold(True))
    assert "with the flag off, decode reused part of a prompt" in comparison.failures


@pytest.mark.parametrize(("slower", "noted"), [(1.05, False), (1.3, True), (0.7, True)])
def test_a_busy_machine_is_noticed_in_the_first_turn(slower: float, noted: bool) -> None:
    off, on = _hold(False), _hold(True)
    for run, ttft in ((off, 1.0), (on, slower)):
        run.turns[0].replies = [dataclasses.replace(reply, ttft_s=ttft) for reply in run.turns[0].replies]
    notes = demo.compare(off, on).notes
    assert [note.startswith("turn 1 is the same work in both runs") for note in notes] == [True] * noted


def test_one_turn_has_nothing_to_reuse(capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload(clients=2, turns=1, document=20, answer=4)
    comparison = demo.compare(_hold(False, workload), _hold(True, workload))
    assert comparison.failures == [] and comparison.bytes_ratio == 1.0
    demo.print_report(comparison, "a title")
    assert "from turn 2 on" not in capsys.readouterr().out


def test_a_worker_that_does_not_count_is_named() -> None:
    with pytest.raises(PdRadixError, match="/decode/metrics does not have sglang:decode_prefix_hit_tokens_total"):
        _hold(True, uncounted="reused_tokens")


def test_a_dead_worker_is_the_answer_to_a_failed_request() -> None:
    deployment = Deployment(cached=True, status=500)

    def dead() -> None:
        raise PdRadixError("decode-0 exited with code 1")

    deployment.check = dead  # type: ignore[method-assign]
    with pytest.raises(PdRadixError, match="decode-0 exited"):
        demo.hold(deployment, "on", SMALL, Silent())  # type: ignore[arg-type]


# ---- the command ----


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Runs of the demo on the stand-in; yields the options of each cluster that it would have started."""
    made: list[dict[str, Any]] = []

    def cluster(model: str, **options: Any) -> Deployment:
        made.append({"model": model, **options})
        return Deployment(cached=RADIX_FLAG in options["decode_args"])

    monkeypatch.setattr(demo, "Cluster", cluster)
    yield made


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args([*"--clients 2 --turns 2 --document 20 --question 5 --answer 4".split(), *arguments])


def test_the_command(no_cluster: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    args = _parse("--work-dir", str(tmp_path / "work"), "--json", str(figures), "--", "--tp", "2")
    assert demo.run(args) == 0
    off, on = no_cluster
    assert off["decode_args"] == [] and on["decode_args"] == [RADIX_FLAG]
    assert off["common_args"] == on["common_args"] and off["common_args"][:3] == ["--tp", "2", "--enable-metrics"]
    assert (tmp_path / "work" / "model" / "config.json").exists()
    assert json.loads(figures.read_text())["setting"]["engine_options"] == off["common_args"]
    shown = capsys.readouterr()
    assert "turn 2 of 2" in shown.err and "4 of 4 identical" in shown.out


def test_an_engine_is_asked_where_answers_differ_by_more_than_two_runs_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, Any]] = []

    def cluster(model: str, **options: Any) -> Deployment:
        made.append(options)
        keeps_answers = bool(options.get("decode_args")) or options.get("aggregated", False)
        return Deployment(cached=bool(options.get("decode_args")), answers=keeps_answers, dtype="bfloat16")

    monkeypatch.setattr(demo, "Cluster", cluster)
    assert demo.run(_parse("--work-dir", str(tmp_path / "work"))) == 0
    off, on, engine = made
    assert engine["aggregated"] and engine["common_args"] == off["common_args"] == on["common_args"]
    assert "Note:     in bfloat16, 2 conversations part" in capsys.readouterr().out


def test_users_options_win() -> None:
    options = demo.engine_options(["--page-size=64", "--max-total-tokens", "999", "--dtype", "float16"], SMALL, True)
    assert options.count("--page-size") == 0 and options.count("--max-total-tokens") == 1
    assert options.count("--dtype") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients 0"),
        (["--model", "no/such/model"], "no model at no/such/model"),
        (["--json", "no-such-directory/figures.json"], "there is no directory"),
        (["--", RADIX_FLAG], "remove it from the engine options"),
    ],
)
def test_bad_usage_starts_nothing(no_cluster: list[dict[str, Any]], arguments: list[str], message: str) -> None:
    with pytest.raises(PdRadixError, match=message):
        demo.run(_parse(*arguments))
    assert no_cluster == []


def test_switched_off_patch_set_is_refused(no_cluster: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PD_RADIX", "0")
    with pytest.raises(PdRadixError, match="SGLANG_PD_RADIX=0"):
        demo.run(_parse())
    assert no_cluster == []
