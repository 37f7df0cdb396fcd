"""The label that the engine's HTTP metrics give a request.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.utils import common as engine

__all__ = ["_get_fastapi_request_path"]


def _get_fastapi_request_path(request: Any) -> tuple[str, bool]:
    """A router which another one includes is a route without a path, as in FastAPI 0.165.

    With ``--enable-metrics`` the engine raises then, and answers 500 to whoever asks for ``/v1/loads``, as smg does.
    """
    try:
        return engine._get_fastapi_request_path(request)
    except AttributeError:
        return request.url.path, True
