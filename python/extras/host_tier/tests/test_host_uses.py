"""With write_through_selective, what one request alone has used is not saved, however often it enters the tree."""

from __future__ import annotations

import pytest
from decode_world import World
from host_world import HostSizes
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.mem_cache.host_tier.tier import HITS
from test_host_tier import PAGE, admit, saved
from test_traps import tokens

SELECTIVE = HITS["write_through_selective"]
# Its last page is not shared: that of its last token is computed into a page of its own.
PROMPT = tokens(1, 41)


def settle(one: World) -> int:
    """Tokens that have been saved when nothing more is."""
    for _ in range(40):
        one.tier.memory.wait()
        one.step()
    assert not one.tier.saves.busy
    one.check()
    return one.tier.saves.saved_tokens


def computing(slice_tokens: int, hits: int) -> Loop:
    """A decode worker that computes prompts in slices, with host memory."""
    loop = Loop(
        options={"disaggregation_decode_local_prefill": "100"},
        size=256,
        page_size=PAGE,
        reserved=0,
        host=HostSizes(256, hits),
    )
    loop.transfer.local.policy = Policy(most=100, slice=slice_tokens, step=2 * slice_tokens, debt=200)
    return loop


def computed_here(slice_tokens: int, times: int, hits: int, prompt: list[int] = PROMPT) -> Loop:
    """``prompt``, so often, one after another, computed by decode in slices."""
    loop = computing(slice_tokens, hits)

    def between() -> None:
        if loop.iterations % 40 == 1 and loop.iterations < 40 * times:
            loop.handshake(loop.arrive(prompt, max_new=2))
        loop.tier.memory.wait()
        if loop.iterations >= 40 * times and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 40 * times + 40

    loop.run(between)
    loop.check_answers()
    return loop


@pytest.mark.parametrize("slice_tokens", [4, 10, 100])
def test_the_slices_of_a_prompt_are_one_use_of_it(slice_tokens):
    loop = computed_here(slice_tokens, 1, SELECTIVE)
    assert len(loop.extended) == {4: 6, 10: 3, 100: 1}[slice_tokens] and loop.tier.saves.saved_tokens == 0
    assert computed_here(slice_tokens, 2, SELECTIVE).tier.saves.saved_tokens == 40
    # Also where it ends with a page, which enters the tree after the last.
    assert computed_here(slice_tokens, 1, SELECTIVE, PROMPT[:40]).tier.saves.saved_tokens == 0
    # And it is one: after the first, all of it is saved where that is enough.
    assert computed_here(slice_tokens, 1, 1).tier.saves.saved_tokens == 40


def test_a_path_of_several_nodes_is_saved_once(monkeypatch):
    """All become worth it at once. From its end up, each node would copy all above it."""
    one, turns, copied = World(size=16384, page_size=PAGE, host=HostSizes(4096, SELECTIVE, late=True)), 6, []
    save = one.tier.memory.save
    monkeypatch.setattr(one.tier.memory, "save", lambda host, device: copied.append(len(host)) or save(host, device))
    prompt = tokens(1, 24 * turns)
    for more in ([], tokens(9, 8)):
        one.complete(admit(one, prompt + more, max_new=2))
        one.step()
        while one.running:
            one.decode()
        for turn in range(1, turns if not more else 0):
            # It parts from the prompt, and ends before its KV comes.
            other = admit(one, prompt[: 24 * turn] + tokens(7 + turn, 8))
            other.kv_receiver.abort()
            other.kv_receiver.quiet = True
            one.step()
            one.step()
    settle(one)
    assert sum(copied) == len(prompt)


@pytest.mark.parametrize("retractions", [0, 1, 3])
def test_a_request_that_is_retracted_and_comes_back_is_one_use(retractions):
    one = World(size=128, page_size=PAGE, host=HostSizes(256, SELECTIVE))
    prompt = tokens(1, 24)
    one.complete(admit(one, prompt, max_new=8))
    one.step()
    for _ in range(retractions):
        one.decode()
        one.retract(one.running[-1])
        one.step()
        assert one.running
    while one.running:
        one.decode()
    assert settle(one) == 0
    saved(one, prompt + tokens(9, 4))
    assert settle(one) == 24
