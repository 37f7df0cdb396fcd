"""Prefill digests its prompts, and reports images that differ from decode's.

Upstream: none is known.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.prompt_digests import prompt_digests, say_images

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["PrefillBootstrapQueue", "SchedulerDisaggregationPrefillMixin"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Gives each sender its prompt's digest."""

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Adds the digest, computed on demand."""
        super().add(req, num_kv_heads)
        if isinstance(req.disagg_kv_sender, CommonKVSender):
            req.disagg_kv_sender.own_prompt = cache(partial(prompt_digests, req))


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Reports differing images in the metadata."""

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
        """Adds the report to the last chunk."""
        if last_chunk:
            say_images(req, self.disagg_metadata_buffers)
        super().send_kv_chunk(req, last_chunk, end_idx)
