"""The HTTP answer to a request that the scheduler refuses: 503 with ``Retry-After``, streamed or not.

The engine sends a stream's head with status 200 before the first token, and its errors have no such header.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ErrorResponse

__all__ = ["KEY", "RefusedAnswer", "RefusedAnswers"]

# Key of the answer in the request's ASGI scope.
KEY = "sglang_pd_radix.refused_answer"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RefusedAnswer:
    """Sends the messages of one answer; the head is held until the first part of the body."""

    def __init__(self, send: Send):
        self._send = send
        self._head: Message | None = None
        self._finish: dict[str, Any] | None = None
        self._replaced = False

    def refuse(self, finish: dict[str, Any]) -> None:
        """Note a refusal. finish: the request's finish reason."""
        self._finish = finish

    async def send(self, message: Message) -> None:
        """Send the engine's next message, or 503 instead of a stream that has not started."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        if (head := self._head) is not None:
            self._head = None
            if self._finish is not None:
                self._replaced = head["status"] < 400
                head, message = self._refusal(self._finish, head, message)
            await self._send(head)
        elif self._replaced:
            return
        await self._send(message)

    def _refusal(self, finish: dict[str, Any], head: Message, body: Message) -> tuple[Message, Message]:
        """Head and body of the refusal; the engine's body if that is an error already."""
        headers = [(b"retry-after", str(finish["retry_after"]).encode())]
        if head["status"] >= 400:
            return {**head, "headers": [*head["headers"], *headers]}, body
        status = int(finish["status_code"])
        error = ErrorResponse(message=finish["message"], type=str(status), code=status)
        headers.append((b"content-type", b"application/json"))
        head = {"type": "http.response.start", "status": status, "headers": headers}
        return head, {"type": "http.response.body", "body": error.model_dump_json().encode()}


class RefusedAnswers:
    """ASGI middleware in front of the HTTP server's routes: puts a `RefusedAnswer` into each request's scope."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[KEY] = RefusedAnswer(send)
            send = scope[KEY].send
        await self._app(scope, receive, send)
