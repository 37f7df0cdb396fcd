"""What penalties and grammars are told of an answer's tokens, on decode with the flag.

Upstream: none is known.
"""

from __future__ import annotations

from contextlib import nullcontext

from sglang.srt.managers import schedule_batch as engine
from sglang.srt.sampling.penalized_tokens import tell_delayed, tell_earlier

__all__ = ["ScheduleBatch"]


class ScheduleBatch(engine.ScheduleBatch):
    """A batch that tells penalties and grammars what the aggregated engine tells them."""

    def prepare_for_decode(self) -> None:
        """With the decode tree, penalties are told of an answer's tokens in the order of the aggregated engine."""
        with tell_delayed(self) if self._tells_delayed() else nullcontext():
            super().prepare_for_decode()

    def _tells_delayed(self) -> bool:
        """Whether the next step is overlapped and has penalties; in overlapped steps of speculation there are none."""
        if not self.enable_overlap or not self.spec_algorithm.is_none():
            return False
        required = self.sampling_info.penalizer_orchestrator.is_required
        return required and any(req.decode_prefix_len is not None for req in self.reqs)

    def process_prebuilt(self, server_args, future_map) -> None:
        """Resumes keep what they had.

        The engine gives a grammar the last token of a request that comes back, unless it has noted one: only xgrammar's
        own does. To those of reasoning and of other backends that is a second one. Penalties, which are made anew, it
        tells nothing of the answer so far.
        """
        for place, req in enumerate(self.reqs):
            if not req.retracted_stain or req.decode_prefix_len is None:
                continue
            if req.grammar is not None:
                req.grammar.current_token = req.output_ids[-1]
            if self.sampling_info is not None and self.sampling_info.penalizer_orchestrator.is_required:
                tell_earlier(self, place)
        super().process_prebuilt(server_args, future_map)
