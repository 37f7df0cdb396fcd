"""An OpenTelemetry collector for the tests, on a free port: what workers and gateway export over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Event:
    """What happened within a span, when (Unix time, ns), and what was told of it."""

    name: str
    at: int
    attributes: dict[str, Any]


@dataclass
class Span:
    """One span. start, end: Unix time, ns."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[Event] = field(default_factory=list)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans that have come, in the order in which they ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes).get("service.name", "?")
                for scope in resource.scope_spans:
                    self._spans += [self._read(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @staticmethod
    def _read(service: str, span: Any) -> Span:
        return Span(
            service,
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            [Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        )

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def wait(self, enough: Callable[[list[Span]], bool], timeout: float = 20) -> list[Span]:
        """All spans, once they are ``enough``. Fails after ``timeout`` seconds with what has come."""
        end = time.monotonic() + timeout
        while not enough(self.spans()):
            told = [(span.service, span.name, span.trace[:6]) for span in self.spans()]
            assert time.monotonic() < end, told
            time.sleep(0.1)
        return self.spans()


@contextmanager
def collector() -> Iterator[Collector]:
    """A running collector."""
    server, found = grpc.server(ThreadPoolExecutor(4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(1).wait()
