"""Tokens that penalties and grammars receive, on decode with the flag.

Upstream: none is known.
"""

from __future__ import annotations

from contextlib import nullcontext

from sglang.srt.managers import schedule_batch as engine
from sglang.srt.sampling.penalized_tokens import tell_delayed, tell_earlier

__all__ = ["ScheduleBatch"]


class ScheduleBatch(engine.ScheduleBatch):
    """A batch whose penalties and grammars receive the same tokens as in the aggregated engine."""

    def prepare_for_decode(self) -> None:
        """With the decode tree, passes output tokens to penalties in the aggregated engine's order."""
        with tell_delayed(self) if self._tells_delayed() else nullcontext():
            super().prepare_for_decode()

    def _tells_delayed(self) -> bool:
        """Whether the next step is overlapped and has penalties; overlapped speculative steps have none."""
        if not self.enable_overlap or not self.spec_algorithm.is_none():
            return False
        required = self.sampling_info.penalizer_orchestrator.is_required
        return required and any(req.decode_prefix_len is not None for req in self.reqs)

    def process_prebuilt(self, server_args, future_map) -> None:
        """Restores grammars and penalties of resumed requests.

        The engine passes a resumed request's last token to its grammar again, unless the grammar has recorded it; only
        xgrammar's own does. Penalties are created anew and receive no earlier output tokens.
        """
        for place, req in enumerate(self.reqs):
            if not req.retracted_stain or req.decode_prefix_len is None:
                continue
            if req.grammar is not None:
                req.grammar.current_token = req.output_ids[-1]
            if self.sampling_info is not None and self.sampling_info.penalizer_orchestrator.is_required:
                tell_earlier(self, place)
        super().process_prebuilt(server_args, future_map)
