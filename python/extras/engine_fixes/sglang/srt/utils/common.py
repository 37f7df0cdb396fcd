"""The path label of a request in the engine's HTTP metrics.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.utils import common as engine

__all__ = ["_get_fastapi_request_path"]


def _get_fastapi_request_path(request: Any) -> tuple[str, bool]:
    """Handles routes without a path: in FastAPI 0.165 a router included in another one.

    With ``--enable-metrics`` the engine raises for them and answers 500 to ``/v1/loads``, which smg requests.
    """
    try:
        return engine._get_fastapi_request_path(request)
    except AttributeError:
        return request.url.path, True
