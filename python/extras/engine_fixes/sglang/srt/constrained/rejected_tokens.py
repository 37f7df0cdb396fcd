"""A forced token that the grammar rejects ends only its own request.

Upstream: none is known.
"""

from __future__ import annotations

import weakref
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

__all__ = ["check_grammar"]


def check_grammar(req: Any) -> None:
    """Abort ``req`` on a token that its grammar rejects. Weak references: a cycle's memory would be freed late."""
    grammar: Any = weakref.proxy(req.grammar)
    req = weakref.proxy(req)

    def accept_token(token: int) -> None:
        if isinstance(req.to_finish or req.finished_reason, FINISH_ABORT):
            return
        try:
            grammar.__class__.accept_token(grammar, token)
        except Exception as e:
            reason = f"The grammar of the request rejects token {token}, which was forced: {e}"
            ended = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
            setattr(req, "finished_reason" if req.finished() else "to_finish", ended)
            # A failed grammar may also fail to make the next mask.
            grammar.is_terminated = lambda: True

    grammar.accept_token = accept_token
