"""Serves requests: each sample of a prompt has a room of its own.

Upstream: none is known.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from sglang.srt.disaggregation.decode_prefix import compares_prompts, prompt_digest
from sglang.srt.disaggregation.peer_calls import SAMPLE_ROUTE, listen
from sglang.srt.disaggregation.refusal import blames_request
from sglang.srt.disaggregation.room_notes import ComputedReq
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import samples
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.refused_requests import RefusedRequests, endpoint_of, reason_of
from sglang.srt.managers.worker_rest import wait_sent
from sglang.srt.observability import req_time_stats, request_life

__all__ = ["ReqState", "TokenizerManager"]

# Endpoints whose streams have status 200 before anything is known, and tell of no error but ValueError.
OWN_STREAMS = ("generate_request", "vertex_generate")


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False
    # Of what was sent.
    prompt_tokens: int = 0


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Gives the samples of a prompt rooms of their own, where both workers of a pair can."""

    # Where ended requests are remembered, if they are.
    ended: request_life.EndedRequests | None = None

    def init_disaggregation(self) -> None:
        """Notifies a prefill of samples that have rooms."""
        super().init_disaggregation()
        if request_life.remembered():
            self.ended = request_life.EndedRequests(request_life.remembered(), self.server_args.disaggregation_mode)
        self.samples = samples.SampleRooms()
        # The prompt that was tokenized last, and its tokens.
        self.last_text: tuple[str, list[int]] = "", []
        # Of requests with samples, by what the client calls them: what their samples are called.
        self.rids_of_samples: dict[str, list[str]] = {}
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(SAMPLE_ROUTE, self.samples.announced)

    def _create_tokenized_object(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, *args, **kwargs):
        """With PD, makes the digest by which the workers compare a prompt, if they do; see `prompt_digests`."""
        message = super()._create_tokenized_object(obj, input_text, input_ids, input_embeds, mm_inputs, *args, **kwargs)
        in_pair = self.disaggregation_mode != DisaggregationMode.NULL
        if input_ids and in_pair and mm_inputs is None and compares_prompts():
            message.sampling_params.prompt_digest = len(input_ids), prompt_digest(input_ids, len(input_ids))
        return message

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

    async def generate_request(self, obj, request=None):
        """With PD each sample of a prompt has a room of its own; the rest is in `refused_requests.py`."""
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        if (
            not isinstance(obj, GenerateReqInput)
            or not samples.samples_asked(obj)
            or not (prefill or self.server_args.disaggregation_decode_enable_radix_cache)
        ):
            async for out in super().generate_request(obj, request):
                yield out
            return

        as_sent = copy.copy(obj)
        try:
            obj.normalize_batch_and_arguments()
            samples.give_rooms(obj, as_sent.rid)
        except Exception as e:
            self._tell_peer(as_sent, reason_of(e), at_fault=blames_request(e))
            raise
        own = samples.names_of(as_sent.rid, obj.rid, self.rids_of_samples)
        self.rids_of_samples |= own
        try:
            served = False
            if prefill:
                rooms = [room for room in obj.request_rooms if room]
                async for out in self._until_told(as_sent, obj, rooms, request):
                    served = True
                    yield out
            if not served:
                async for out in super().generate_request(obj, request):
                    yield out
        finally:
            for rid in own:
                del self.rids_of_samples[rid]

    async def _until_told(self, obj, sampled, rooms: list[int], request):
        """On prefill: serve a request with samples as the engine does, until decode has announced these.

        sampled: the same request with a room for each sample.
        Yields nothing if it has: then it is to be served with a room for each sample. Decode says so before it asks for
        anything, and one that does not asks for the room with which the engine begins.
        """
        announcement = obj.announcement = self.samples.expect(rooms)
        try:
            if not announcement.told:
                async for out in super().generate_request(obj, request):
                    yield out
        except samples.SamplesHaveRooms:
            # What was sent is its warm-up, which releases nothing.
            await self._release_adapters(obj.lora_id)
        except Exception as e:
            self.samples.refuse(rooms, reason_of(e), blames_request(e))
            if announcement.told and not announcement.too_late:
                # What was served has the engine's rooms, and decode asks for those of the samples.
                self._tell_peer(sampled, reason_of(e), at_fault=blames_request(e))
            raise
        finally:
            self.samples.done(rooms, announcement)

    def _send_one_request(self, tokenized_obj) -> None:
        """Adds a last look at whether the samples of the prompt have rooms: from here on the scheduler is told."""
        state = self.rid_to_state.get(tokenized_obj.rid)
        announcement = getattr(state.obj, "announcement", None) if state is not None else None
        if announcement is not None and announcement.told and not announcement.too_late:
            del self.rid_to_state[tokenized_obj.rid]
            raise samples.SamplesHaveRooms
        super()._send_one_request(tokenized_obj)

    async def _wait_one_response(self, obj, state, request=None):
        """The engine's warm-up for samples gives way when decode announces that they have rooms."""
        answers = super()._wait_one_response(obj, state, request)
        announcement = getattr(obj, "announcement", None)
        if announcement is not None and not announcement.too_late:
            yield await self._answer_to_warmup(answers, obj, announcement)
        async for out in answers:
            yield out

    async def _answer_to_warmup(self, answers, obj, announcement: samples.Announcement):
        answer = await samples.first_answer(answers, announcement)
        if not answer.done():
            # Nobody has asked for this room, or will: dropped, it has not failed, and nothing is answered.
            answer.cancel()
            self.rid_to_state.pop(obj.rid, None)
            self.send_to_scheduler.send_pyobj(ComputedReq(obj.bootstrap_room, obj.rid))
            raise samples.SamplesHaveRooms
        # If it has failed, this raises.
        out = answer.result()
        if not self.samples.close(announcement):
            raise samples.SamplesHaveRooms
        return out

    async def _handle_batch_request(self, obj, request=None):
        """Prefill is told of samples with rooms of their own before anything is sent for them."""
        if getattr(obj, "samples", 0) and self.disaggregation_mode == DisaggregationMode.DECODE:
            try:
                await samples.announce(obj, self.server_args.disaggregation_bootstrap_port)
            except samples.PrefillUnreachable as e:
                if obj.stream and endpoint_of(request) in OWN_STREAMS:
                    raise ValueError(e.detail) from e
                raise
        async for out in super()._handle_batch_request(obj, request):
            yield out

    def _validate_rid_not_in_flight(self, obj) -> None:
        """Adds the check of ``n``: where samples have rooms, they have become prompts."""
        super()._validate_rid_not_in_flight(obj)
        if isinstance(obj, GenerateReqInput) and self.server_args.disaggregation_decode_enable_radix_cache:
            if (n := obj.parallel_sample_num) != 1:
                raise ValueError(f"n must be a whole number from 1 to {samples.MAX_SAMPLES}, got {n!r:.80}.")

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """A request with samples is aborted by what its client calls it."""
        for one in () if abort_all or rid in self.rid_to_state else self.rids_of_samples.get(rid, ()):
            super().abort_request(one)
        super().abort_request(rid, abort_all)

    async def _tokenize_texts(self, texts, is_cross_encoder: bool = False):
        """The samples of a prompt, which follow each other, are tokenized once, as they are by the engine."""
        if not isinstance(texts, str) or is_cross_encoder:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        text, tokens = self.last_text
        if not texts or text is not texts:
            tokens, _ = await super()._tokenize_texts(texts)
            self.last_text = texts, tokens
        return list(tokens), None
