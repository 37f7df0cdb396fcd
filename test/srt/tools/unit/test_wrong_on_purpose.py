"""The workers that tests with servers make wrong on purpose still are, whatever the names of what they change."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.decode import DecodeRequest
from test_traps import tokens

FOLDER = Path(__file__).parents[2] / "core" / "e2e"
PROMPT, MAX_NEW, REQS = 16, 4, 3


def faulty(monkeypatch: pytest.MonkeyPatch, *faults: str) -> ModuleType:
    """`faulty_decode`, whose faults are chosen where it is imported; nothing is hooked here."""
    monkeypatch.delenv("DECODE_FAULTS", raising=False)
    spec = importlib.util.spec_from_file_location("faulty_decode", FOLDER / "faulty_decode" / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.chosen, module.WRONG_ONE_IN = {*faults}, 2
    return module


def run(loop: Loop) -> list[DecodeRequest]:
    """One request after the other, of prompts that share nothing."""
    made: list[DecodeRequest] = []

    def between() -> None:
        if len(loop.told) == len(made):
            if len(made) == REQS:
                raise LoopEnds
            made.append(loop.arrive(tokens(len(made), PROMPT), max_new=MAX_NEW))
            loop.handshake(made[-1])
        for decode_req in loop.asked:
            loop.complete(decode_req)
        assert loop.iterations < 100, "an answer does not come to an end"

    loop.run(between)
    return made


def loop_with(module: ModuleType | None) -> Loop:
    loop = Loop(overlap=False, size=256, page_size=1, max_reqs=4)
    loop.scheduler.server_args.disaggregation_decode_enable_radix_cache = True
    if module is not None:
        module._spoil(loop.scheduler)
    return loop


# Of a prompt and its answer the last token has no KV.
KEPT = PROMPT + MAX_NEW - 1


@pytest.mark.parametrize(
    ("fault", "kept"), [(None, REQS * KEPT), ("keeps no answers", REQS * PROMPT), ("keeps nothing", 0), ("forgets", 0)]
)
def test_what_stays_in_the_tree(monkeypatch: pytest.MonkeyPatch, fault: str | None, kept: int):
    loop = loop_with(faulty(monkeypatch, fault) if fault else None)
    run(loop)
    assert loop.tree.evictable_size() == kept


def test_the_first_token_of_one_in_so_many_is_another(monkeypatch: pytest.MonkeyPatch):
    def first(*faults: str) -> list[int]:
        return [one.req.output_ids[0] for one in run(loop_with(faulty(monkeypatch, *faults)))]

    right = first()
    assert first("wrong token") == [right[0], right[1] ^ 1, right[2]]


def test_a_descriptor_is_left_open_for_each_request(monkeypatch: pytest.MonkeyPatch):
    opened: list[int] = []
    real = os.open
    module = faulty(monkeypatch, "leaks descriptors")

    def counted(path: str, *args: int) -> int:
        found = real(path, *args)
        if path == os.devnull:
            opened.append(found)
        return found

    monkeypatch.setattr(os, "open", counted)
    run(loop_with(module))
    assert len(opened) == REQS
    for descriptor in opened:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
        os.close(descriptor)


def test_a_token_of_one_in_so_many_has_the_kv_of_another(monkeypatch: pytest.MonkeyPatch):
    """Which the world of these tests finds by itself."""
    with pytest.raises(AssertionError) as found:
        run(loop_with(faulty(monkeypatch, "wrong KV")))
    assert found.traceback[-1].name == "_check_kv"
