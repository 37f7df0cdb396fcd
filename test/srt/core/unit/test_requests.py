"""What a request, or what others say, costs no worker."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, wait

import pytest
from sglang.srt.disaggregation.common import handshakes
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.server_args import prepare_server_args

from sglang_pd_radix.tools.make_model import make_model


def test_a_prefill_that_does_not_say_which_rank_holds_nobody_up(monkeypatch):
    """Without the cache the engine asks as it does, and waits."""
    code = CommonKVReceiver.query_prefill_dp_ranks.__globals__
    monkeypatch.setitem(code, "_rank_answers", code["RankAnswers"]())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addr = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        for _ in range(50):
            assert CommonKVReceiver.query_prefill_dp_ranks(addr, [5]) == {}
        # The engine waits for five seconds, fifty times.
        assert time.monotonic() - began < 5


def test_the_ranks_of_thousands_are_told_and_those_that_nobody_asks_for_are_forgotten(monkeypatch):
    """Of more than 4096 requests at once all that was told was thrown away before it could be used, again and again."""
    questions: list[Future] = []
    threaded = handshakes.in_background
    monkeypatch.setattr(handshakes, "in_background", lambda *work: questions.append(threaded(*work)) or questions[-1])
    answers = CommonKVReceiver.query_prefill_dp_ranks.__globals__["RankAnswers"]()

    def ask(rooms: range) -> dict[str, int]:
        found = answers.query("a", list(rooms), lambda addr, lacking: {str(room): room % 3 for room in lacking})
        wait(questions)
        return found

    assert ask(range(10_000)) == {} and ask(range(9_000)) == {str(room): room % 3 for room in range(9_000)}
    # The others have been aborted.
    assert ask(range(9_000, 9_001)) == {} and ask(range(9_000, 9_001)) == {"9000": 0} and not answers._queries


@pytest.mark.parametrize("size", ["0", "-16"])
def test_pages_are_pages(tmp_path, size):
    model = make_model(tmp_path / "m")
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu", "--page-size", size])
    with pytest.raises(ValueError, match="--page-size is"):
        args.check_server_args()
