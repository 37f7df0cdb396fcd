"""Prefill's tokenizer manager answers requests whose prompts decode computes.

Upstream: none is known.
"""

from __future__ import annotations

from functools import cached_property, partial

from sglang.srt.disaggregation.peer_calls import listen
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.computed_answers import COMPUTED_ROUTE, ComputedAnswers

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """A tokenizer manager that is notified of prompts decode computes."""

    def init_disaggregation(self) -> None:
        """Adds the route for these notifications on prefill."""
        super().init_disaggregation()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(COMPUTED_ROUTE, partial(self._on_loop, self._note_computed))

    @cached_property
    def computed(self) -> ComputedAnswers:
        """Answers for requests whose prompts decode computes."""
        return ComputedAnswers(self)

    def _is_answered(self, tokenized_obj, of_batch: bool = False) -> bool:
        """Includes requests whose prompts decode computes."""
        return self.computed.answers(tokenized_obj, of_batch) or super()._is_answered(tokenized_obj, of_batch)

    def _note_computed(self, rooms: list[int]) -> None:
        for room in rooms:
            self.computed.note(room)
