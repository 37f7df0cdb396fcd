"""Remainders of prompts that decode computes itself, in the simulated worker: the real policy and its queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.local_policy import UNIT
from sglang.srt.disaggregation.local_prefill import LocalPrefills

from sim.steps import tokens_read

if TYPE_CHECKING:
    from sim.decode import SimulatedDecode


class SimulatedSteps:
    """Steps over prompts of one worker, between those in which it decodes."""

    def __init__(self, worker: SimulatedDecode, local: LocalPrefills):
        self.worker, self.local = worker, local
        # Figures of the policy are tokens, and here slots.
        *tokens, paced = local.policy
        local.policy = type(local.policy)(*(max(1, figure // worker.scale) for figure in tokens), paced)
        # What a worker measures of its steps it would find to be this, and so takes each for what it is charged.
        local.bucket.own = self._measured
        self._after_one = False
        self.steps = self.tokens = 0

    def _measured(self) -> list[int]:
        worker, times = self.worker, self.worker.times
        step = times.decode_step(len(worker.running), tokens_read(worker))
        cost = (times.computed or times.step) + worker.scale * times.token * self.local.policy.slice
        return [round(UNIT * seconds / step) for seconds in (cost, self.local.transfers.short() or 0.0)]

    def decoded(self, steps: int) -> None:
        """So many decode steps have been taken."""
        self._after_one = False
        for _ in range(steps):
            self.local.bucket.decoded(len(self.worker.running))

    def begin(self) -> float | None:
        """Begin the next step over prompts, as `local_steps.next_local_batch`; returns its seconds, None for none."""
        worker, local = self.worker, self.local
        decoding = len(worker.running) + len(worker.waiting)
        if not decoding:
            local.bucket.decoded(0)
        if not local.waiting or (self._after_one and decoding) or not local.may_step(decoding):
            return None
        room = worker.max_running - len(worker.running)
        slices = local.begin(local.pick(local.most_tokens(decoding), room, lambda req: True))
        if not slices:
            return None
        spans = [(len(one.req.prefix_indices), one.req.extend_input_len) for one, _ in slices]
        slots = sum(new for _, new in spans)
        local.launch(SimpleNamespace(reqs=[one.req for one, _ in slices]), slices)
        self.steps, self.tokens = self.steps + 1, self.tokens + slots * worker.scale
        return worker.times.extend([(before * worker.scale, new * worker.scale) for before, new in spans])

    @property
    def under_way(self) -> bool:
        return self.local.launched is not None

    def end(self) -> None:
        """The step has ended: those whose prompt it completes decode."""
        computed = self.local.computed()
        assert computed is not None
        batch, unfinished = computed
        self._after_one = True
        for req in batch.reqs:
            if req not in unfinished:
                self.worker.begin_answer(req, [0])
