"""Decode answers as prefill does where that says that a request is itself at fault.

Upstream: none is known.
"""

from __future__ import annotations

from http import HTTPStatus

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.refusal import is_at_fault

__all__ = ["DecodeTransferQueue"]


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Knows of whose fault a failure is."""

    def _fail(self, decode_req) -> None:
        """The client of a request that prefill has refused is answered 400, as prefill's is."""
        super()._fail(decode_req)
        finish = decode_req.req.finished_reason
        if is_at_fault(finish.message):
            finish.status_code = HTTPStatus.BAD_REQUEST
