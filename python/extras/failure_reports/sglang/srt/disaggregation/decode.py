"""Decode answers 400 where prefill reports that the request itself is at fault.

Upstream: none is known.
"""

from __future__ import annotations

from http import HTTPStatus

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.refusal import is_at_fault

__all__ = ["DecodeTransferQueue"]


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Distinguishes failures caused by the request."""

    def _fail(self, decode_req) -> None:
        """Answers 400, as prefill does, if prefill has refused the request."""
        super()._fail(decode_req)
        finish = decode_req.req.finished_reason
        if is_at_fault(finish.message):
            finish.status_code = HTTPStatus.BAD_REQUEST
