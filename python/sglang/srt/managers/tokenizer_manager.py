"""Serves requests: the other worker hears of what is refused, and what has ended is remembered.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.worker_rest import wait_sent
from sglang.srt.observability import req_time_stats, request_life

__all__ = ["ReqState", "TokenizerManager"]


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Remembers requests that have ended."""

    # Where ended requests are remembered, if they are.
    ended: request_life.EndedRequests | None = None

    def init_disaggregation(self) -> None:
        """Remembers ended requests, if it is to."""
        super().init_disaggregation()
        if request_life.remembered():
            self.ended = request_life.EndedRequests(request_life.remembered(), self.server_args.disaggregation_mode)

    def auto_create_handle_loop(self) -> None:
        """The HTTP server is told of ended requests."""
        if self.event_loop is None and self.ended is not None:
            from sglang.srt.entrypoints.http_server import app

            app.add_api_route("/ended_requests", self.tell_ended, methods=["GET"])
        super().auto_create_handle_loop()

    async def tell_ended(self, rid: str | None = None, room: int | None = None, last: int = 0) -> dict:
        """What is remembered of a request by its rid, or its room, or of the last requests that have ended."""
        if self.ended is None:
            return {"requests": []}
        return {"requests": self.ended.last(last) if last else self.ended.find(rid, room)}

    def _handle_batch_output(self, recv_obj) -> None:
        """Remembers those that have ended with this output."""
        states = [self.rid_to_state.get(rid) for rid in recv_obj.rids] if self.ended is not None else []
        super()._handle_batch_output(recv_obj)
        for i, state in enumerate(states):
            if state is not None and state.finished:
                times = getattr(recv_obj, "time_stats", None)
                self._remember(recv_obj.rids[i], state, getattr(times[i], "life", None) if times else None)

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Remembers one that has ended in a queue."""
        state = self.rid_to_state.get(recv_obj.rid) if self.ended is not None else None
        super()._handle_abort_req(recv_obj)
        if state is not None and state.finished:
            self._remember(recv_obj.rid, state, None)

    def collect_metrics(self, state: ReqState, recv_obj, i: int) -> None:
        """Counts what decode held among the cached tokens of a request that has ended, as `device`.

        The engine counts the parts that it knows, and not what their sum lacks. A client is told them as they were.
        """
        parts = getattr(recv_obj, "cached_tokens_details", None) if state.finished else None
        if parts and parts[i] and "decode_prefix" in parts[i]:
            more = recv_obj.cached_tokens[i] - sum(parts[i].get(source, 0) for source in ("device", "host", "storage"))
            parts[i] = parts[i] | {"device": parts[i].get("device", 0) + max(more, 0)}
        super().collect_metrics(state, recv_obj, i)

    def _remember(self, rid: str, state: ReqState, life: dict[str, float] | None) -> None:
        if self.ended is not None and state.out_list:
            meta = state.out_list[-1]["meta_info"]
            self.ended.note(rid, state, meta, life or {}, req_time_stats.global_diff_realtime_monotonic)

    async def sigterm_watchdog(self) -> None:
        """As in the engine, but that a prefill sends first what its clients have been answered for."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
