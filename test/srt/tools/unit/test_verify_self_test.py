"""`pd-radix verify --self-test`: each fault is made once, judged as any run, and missed aloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.verification import faults, self_test
from sglang_pd_radix.tools.verification.judging import Verdict
from sglang_pd_radix.tools.verification.kv_record import Records
from sglang_pd_radix.tools.verification.script import Script


class FakeCheck:
    """A worker that carries out orders, and a verdict that finds those of ``seen``."""

    def __init__(self, directory: Path, seen: set[str], tp_size: int = 2, carries_out: bool = True) -> None:
        self.on_records, self.info = Records(directory), {"tp_size": tp_size}
        self.waves = Script(range(100, 900), 16, 0, small=True).waves()
        self.seen, self.carries_out = seen, carries_out
        self.log: list[str] = []
        # The fault in whose run it loses KV, until it is judged: then its caches are emptied.
        self.lost = ""
        self.unreadable: str | None = None

    def dirty_on(self, tokens: int) -> None:
        assert not (self.on_records.directory / faults.ORDER).exists(), "an order may only be there when it is meant"
        self.log.append("dirty")

    def ask_on(self):
        order = json.loads((self.on_records.directory / faults.ORDER).read_text())
        prompts = [prompt for wave in self.waves for prompt in wave.prompts]
        assert prompts.count(order["prompt"]) == 2, "it is asked, and once more with what is in the cache"
        assert len(order["prompt"]) >= 16 * (order["page"] + 2), "two whole pages can be exchanged"
        assert any(order["prompt"] == p[: len(order["prompt"])] for wave in self.waves[2:3] for p in wave.prompts)
        if self.carries_out:
            (self.on_records.directory / f"{faults.DONE}-1").touch()
        self.log.append(order["kind"])
        return order["kind"]

    def judge_on(self, verdict, runs) -> None:
        (kind,) = runs.values()
        self.log.append("judged")
        if kind in self.seen:
            verdict.found_by["KV"] = 1

    def problems_on(self) -> list[str]:
        return ["16 tokens are lost"] * (self.lost == self.log[-1])


def test_every_fault_is_made_alone_and_found(tmp_path: Path) -> None:
    one = FakeCheck(tmp_path, set(faults.KINDS))
    outcomes = self_test.run(one, lambda text: None)
    assert one.log == [step for kind in faults.KINDS for step in ("dirty", kind, "judged")]
    verdict = Verdict({})
    self_test.judge(verdict, outcomes)
    assert verdict.word == "PASSED" and len(verdict.lines) == len(faults.KINDS)
    assert all("found by KV" in line for line in verdict.lines)
    assert not (tmp_path / faults.ORDER).exists(), "what follows is right again"


def test_what_a_run_with_a_fault_loses_is_told(tmp_path: Path) -> None:
    """The report says that the pools were looked at after each part."""
    verdict = Verdict({})
    one = FakeCheck(tmp_path, set(faults.KINDS))
    one.lost = "one page"
    self_test.judge(verdict, self_test.run(one, lambda text: None))
    assert verdict.failures == ["self-test: one page: 16 tokens are lost"]


@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_that_is_missed_fails_the_self_test(tmp_path: Path, kind: str) -> None:
    outcomes = self_test.run(FakeCheck(tmp_path, set(faults.KINDS) - {kind}), lambda text: None)
    verdict = Verdict({})
    self_test.judge(verdict, outcomes)
    assert verdict.failures == [f"self-test: {kind} was not found"]
    assert verdict.sentence == f"pd-radix verify: FAILED: fault: {kind}"
    assert [entry["fault"] for entry in verdict.figures["self-test"] if not entry["found_by"]] == [kind]


def test_on_one_rank_the_fault_of_one_rank_is_told_not_to_be_made(tmp_path: Path) -> None:
    outcomes = self_test.run(FakeCheck(tmp_path, set(faults.KINDS), tp_size=1), lambda text: None)
    verdict = Verdict({})
    self_test.judge(verdict, outcomes)
    (part,) = [part for part in verdict.table.values() if part.result == "n/a"]
    assert verdict.word == "PASSED" and part.lines[0].startswith("NOT MADE: there is one rank")


def test_a_fault_that_was_not_made_is_no_find(tmp_path: Path) -> None:
    with pytest.raises(PdRadixError, match="has made the fault of one page"):
        self_test.run(FakeCheck(tmp_path, set(faults.KINDS), carries_out=False), lambda text: None)
    assert not (tmp_path / faults.ORDER).exists()


def test_a_pool_that_cannot_be_spoilt_is_told(tmp_path: Path) -> None:
    one = FakeCheck(tmp_path, set())
    one.unreadable = "OddPool"
    with pytest.raises(PdRadixError, match="does not know a OddPool"):
        self_test.run(one, lambda text: None)
