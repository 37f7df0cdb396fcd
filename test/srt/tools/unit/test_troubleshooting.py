"""Who has a message finds it in docs/troubleshooting.md, by what a worker logs, and no example there is made up."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from code_texts import HOLE, texts
from sglang.srt.disaggregation.common.authentication import Secret
from sglang.srt.disaggregation.common.delta_receiver import what_landed
from sglang.srt.disaggregation.common.delta_sender import SenderState
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import PrefillPeers
from sglang.srt.managers import gateway_notice, schedule_batch
from sglang.srt.managers.batch_failures import NO_TOKEN, fail_running
from sglang.srt.managers.request_checks import check_prompt
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability.failure_causes import CAUSES, OTHER, cause_of
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pd_radix.patching import loader
from sglang_pd_radix.supplied.cpu_host.kernels import MissingOp

ROOT = Path(__file__).parents[4]
PATCH, PACKAGE = ROOT / "python" / "sglang" / "srt", ROOT / "python" / "sglang_pd_radix"
ENGINE = Path(importlib.util.find_spec("sglang").origin).parent / "srt"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: Letters of an example that have to be the code's own, and not what is put in at run time.
LEAST_LETTERS = 15


def examples(page: str) -> list[tuple[str, str]]:
    """The messages of a page, each with who says it where that is not this package."""
    found, inside = [], False
    for line in page.splitlines():
        inside = bool(re.match(r"\| (message|reason|begins with) \|", line)) or (inside and line.startswith("|"))
        if inside and (row := re.match(r"\| `([^`]+)`(?: \((\w+)\))? \|", line)):
            found.append((row[1].strip(), row[2] or ""))
    return found


EXAMPLES = examples(PAGE)


@cache
def said_by(who: str) -> frozenset[str]:
    if who == "engine":
        places = (ENGINE / "disaggregation", ENGINE / "constrained", Path(argparse.__file__))
        return frozenset(texts(*places))
    return frozenset(texts(PATCH, *ROOT.glob("python/extras/*/sglang"), PACKAGE))


def own_letters(text: str, example: str) -> int:
    """How many letters of ``example`` are those of ``text``, whose holes hold anything; -1 if it does not begin so."""
    pieces = text.split(HOLE)

    @cache
    def from_piece(number: int, at: int) -> int:
        piece, rest = pieces[number], example[at:]
        if piece.startswith(rest):
            return len(rest)
        if not rest.startswith(piece) or number + 1 == len(pieces):
            return -1
        after = at + len(piece)
        best = max(from_piece(number + 1, begin) for begin in range(after, len(example) + 1))
        return best if best < 0 else len(piece) + best

    return from_piece(0, 0)


def is_said(example: str, who: str = "") -> bool:
    return any(own_letters(text, example) >= LEAST_LETTERS for text in said_by(who))


@pytest.mark.parametrize(("example", "who"), [row for row in EXAMPLES if row[1] != "gateway"])
def test_an_example_is_what_the_code_says(example, who):
    assert "..." not in example and is_said(example, who), f"nobody says {example!r}"


@pytest.mark.parametrize(
    "made_up",
    [
        "prefill 10.0.0.1:8998 is away: it refuses connections",
        "is not verified together with a teapot",
        "Decode at 10.0.0.2:41233 is gone, and with it 3 requests",
        "something: anything",
    ],
)
def test_an_example_that_is_made_up_is_seen(made_up):
    assert not is_said(made_up)


def test_every_row_of_a_table_of_messages_has_an_example():
    tables = re.findall(r"^\| (?:message|reason|begins with) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert sum(len(rows.splitlines()) for rows in tables) == len(EXAMPLES) > 50


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != OTHER])
def test_each_cause_of_failures_has_a_reason(cause):
    """What is counted in ``sglang:kv_transfer_failures_total`` can be looked up."""
    reasons = [example for example, _ in examples(section("A client gets status 500"))]
    assert cause in map(cause_of, reasons)


def test_a_request_that_is_itself_at_fault_is_under_the_status_that_it_gets(monkeypatch):
    """On decode and without disaggregation 400; its first token prefill chooses, which then fails a transfer."""
    params = SamplingParams()
    params.normalize(None)
    found = {}
    for message in (NO_TOKEN, "Custom logit processor p1 failed: e2", "Failed to compile json grammar: e3"):
        req = Req("r", "", [1, 2, 3], params, vocab_size=100)
        if message.startswith("Failed"):
            monkeypatch.setattr(schedule_batch, "get_tensor_model_parallel_rank", lambda: 1)
            req.set_finish_with_abort(message)
        else:
            fail_running([req], {0: message})
        found[message] = req.to_finish.status_code.value
    assert {*found.values()} == {400}
    for message in found:
        (row,) = rows_with(message, section("A client gets status 400"))
        assert row.startswith("| `")
    assert "with the first token" in section("A client gets status 400")


# ---- as an operator searches ----


def rows_with(message: str, page: str = PAGE) -> list[str]:
    """The rows that a search finds for a part of the message: three words or more, no name and no number in them."""
    parts = re.split(r": |\S*[\d/'\"_\[\]]\S*", message)
    wanted = [part.strip(" ,:.") for part in parts if len(part.split()) >= 3]
    return [row for row in page.splitlines() if row.startswith("| `") and any(part in row for part in wanted)]


def raised_by(call, *arguments) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011
        call(*arguments)
    return str(error.value)


def logged_by(call, *arguments) -> str:
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        call(*arguments)
    finally:
        logging.getLogger().removeHandler(handler)
    return messages[-1]


def signed_elsewhere() -> str:
    theirs, ours = Secret(b"s" * 32, clock=lambda: 1000.0), Secret(b"s" * 32, clock=lambda: 2000.0)
    return raised_by(ours.verify, [b"x"], "test", theirs.sign([b"x"], "test"))


def unreached(is_known: bool) -> str:
    peers = SimpleNamespace(_unusable={})
    return PrefillPeers.why_unreached(peers, "10.9.8.7:8998", time.monotonic() - 70, is_known, 60)


#: What provokes a message, and the beginning of its row.
PROVOKED = {
    "an engine that is not ours": (lambda: f"inactive: {loader.inert_reason('0.5.17')}.", "sglang-pd-radix: inactive"),
    "a long prompt": (lambda: raised_by(check_prompt, range(70), 100, 60), "The prompt has"),
    "a kernel on a CPU host": (lambda: raised_by(MissingOp("sgl_kernel.some_op")), "merge_state is a CUDA kernel"),
    "a queue that is full": (lambda: str(NotTaken("10.9.8.7:4000")), "10.0.0.2:41233 takes no messages"),
    "metadata of another": (lambda: what_landed(77, 78, lambda: True), "its metadata buffer holds"),
    "a clock that is wrong": (signed_elsewhere, "it was signed"),
    "a prefill that does not answer": (lambda: unreached(False), "prefill 10.0.0.1:8998 has not answered"),
    "a prefill that never hears": (lambda: unreached(True), "timed out after 300 s, in which prefill"),
    "a prefill that is slow": (lambda: SenderState.overdue(SimpleNamespace(due_at=0), 60), "not all of its KV"),
    "a gateway that is not there": (
        lambda: logged_by(gateway_notice.leave_all, ["http://127.0.0.1:1"], "decode", "127.0.0.1", 30001),
        "Gateway http",
    ),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_message_is_found(name):
    provoke, beginning = PROVOKED[name]
    found = rows_with(provoke())
    assert any(row.startswith(f"| `{beginning}") for row in found), found
    assert len(found) <= 3, found
