"""The runs of ``pd-radix verify`` on one deployment: what they ask of which side, and when its caches are emptied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .asking import Run, Truth, ask_alone, ask_together
from .judging import Found, Judge, Verdict, findings, judge_reuse, same_answers
from .kv_record import Records
from .script import Script, Wave

# What a step drafts where its worker does not say.
DRAFT_TOKENS = 4


@dataclass
class Check:
    """deployment: of `bench.deploy`, with the sides off and on. info: what a decode worker says of itself."""

    deployment: Any
    script: Script
    info: dict[str, Any]
    prefill_records: Records
    off_records: Records
    on_records: Records
    waves: list[Wave] = field(init=False)
    reference: Run = field(init=False)
    truth: Truth = field(init=False)
    noise: Judge = field(init=False)

    def __post_init__(self) -> None:
        self._off, self._on = self.deployment.variants
        self.truth = Truth(self.deployment.prefill_urls[0], self.prefill_records)

    @property
    def unreadable(self) -> str | None:
        """The kind of pool whose KV has no record."""
        return self.on_records.unreadable

    def measure_noise(self) -> list[str]:
        """Ask the side without the flag, one by one and many at once: what is right differs by this much.

        Returns what its pools held after each and should not.
        """
        self.deployment.use(self._off)
        url = self.deployment.url(self._off)
        self.waves, self.reference = ask_alone(url, self.script, self.off_records)
        # Now: all that empties the caches makes such things good.
        wrong = self.deployment.problems(self._off)
        self.deployment.use(self._off)
        together = ask_together(url, self.waves, self.off_records)
        wrong += self.deployment.problems(self._off)
        self._learn([self.reference, together])
        noise = [found for run in (self.reference, together) for found in self._findings(run)]
        self.noise = Judge.of(noise, str(self.info["dtype"]), has_kv=self.unreadable is None)
        return wrong

    def empty_on(self) -> None:
        """Empty the caches of the side with the flag."""
        self.deployment.use(self._on)

    def dirty_on(self, tokens: int) -> None:
        """Have pages of the side with the flag, whose caches are empty after, hold what another prompt left there."""
        self.empty_on()
        ask_together(self.deployment.url(self._on), [Wave("another", [self.script.some(tokens)], [0])], self.on_records)
        self.empty_on()

    def ask_on(self) -> Run:
        """Ask the side with the flag, with what is in its caches."""
        return ask_together(self.deployment.url(self._on), self.waves, self.on_records)

    def problems_on(self) -> list[str]:
        """What the pools of the side with the flag hold and should not, until a run is judged."""
        return self.deployment.problems(self._on)

    def judge_on(self, verdict: Verdict, runs: dict[str, Run]) -> None:
        """Judge runs of the side with the flag, by name; of the later ones, all prompts have been asked before."""
        self._learn(list(runs.values()))
        for number, (name, run) in enumerate(runs.items()):
            held = self.script.warm(self.waves) if number else self.waves
            self.noise.judge(verdict, self._findings(run), name, same_answers(self.reference, run))
            bigrams = bool(self.info.get("speculative_algorithm"))
            judge_reuse(verdict, held, self.reference, run, self.info["page_size"], name, bigrams)

    def stop_records(self) -> None:
        """What follows is measured, and not looked into."""
        for records in (self.prefill_records, self.off_records, self.on_records):
            records.stop()

    def _findings(self, run: Run) -> list[Found]:
        # Decode keeps out of the tree what the draft model has not seen: at the most what a step verifies.
        drafts = self.info.get("speculative_num_draft_tokens") or DRAFT_TOKENS
        return findings(self.waves, run, self.truth, drafts if self.info.get("speculative_algorithm") else 0)

    def _learn(self, runs: list[Run]) -> None:
        """Prefill's cache is emptied first, so all is computed anew; the side with the flag is left as it is."""
        self.deployment.use(self._off)
        self.truth.learn(self.waves, runs)
