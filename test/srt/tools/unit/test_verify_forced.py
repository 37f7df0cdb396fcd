"""Log-probabilities of a given answer: what is asked of the engine, and what is read from its reply."""

from __future__ import annotations

import json

import pytest
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import forced
from sglang_pd_radix.tools.rounding import Answer
from sglang_pd_radix.tools.verification import asking

# As the engine answers for the prompt 3, 4, 5 and the answer 7, 8: from the prompt's last token on, which has none.
META = {
    "input_token_logprobs": [[None, 5, None], [-0.5, 7, None], [-0.25, 8, None]],
    "input_top_logprobs": [None, [[-0.5, 7, None], [-1.5, 3, None]], [[-0.25, 8, None]]],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The bodies of the requests; the reply is `META`."""
    bodies: list[dict] = []

    def http(url, body, timeout):
        bodies.append(body)
        return 200, json.dumps({"meta_info": META}).encode()

    monkeypatch.setattr(forced, "http", http)
    return bodies


def test_every_token_of_the_answer_is_scored_in_one_pass(asked) -> None:
    assert forced.score("http://x", [3, 4, 5], [7, 8], top=2) == Answer(
        (7, 8), (-0.5, -0.25), ({7: -0.5, 3: -1.5}, {8: -0.25})
    )
    assert asked[0]["input_ids"] == [3, 4, 5, 7, 8] and asked[0]["logprob_start_len"] == 2
    assert asked[0]["sampling_params"]["max_new_tokens"] == 1 and "bootstrap_host" not in asked[0]


def test_a_prefill_worker_alone_is_told_to_send_nothing(asked) -> None:
    forced.score("http://x", [3, 4, 5], [7, 8], prefill_alone=True)
    assert asked[0]["bootstrap_host"] == FAKE_BOOTSTRAP_HOST and asked[0]["bootstrap_room"] > 0


def test_likeliest_tokens_that_are_not_told_are_missed(monkeypatch, asked) -> None:
    """A router hands on the log-probabilities of a prompt, and nothing of its likeliest tokens."""
    monkeypatch.delitem(META, "input_top_logprobs")
    assert forced.score("http://x", [3, 4, 5], [7, 8]).likeliest == ()
    with pytest.raises(PdRadixError, match="ask a prefill worker"):
        forced.score("http://x", [3, 4, 5], [7, 8], top=1)


@pytest.mark.parametrize("answer", [[7, 9], [7], [7, 8, 9]])
def test_scores_of_other_tokens_are_refused(asked, answer) -> None:
    with pytest.raises(PdRadixError, match="which are not the"):
        forced.score("http://x", [3, 4, 5], answer)


def test_what_cannot_be_scored_is_told(monkeypatch, asked) -> None:
    for prompt, answer in (([], [1]), ([1], [])):
        with pytest.raises(PdRadixError, match="neither may be empty"):
            forced.score("http://x", prompt, answer)
    monkeypatch.setattr(forced, "http", lambda *a, **k: (503, b"no room"))
    with pytest.raises(PdRadixError, match="HTTP 503: no room"):
        forced.score("http://x", [1], [2])


@pytest.mark.parametrize(
    "reply, told",
    [
        (
            json.dumps({"error": {"message": "no decode worker"}}),
            "with what is no answer of an engine: .*no decode worker",
        ),
        ("<html>a proxy</html>", "with what is no answer of an engine: <html>a proxy"),
        ("[1]", "with what is no answer of an engine: .1."),
        (
            json.dumps({"meta_info": {"finish_reason": {"type": "abort", "message": "KV was lost"}}}),
            "was aborted: KV was lost",
        ),
    ],
)
def test_what_is_no_answer_is_one_clear_error(monkeypatch, reply, told) -> None:
    """A gateway, or a proxy before it, may say 200 and hand on what is none."""
    monkeypatch.setattr(forced, "http", lambda *a, **k: (200, reply.encode()))
    with pytest.raises(PdRadixError, match=told):
        forced.generate("http://x", {})


def test_an_answer_without_log_probabilities_is_told(monkeypatch) -> None:
    monkeypatch.setattr(forced, "http", lambda *a, **k: (200, json.dumps({"meta_info": {}}).encode()))
    with pytest.raises(PdRadixError, match="no log-probabilities"):
        asking.ask("http://x", [1, 2, 3])
