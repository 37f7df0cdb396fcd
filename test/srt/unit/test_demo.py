"""The command `pd-radix demo`, against a deployment of one small HTTP server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_deployment import SMALL, Deployment, Words, hold

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import chat_local, chat_tokens, demo
from sglang_pd_radix.tools.cluster import RADIX_FLAG


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


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Runs of the demo on the stand-in; yields the options of each cluster that it would have started."""
    made: list[dict[str, Any]] = []

    def cluster(model: str, **options: Any) -> Deployment:
        made.append({"model": model, **options})
        local = "auto" in options["decode_args"]
        return Deployment(cached=RADIX_FLAG in options["decode_args"], computes=12 if local else 0)

    monkeypatch.setattr(demo, "Cluster", cluster)
    yield made


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    small = "--clients 2 --turns 2 --document 20 --question 5 --answer 4 --beside 0"
    return parser.parse_args([*small.split(), *arguments])


def test_the_command(no_cluster: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    args = _parse(
        *("--work-dir", str(tmp_path / "work"), "--json", str(figures), "--", "--tp", "2", "--api-key", "a secret")
    )
    assert demo.run(args) == 0
    off, on, local = no_cluster
    assert off["decode_args"] == [] and on["decode_args"] == [RADIX_FLAG, chat_local.LOCAL_FLAG, "off"]
    assert local["decode_args"] == [RADIX_FLAG, chat_local.LOCAL_FLAG, "auto"]
    assert off["common_args"] == on["common_args"] == local["common_args"] and off["common_args"][:5] == [
        *("--tp", "2", "--api-key", "a secret", "--enable-metrics")
    ]
    assert (tmp_path / "work" / "model" / "config.json").exists()
    document = json.loads(figures.read_text())
    # What nobody is to read is in no report.
    told = [word.replace("a secret", "...") for word in off["common_args"]]
    assert document["setting"]["engine_options"] == told != off["common_args"]
    assert document["runs"]["local"]["totals"]["computed_tokens"] == 2 * 12
    shown = capsys.readouterr()
    assert "turn 2 of 2" in shown.err and shown.out.count("4 of 4 identical") == 2
    assert "from turn 2 on, 0.0 MiB; decode computed 24 of" in shown.out


@pytest.mark.parametrize("forgets", [False, True])
def test_the_tokens_of_the_chat_tell_the_template_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], forgets: bool
) -> None:
    """A template that rewrites answers is no failure; a cache that keeps nothing beside it is."""
    words = Words(rewrites=True)

    def cluster(model: str, **options: Any) -> Deployment:
        return Deployment(cached=RADIX_FLAG in options["decode_args"], words=words, keeps_no_prompt=forgets)

    monkeypatch.setattr(demo, "Cluster", cluster)
    monkeypatch.setattr(chat_tokens, "load", lambda path: words)
    assert demo.run(_parse("--work-dir", str(tmp_path / "work"), "--local-prefill", "off")) == forgets
    shown = capsys.readouterr().out
    assert "template or the tokenizer makes others of the same text, and no cache can reuse them" in shown
    assert ("FAILED" in shown) == forgets


def test_users_options_win() -> None:
    options = demo.engine_options(["--page-size=64", "--max-total-tokens", "999", "--dtype", "float16"], SMALL, True)
    assert options.count("--page-size") == 0 and options.count("--max-total-tokens") == 1
    assert options.count("--dtype") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients 0"),
        (["--beside", "-1"], "--beside -1: give 0 clients or more"),
        (["--local-prefill", "maybe"], "--local-prefill maybe: give off, auto or 1 token or more"),
        (["--local-prefill", "0"], "--local-prefill 0: give"),
        (["--", "--page-size", "maybe"], "--page-size maybe: must be a whole number"),
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
    for no in ("0", "false"):
        monkeypatch.setenv("SGLANG_PD_RADIX", no)
        with pytest.raises(PdRadixError, match="SGLANG_PD_RADIX=0"):
            demo.run(_parse())
    assert no_cluster == []


# ---- the run in which decode computes what is short ----


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({}, None),
        ({"asks_prefill": True}, "decode has computed no token of a prompt, and some were short enough"),
        ({"answers": {2: [1]}}, "3 answers are not identical"),
        ({"extra_pages": 3, "computes": 4}, "more KV was sent than without it"),
        ({"pool": {"locks_taken": 7}}, "7 locks were taken and 5 released"),
    ],
)
def test_what_is_wrong_with_that_run_is_found(faults: dict[str, Any], told: str | None) -> None:
    off, on, local = hold(cached=False), hold(cached=True), hold(cached=True, **{"computes": 16, **faults})
    judged = chat_local.judge(off, on, local)
    assert (judged.failures == []) if told is None else any(told in failure for failure in judged.failures)
    shown = "\n".join(chat_local.lines(judged))
    assert ("FAILED" in shown) == (told is not None)


def test_a_deployment_that_computes_none_says_so() -> None:
    off, on = hold(cached=False), hold(cached=True)
    judged = chat_local.judge(off, on, hold(cached=True))
    assert judged.failures == [] and "its log says why" in judged.notes[0]


class Splits(Words):
    """A tokenizer to which one of two answers that are as likely is more tokens than the other, once it is asked."""

    def apply_chat_template(self, messages: Any, **more: Any) -> list[int]:
        split = [{**m, "content": m["content"].replace("other3", "o t h e r 3")} for m in messages]
        return super().apply_chat_template(split, **more)


@pytest.mark.parametrize("computes", [0, 8])
@pytest.mark.parametrize("extra_pages", [0, 3])
def test_a_conversation_that_rounding_has_parted_is_held_to_its_own_bound(
    monkeypatch: pytest.MonkeyPatch, computes: int, extra_pages: int
) -> None:
    """It has other prompts than the run before, so what that sent says nothing of it."""
    words = Splits()
    monkeypatch.setattr(chat_tokens, "load", lambda path: words)
    common: dict[str, Any] = {"dtype": "torch.bfloat16", "words": words}
    off, on = hold(False, **common), hold(True, **common)
    parted = {"answers": {0: (3,), 1: (3,)}, "behind": 0.0, "computes": computes, "extra_pages": extra_pages}
    judged = chat_local.judge(off, on, hold(True, **common, **parted))
    assert sum(turn.sent_bytes for turn in on.turns[1:]) < judged.later_sent and on.sizes != judged.on.sizes
    assert len(judged.failures) == bool(extra_pages)
    if extra_pages:
        assert "times the least possible was sent from turn 2 on" in judged.failures[0]
