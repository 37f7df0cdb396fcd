"""The runs of ``pd-radix verify`` on one deployment, and when caches are emptied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .asking import Run, Truth, ask_alone, ask_together
from .judging import Found, Judge, Verdict, findings, judge_reuse, same_answers
from .kv_record import Records
from .script import Script, Wave

# Drafted tokens per step if the worker does not report them.
DRAFT_TOKENS = 4


@dataclass
class Check:
    """deployment: of `bench.deploy`, with sides off and on. info: a decode worker's server info."""

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
        """The kind of pool whose KV cannot be recorded, if any."""
        return self.on_records.unreadable

    def measure_noise(self) -> list[str]:
        """Measure differences between correct runs: the side without the flag, one by one and many at once.

        Returns leaks found after each.
        """
        self.deployment.use(self._off)
        url = self.deployment.url(self._off)
        self.waves, self.reference = ask_alone(url, self.script, self.off_records)
        # Before the caches are emptied, which would repair leaks.
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

    def ask_on(self) -> Run:
        """Run the side with the flag, with its caches as they are."""
        return ask_together(self.deployment.url(self._on), self.waves, self.on_records)

    def problems_on(self) -> list[str]:
        """Leaks in the pools of the side with the flag, until a run is judged."""
        return self.deployment.problems(self._on)

    def judge_on(self, verdict: Verdict, runs: dict[str, Run]) -> None:
        """Judge named runs of the side with the flag; in later ones all prompts are repeated."""
        self._learn(list(runs.values()))
        for number, (name, run) in enumerate(runs.items()):
            held = self.script.warm(self.waves) if number else self.waves
            self.noise.judge(verdict, self._findings(run), name, same_answers(self.reference, run))
            bigrams = bool(self.info.get("speculative_algorithm"))
            judge_reuse(verdict, held, self.reference, run, self.info["page_size"], name, bigrams)

    def _findings(self, run: Run) -> list[Found]:
        # Decode keeps tokens without draft KV out of the tree: at most the tokens verified in a step.
        drafts = self.info.get("speculative_num_draft_tokens") or DRAFT_TOKENS
        return findings(self.waves, run, self.truth, drafts if self.info.get("speculative_algorithm") else 0)

    def _learn(self, runs: list[Run]) -> None:
        """Empties prefill's cache first, so that all is recomputed; does not touch the side with the flag."""
        self.deployment.use(self._off)
        self.truth.learn(self.waves, runs)
