"""Answers clients of requests that are refused for the TTFT target.

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
    """Has the HTTP server answer 503 with ``Retry-After``, if this worker refuses requests."""

    refuses = False

    def init_disaggregation(self) -> None:
        """Adds `RefusedAnswers` to the HTTP server of this process, if it has one."""
        super().init_disaggregation()
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            return
        given = self.server_args.disaggregation_decode_ttft_target
        self.refuses = given is not None and ttft_option(given).refuses
        server: Any = sys.modules.get("sglang.srt.entrypoints.http_server")
        if self.refuses and server is not None:
            # Behind the authentication and compression of the whole application.
            router = server.app.router
            router.middleware_stack = RefusedAnswers(router.middleware_stack)

    def _wait_one_response(self, obj, state, request=None):
        """Adds that the HTTP server learns of a refusal before the client is sent anything."""
        outputs = super()._wait_one_response(obj, state, request)
        answer = getattr(request, "scope", {}).get(KEY) if self.refuses else None
        return outputs if answer is None else _told(outputs, state, answer)

    def _handle_batch_output(self, recv_obj) -> None:
        """Adds a note of refusals, which have a finish reason of their own."""
        for rid, finish in zip(recv_obj.rids, recv_obj.finished_reasons, strict=False) if self.refuses else ():
            if finish and "retry_after" in finish and (state := self.rid_to_state.get(rid)) is not None:
                state.refused = finish
        super()._handle_batch_output(recv_obj)


async def _told(outputs: AsyncIterator[Any], state: Any, answer: RefusedAnswer) -> AsyncIterator[Any]:
    """The ``outputs`` of a request; before the first, ``answer`` is told of a refusal."""

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
