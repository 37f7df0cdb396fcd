"""Serves n > 1: each sample of a prompt has a room of its own.

Upstream: none is known: sgl-project/sglang#9224, #24223, #26486, #30723 and #40297 are all closed.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.peer_calls import listen
from sglang.srt.disaggregation.refusal import blames_request
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import samples
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.refused_requests import reason_of

__all__ = ["TokenizerManager"]

# Endpoints that send status 200 before the first output, and then report no error but ValueError.
OWN_STREAMS = ("generate_request", "vertex_generate")


def endpoint_of(request: Any) -> str:
    """The engine's name for the endpoint of an HTTP request; empty for others."""
    scope = getattr(request, "scope", None) or {}
    return getattr(scope.get("endpoint"), "__name__", "")


class TokenizerManager(engine.TokenizerManager):
    """Gives samples rooms of their own if both workers of a pair support it."""

    # Rids of the samples, by the client's rid.
    rids_of_samples: dict[str, list[str]] = {}

    def init_disaggregation(self) -> None:
        """Takes announcements of samples on prefill."""
        super().init_disaggregation()
        self.samples = samples.SampleRooms()
        # The last prompt tokenized, and its tokens.
        self.last_text: tuple[str, list[int]] = "", []
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(samples.SAMPLE_ROUTE, self.samples.announced)

    async def generate_request(self, obj, request=None):
        """Gives each sample a room of its own with PD."""
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
        self.rids_of_samples = self.rids_of_samples | own
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
        """On prefill: serve a request with samples the engine's way, unless decode announces them.

        sampled: the same request with a room per sample. Yields nothing once they are announced: then ``sampled`` is to
        be served. Decode announces before it asks for KV; one that does not uses the request's own room.
        """
        announcement = obj.announcement = self.samples.expect(rooms)
        try:
            if not announcement.told:
                async for out in super().generate_request(obj, request):
                    yield out
        except samples.SamplesHaveRooms:
            # The warm-up has been sent, which releases no adapter.
            await self._release_adapters(obj.lora_id)
        except Exception as e:
            self.samples.refuse(rooms, reason_of(e), blames_request(e))
            if announcement.told and not announcement.too_late:
                # Prefill used the request's own room; decode asks for those of the samples.
                self._tell_peer(sampled, reason_of(e), at_fault=blames_request(e))
            raise
        finally:
            self.samples.done(rooms, announcement)

    def _send_one_request(self, tokenized_obj) -> None:
        """Adds a last check for an announcement before the scheduler gets the request."""
        state = self.rid_to_state.get(tokenized_obj.rid)
        announcement = getattr(state.obj, "announcement", None) if state is not None else None
        if announcement is not None and announcement.told and not announcement.too_late:
            del self.rid_to_state[tokenized_obj.rid]
            raise samples.SamplesHaveRooms
        super()._send_one_request(tokenized_obj)

    async def _wait_one_response(self, obj, state, request=None):
        """Ends the engine's warm-up for samples when decode announces them."""
        answers = super()._wait_one_response(obj, state, request)
        announcement = getattr(obj, "announcement", None)
        if announcement is not None and not announcement.too_late:
            yield await self._answer_to_warmup(answers, obj, announcement)
        async for out in answers:
            yield out

    async def _answer_to_warmup(self, answers, obj, announcement: samples.Announcement):
        answer = await samples.first_answer(answers, announcement)
        if not answer.done():
            # This room will not be used: remove the warm-up without a failure or an answer.
            answer.cancel()
            self.rid_to_state.pop(obj.rid, None)
            self.send_to_scheduler.send_pyobj(ComputedReq(obj.bootstrap_room, obj.rid))
            raise samples.SamplesHaveRooms
        # Raises if it has failed.
        out = answer.result()
        if not self.samples.close(announcement):
            raise samples.SamplesHaveRooms
        return out

    async def _handle_batch_request(self, obj, request=None):
        """Announces samples to prefill before anything is sent for them."""
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
        """Adds the check of ``n``; samples with rooms have become prompts before."""
        super()._validate_rid_not_in_flight(obj)
        if isinstance(obj, GenerateReqInput) and self.server_args.disaggregation_decode_enable_radix_cache:
            if (n := obj.parallel_sample_num) != 1:
                raise ValueError(f"n must be a whole number from 1 to {samples.MAX_SAMPLES}, got {n!r:.80}.")

    def _is_refusal(self, error) -> bool:
        """A prefill that does not answer may have the announcement all the same. A restarted request has not failed."""
        if isinstance(error, samples.SamplesHaveRooms):
            return False
        return isinstance(error, samples.PrefillUnreachable) or super()._is_refusal(error)

    def _ends_others(self, obj) -> bool:
        """One failed sample fails all."""
        return bool(getattr(obj, "samples", 0)) or super()._ends_others(obj)

    def _rooms_of(self, obj):
        """Adds the prompts' rooms before those of their samples: prefill may know either."""
        each = getattr(obj, "samples", 0)
        return chain(refusal.rooms_of(obj, obj.request_rooms, each) if each else (), super()._rooms_of(obj))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Aborts samples by the client's rid."""
        for one in () if abort_all or rid in self.rid_to_state else self.rids_of_samples.get(rid, ()):
            super().abort_request(one)
        super().abort_request(rid, abort_all)

    async def _tokenize_texts(self, texts, is_cross_encoder: bool = False):
        """Tokenizes the samples of a prompt once, as the engine does."""
        if not isinstance(texts, str) or is_cross_encoder:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        text, tokens = self.last_text
        if not texts or text is not texts:
            tokens, _ = await super()._tokenize_texts(texts)
            self.last_text = texts, tokens
        return list(tokens), None
