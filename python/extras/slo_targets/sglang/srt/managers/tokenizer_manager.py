"""Answers clients of requests that are refused for the TTFT target.

Upstream: none is known.
"""

from __future__ import annotations

import sys
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_answer import KEY, RefusedAnswers
from sglang.srt.server_args import ttft_option

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Has the HTTP server answer 503 with ``Retry-After``, if this worker refuses requests."""

    def init_disaggregation(self) -> None:
        """Adds `RefusedAnswers` to the HTTP server of this process, if it has one."""
        super().init_disaggregation()
        given = self.server_args.disaggregation_decode_ttft_target
        server: Any = sys.modules.get("sglang.srt.entrypoints.http_server")
        if given is not None and ttft_option(given).refuses and server is not None:
            # Behind the authentication and compression of the whole application.
            router = server.app.router
            router.middleware_stack = RefusedAnswers(router.middleware_stack)

    async def _wait_one_response(self, obj, state, request=None):
        """Adds that the HTTP server learns of a refusal before the client is sent anything."""
        answer = None if request is None else request.scope.get(KEY)

        def tell() -> None:
            if answer is not None and (finish := getattr(state, "refused", None)) is not None:
                answer.refuse(finish)

        try:
            async for out in super()._wait_one_response(obj, state, request):
                tell()
                yield out
        except HTTPException:
            tell()
            raise

    def _handle_batch_output(self, recv_obj) -> None:
        """Adds a note of refusals, which have a finish reason of their own."""
        for rid, finish in zip(recv_obj.rids, recv_obj.finished_reasons, strict=False):
            if finish and "retry_after" in finish and (state := self.rid_to_state.get(rid)) is not None:
                state.refused = finish
        super()._handle_batch_output(recv_obj)
