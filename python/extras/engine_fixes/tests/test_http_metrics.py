"""With metrics on, the engine's server answers on the routes that it includes from a router."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils import common


def test_a_request_to_an_included_router_has_a_label():
    app, router = FastAPI(), APIRouter()
    seen: list[tuple[str, bool]] = []

    @router.get("/v1/loads")
    def loads() -> dict:
        return {}

    app.include_router(router)

    @app.middleware("http")
    async def label(request, call_next):
        seen.append(common._get_fastapi_request_path(request))
        return await call_next(request)

    assert TestClient(app).get("/v1/loads").status_code == 200
    assert TestClient(app).get("/nowhere").status_code == 404
    assert seen == [("/v1/loads", True), ("/nowhere", False)]
