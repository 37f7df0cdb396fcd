"""Records ended requests, and serves the records over HTTP.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.observability import req_time_stats, request_life

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Tokenizer manager that records ended requests."""

    # None if no requests are recorded.
    ended: request_life.EndedRequests | None = None

    def init_disaggregation(self) -> None:
        """Creates the records, if enabled."""
        super().init_disaggregation()
        if request_life.remembered():
            self.ended = request_life.EndedRequests(request_life.remembered(), self.server_args.disaggregation_mode)

    def auto_create_handle_loop(self) -> None:
        """Adds the route of the records to the HTTP server."""
        if self.event_loop is None and self.ended is not None:
            from sglang.srt.entrypoints.http_server import app

            app.add_api_route("/ended_requests", self.tell_ended, methods=["GET"])
        super().auto_create_handle_loop()

    async def tell_ended(self, rid: str | None = None, room: int | None = None, last: int = 0) -> dict:
        """The records of a request by rid or room, or of the last ended requests."""
        if self.ended is None:
            return {"requests": []}
        return {"requests": self.ended.last(last) if last else self.ended.find(rid, room)}

    def _handle_batch_output(self, recv_obj) -> None:
        """Records requests that end with this output."""
        states = [self.rid_to_state.get(rid) for rid in recv_obj.rids] if self.ended is not None else []
        super()._handle_batch_output(recv_obj)
        for i, state in enumerate(states):
            if state is not None and state.finished:
                times = getattr(recv_obj, "time_stats", None)
                self._remember(recv_obj.rids[i], state, getattr(times[i], "life", None) if times else None)

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Records a request that was aborted in a queue."""
        state = self.rid_to_state.get(recv_obj.rid) if self.ended is not None else None
        super()._handle_abort_req(recv_obj)
        if state is not None and state.finished:
            self._remember(recv_obj.rid, state, None)

    def _remember(self, rid: str, state: engine.ReqState, life: dict[str, float] | None) -> None:
        if self.ended is not None and state.out_list:
            meta = state.out_list[-1]["meta_info"]
            self.ended.note(rid, state, meta, life or {}, req_time_stats.global_diff_realtime_monotonic)
