"""Passes refusals for the TTFT target to the HTTP server.

Upstream: none is known.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_answer import KEY, RefusedAnswer, RefusedAnswers
from sglang.srt.server_args import ttft_option

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """With ``refuse``: has the HTTP server answer 503 with ``Retry-After``."""

    refuses = False

    def init_disaggregation(self) -> None:
        """Adds `RefusedAnswers` to this process's HTTP server, if any."""
        super().init_disaggregation()
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            return
        given = self.server_args.disaggregation_decode_ttft_target
        self.refuses = given is not None and ttft_option(given).refuses
        server: Any = sys.modules.get("sglang.srt.entrypoints.http_server")
        if self.refuses and server is not None:
            # Inside the application's authentication and compression.
            router = server.app.router
            router.middleware_stack = RefusedAnswers(router.middleware_stack)

    def _wait_one_response(self, obj, state, request=None):
        """Reports a refusal to the HTTP server before the first output."""
        outputs = super()._wait_one_response(obj, state, request)
        answer = getattr(request, "scope", {}).get(KEY) if self.refuses else None
        return outputs if answer is None else _told(outputs, state, answer)

    def _handle_batch_output(self, recv_obj) -> None:
        """Notes refusals: their finish reason has ``retry_after``."""
        for rid, finish in zip(recv_obj.rids, recv_obj.finished_reasons, strict=False) if self.refuses else ():
            if finish and "retry_after" in finish and (state := self.rid_to_state.get(rid)) is not None:
                state.refused = finish
        super()._handle_batch_output(recv_obj)


async def _told(outputs: AsyncIterator[Any], state: Any, answer: RefusedAnswer) -> AsyncIterator[Any]:
    """Yields ``outputs``; before the first, passes a refusal to ``answer``."""

    def tell() -> None:
        if (finish := getattr(state, "refused", None)) is not None:
            answer.refuse(finish)

    try:
        async for out in outputs:
            tell()
            yield out
    except HTTPException:
        tell()
        raise
