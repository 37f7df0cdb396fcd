"""Serves requests: each sample of a prompt has a room of its own.

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

# Endpoints whose streams have status 200 before anything is known, and tell of no error but ValueError.
OWN_STREAMS = ("generate_request", "vertex_generate")


def endpoint_of(request: Any) -> str:
    """What the engine calls the endpoint that an HTTP request came to; empty of any other request."""
    scope = getattr(request, "scope", None) or {}
    return getattr(scope.get("endpoint"), "__name__", "")


class TokenizerManager(engine.TokenizerManager):
    """Gives the samples of a prompt rooms of their own, where both workers of a pair can."""

    # Of requests with samples, by what the client calls them: what their samples are called.
    rids_of_samples: dict[str, list[str]] = {}

    def init_disaggregation(self) -> None:
        """Notifies a prefill of samples that have rooms."""
        super().init_disaggregation()
        self.samples = samples.SampleRooms()
        # The prompt that was tokenized last, and its tokens.
        self.last_text: tuple[str, list[int]] = "", []
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(samples.SAMPLE_ROUTE, self.samples.announced)

    async def generate_request(self, obj, request=None):
        """With PD each sample of a prompt has a room of its own."""
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

    def _is_refusal(self, error) -> bool:
        """A prefill that does not answer may have heard all the same. A request that begins anew has not failed."""
        if isinstance(error, samples.SamplesHaveRooms):
            return False
        return isinstance(error, samples.PrefillUnreachable) or super()._is_refusal(error)

    def _ends_others(self, obj) -> bool:
        """The failure of one sample is the answer to all."""
        return bool(getattr(obj, "samples", 0)) or super()._ends_others(obj)

    def _rooms_of(self, obj):
        """Adds the rooms of the prompts, before those of their samples: prefill may know of either."""
        each = getattr(obj, "samples", 0)
        return chain(refusal.rooms_of(obj, obj.request_rooms, each) if each else (), super()._rooms_of(obj))

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
