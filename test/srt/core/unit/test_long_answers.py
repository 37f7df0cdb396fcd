"""Answers that may become longer than admission plans for."""

from __future__ import annotations

from dataclasses import replace

from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.decode import DecodeRequest
from test_traps import tokens

PLANNED = 8


def test_one_that_is_longer_than_planned_has_room_ahead_of_others():
    """Another one's transfer takes some steps, in which nothing of it can be taken back."""
    loop = Loop(size=128, page_size=1, reserved=2, max_reqs=4)
    accounts = loop.queue.accounts
    accounts.lengths = replace(accounts.lengths, most_new_tokens=PLANNED)
    made: list[DecodeRequest] = []
    asked_in = 0

    def between() -> None:
        nonlocal asked_in
        if not made:
            made.append(loop.arrive(tokens(1, 8), max_new=100))
            loop.handshake(made[0])
        if loop.iterations == 45:
            made.append(loop.arrive(tokens(2, 72), max_new=4))
            loop.handshake(made[1])
        for decode_req in loop.asked:
            asked_in = asked_in or (loop.iterations if decode_req is made[-1] and len(made) == 2 else 0)
            if decode_req is made[0] or loop.iterations == asked_in + PLANNED:
                loop.complete(decode_req)
        if len(loop.told) == 2:
            raise LoopEnds
        assert loop.iterations < 300, "an answer does not come to an end"

    loop.run(between)
    assert [len(decode_req.req.output_ids) for decode_req in made] == [100, 4]
    # Not before what is planned for the first one is there.
    assert loop.told[0] is made[0].req
