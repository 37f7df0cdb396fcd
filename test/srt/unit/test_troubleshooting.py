"""Who has a message finds it in docs/troubleshooting.md, and what is quoted there is what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from code_texts import HOLE, assigned, handed, raised, returned, says, texts
from sglang.srt.mem_cache import cache_support

ROOT = Path(__file__).parents[3]
PATCH, PACKAGE = ROOT / "python" / "sglang" / "srt", ROOT / "python" / "sglang_pd_radix"
ENGINE = Path(importlib.util.find_spec("sglang").origin).parent / "srt"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: Rows begin with messages in backticks, and with who says them where it is none of ours.
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
SPOKEN = [
    (message, cell.rpartition("(")[2].rstrip(") ") if cell.rstrip().endswith(")") else "")
    for row in ROWS
    for cell in [re.split(r"(?<!\\) \| ", row.strip("| "))[0]]
    for message in re.findall(r"`([^`]+)`", cell)
]
#: Messages of a worker itself, not symptoms such as a metric or the name of a figure.
MESSAGES = [message for message, who in SPOKEN if " " in message and who not in ("router", "engine")]


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return texts(PATCH, PACKAGE)


@pytest.fixture(scope="module")
def engines() -> set[str]:
    places = ("disaggregation", "managers", "server_args.py")
    return texts(*(ENGINE / place for place in places))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message, ours, engines):
    found = [text for text in ours if says(text, message)] or [text for text in engines if says(text, message)]
    assert found, f"docs/troubleshooting.md quotes {message!r}, which nobody says"


def test_a_message_that_nobody_says_would_be_seen(ours):
    assert not any(says(text, "... is not verified together with a teapot") for text in ours)


#: Errors of programming, which no user meets: a wrong call, or a contradiction that a test provokes.
NO_USERS = {
    "PdRadixError",
    "no rank is usable",
    "frames",
    "shared figures",
    "has rooms and a reason",
    "a room that decode computes has a number",
    "an announcement of samples has rooms",
    "unknown kind",
    "no such chunk",
    "is not a number",
    "its last frame is unknown",
    "whether this rank is a dummy",
    "does not end in a port",
    "cannot end with status",
    "its dummy mark and its metadata index",
    "is of staging buffers, which this worker does not use",
    "it does not start with",
    "it says that it has",
    "module ",
    "__all__",
}


def test_what_is_raised_can_be_found():
    """Every text that the patch set, or what it supplies to a host, raises an error with is quoted."""
    quoted = [message for message, _ in SPOKEN if " " in message]
    missing = []
    for error in raised(PATCH, PACKAGE / "supplied", PACKAGE / "patching", PACKAGE / "environment.py"):
        text = error.text.strip(HOLE + " :.,")
        if len(text) < 8 or any(word in error.text for word in NO_USERS):
            continue
        if not any(says(error.text, message) and _is_specific(message) for message in quoted):
            missing.append(f"{error.path.relative_to(ROOT)}:{error.line}: {error.text.replace(HOLE, '...')}")
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(missing)


def test_what_is_refused_with_a_tree_can_be_found():
    quoted = [message for message, _ in SPOKEN if _is_specific(message)]
    for kind in (cache_support.DECODE, cache_support.LINEAR, cache_support.WINDOWS, cache_support.PEGAFLOW):
        for refused in kind.refused:
            error = re.sub(r"\{[^}]*\}", HOLE, refused.error)
            assert any(says(error, message) for message in quoted), refused.error


def _is_specific(message: str) -> bool:
    return len(message.replace("...", "").strip()) >= 7


#: What notes why a request has failed, wherever that is seen.
NOTES = ("fail", "_fail", "lose", "record_failure", "fail_room", "lose_decode", "take_reason")
#: What says why a request has failed, to be noted by who asks; and names of such reasons.
SAYS, NAMED = ("overdue", "difference", "what_landed", "why_unreached"), ("GIVEN_UP", "ELSEWHERE", "COMPUTED")


def test_reasons_of_failures_can_be_found():
    """Every reason that a request is failed with is quoted."""
    quoted = [message for message, _ in SPOKEN if " " in message and _is_specific(message)]
    reasons = [*handed(NOTES, PATCH), *assigned("message", PATCH), *returned(SAYS, PATCH)]
    reasons += [reason for name in NAMED for reason in assigned(name, PATCH / "disaggregation")]
    assert len(reasons) > 10, "nothing was found to look at"
    missing = [
        f"{reason.path.relative_to(ROOT)}:{reason.line}: {reason.text.replace(HOLE, '...')}"
        for reason in reasons
        if not any(says(reason.text, message) for message in quoted)
    ]
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(missing)
