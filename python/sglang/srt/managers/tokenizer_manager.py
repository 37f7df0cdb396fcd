"""Requests that no worker can serve are refused here, with status 400, before anything is sent.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import HTTPException
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import samples
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.request_checks import (
    MAX_SAMPLES,
    check_embeds,
    check_names,
    check_prompt,
    check_request,
    check_without_tokenizer,
    stop_tokens,
)

logger = logging.getLogger(__name__)

__all__ = ["ReqState", "TokenizerManager"]


# Of a request that is refused, prompts whose rooms the peer is told of.
MOST_PROMPTS = 256


def _of_prompt(values, i: int):
    """The value of one prompt, where each may have its own; None where a list is too short."""
    return values if not isinstance(values, list) else values[i] if i < len(values) else None


def _reason(error: Exception) -> str:
    """What an error says, for another worker; an image that could not be read may be all of the message."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    return str(said or repr(error))[: refusal.MOST_CHARACTERS]


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False


class TokenizerManager(engine.TokenizerManager):
    """Looks at each option of a request, and tells its peer of a request that only this worker refuses."""

    def init_disaggregation(self) -> None:
        """Adds that a prefill hears of requests that decode refuses."""
        super().init_disaggregation()
        self.refused_rooms = refusal.RefusedRooms()
        # The states of each request that is being served, by its identity.
        self.own_states: dict[int, dict[str, ReqState]] = {}
        self.samples = samples.SampleRooms()
        # The prompt that was tokenized last, and its tokens.
        self.last_text: tuple[str, list[int]] = "", []
        # Of requests with samples, by what the client calls them: what their samples are called.
        self.rids_of_samples: dict[str, list[str]] = {}
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            refusal.listen(self._on_refused_by_decode)
            samples.listen(self.samples)

    async def generate_request(self, obj, request=None):
        """Adds that with PD each sample of a prompt has a room of its own; what else is added, `_serve` says."""
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        if (
            not isinstance(obj, GenerateReqInput)
            or not samples.samples_asked(obj)
            or not (prefill or self.server_args.disaggregation_decode_enable_radix_cache)
        ):
            async for out in self._serve(obj, request):
                yield out
            return

        as_sent = copy.copy(obj)
        try:
            obj.normalize_batch_and_arguments()
            samples.give_rooms(obj, as_sent.rid)
        except ValueError as e:
            self._tell_peer(as_sent, str(e))
            raise
        called = [] if as_sent.rid is None else as_sent.rid if isinstance(as_sent.rid, list) else [as_sent.rid]
        count = len(obj.rid) // (len(called) or 1)
        # A rid in use is the other request's; this one is refused.
        own = {rid: obj.rid[i * count : (i + 1) * count] for i, rid in enumerate(called)}
        own = {rid: rids for rid, rids in own.items() if rid not in self.rids_of_samples}
        self.rids_of_samples |= own
        try:
            served = False
            if prefill:
                rooms = [room for room in obj.request_rooms if room]
                async for out in self._until_told(as_sent, obj, rooms, request):
                    served = True
                    yield out
            if not served:
                async for out in self._serve(obj, request):
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
        word = obj.word = self.samples.expect(rooms)
        try:
            if not word.told:
                async for out in self._serve(obj, request):
                    yield out
        except samples.SamplesHaveRooms:
            # What was sent is its warm-up, which releases nothing.
            await self._release_adapters(obj.lora_id)
        except Exception as e:
            self.samples.refuse(rooms, _reason(e))
            if word.told and not word.too_late and not isinstance(e, HTTPException):
                # What was served has the engine's rooms, and decode asks for those of the samples.
                self._tell_peer(sampled, _reason(e))
            raise
        finally:
            self.samples.done(rooms, word)

    async def _serve(self, obj, request=None):
        """The engine's, and what follows a refusal: the peer is told, other prompts of the batch end, and nothing is
        left behind."""
        states: dict[str, ReqState] = {}
        self.own_states[id(obj)] = states
        try:
            async for out in super().generate_request(obj, request):
                for item in out if isinstance(out, list) else [out]:
                    if getattr(obj, "needs_top_logprobs", False):
                        item["meta_info"].setdefault("input_top_logprobs", [])
                yield out
        except samples.SamplesHaveRooms:
            raise
        except Exception as e:
            # Not only the client's errors: an image that cannot be fetched here may be known to the peer.
            known = states and all(state.sent for state in states.values())
            refused = not known and not isinstance(e, HTTPException)
            # The failure of one sample is the answer to all.
            end_others = refused or bool(getattr(obj, "samples", 0))
            if refused:
                # First, or the peer would hear only of the others' end.
                self._tell_peer(obj, _reason(e), states)
            for rid, state in states.items() if end_others else ():
                if state.sent and self.rid_to_state.get(rid) is state:
                    self.abort_request(rid)
            raise
        finally:
            if self.own_states.get(id(obj)) is states:
                del self.own_states[id(obj)]
            if states and self.server_args.enable_lora and obj.lora_id and getattr(obj, "parallel_sample_num", 1) == 1:
                ids = obj.lora_id if isinstance(obj.lora_id, list) else [obj.lora_id]
                unsent = [uid for uid, state in zip(ids, states.values(), strict=True) if not state.sent]
                await self._release_adapters(unsent)
            for rid, state in states.items():
                if self.rid_to_state.get(rid) is state and (state.finished or not state.sent):
                    del self.rid_to_state[rid]

    async def _release_adapters(self, lora_ids: list[str | None] | None) -> None:
        """Of requests that were not sent. The engine forgets them, and the adapter can never be unloaded."""
        if lora_ids:
            await self.lora_registry.release(lora_ids)

    def _handle_batch_output(self, recv_obj) -> None:
        """Adds that the end of a request releases its adapter once.

        The engine releases it here and, where a request has failed, again when that is answered: the count of users
        is negative then, and an unload waits for 0 for ever.
        """
        adapters = self.server_args.enable_lora
        states = [self.rid_to_state.get(rid) for rid in recv_obj.rids] if adapters else []
        super()._handle_batch_output(recv_obj)
        for state in states:
            if state is not None and state.finished:
                state.obj.lora_path = None

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Adds that a request which was aborted in a queue releases its adapter, which the engine forgets."""
        state = self.rid_to_state.get(recv_obj.rid) if self.server_args.enable_lora else None
        super()._handle_abort_req(recv_obj)
        if state is not None and state.finished and state.obj.lora_path:
            asyncio.create_task(self._release_adapters([state.obj.lora_id]))
            state.obj.lora_path = None

    def _validate_rid_not_in_flight(self, obj) -> None:
        """Adds the checks of all options: here each prompt has its own, and nothing is kept of them yet."""
        super()._validate_rid_not_in_flight(obj)
        if not isinstance(obj, GenerateReqInput):
            return
        args = self.server_args
        if args.enable_lora and obj.lora_id is not None:
            if not obj.lora_path:
                # The scheduler has no such adapter.
                raise ValueError("lora_id is not the client's to choose: name the adapter in lora_path.")
            obj.lora_id = None
        if obj.parallel_sample_num != 1 and args.disaggregation_decode_enable_radix_cache:
            # Else its samples have become prompts.
            raise ValueError(f"n must be a whole number from 1 to {MAX_SAMPLES}, got {obj.parallel_sample_num!r:.80}.")
        disaggregated = self.disaggregation_mode != DisaggregationMode.NULL
        # The engine's samples are copies of these.
        for item in [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]:
            check_request(
                item,
                self.model_config.vocab_size,
                disaggregated,
                keyed=disaggregated or args.enable_pegaflow,
                deterministic=args.enable_deterministic_inference,
            )
            if not self._is_processed(item):
                check_names(item.sampling_params)
            if self.tokenizer is None:
                check_without_tokenizer(item.sampling_params, self.disaggregation_mode != DisaggregationMode.PREFILL)
            if item.input_ids is not None:
                self._check_prompt(item, item.input_ids)
            elif item.text is None and args.disable_radix_cache:
                check_embeds(item.input_embeds, self.model_config.hidden_size)
            if disaggregated and args.disaggregation_transfer_backend != "fake":
                self._check_pair(item)

    def _check_pair(self, obj) -> None:
        """Raise ValueError for a request that no router has sent, or that decode has refused.

        One without a room ends the DP controller of a worker that gives each room its rank.
        """
        asks = self.disaggregation_mode == DisaggregationMode.DECODE
        for name in ("bootstrap_room", "bootstrap_host") if asks else ("bootstrap_room",):
            if getattr(obj, name) is None:
                raise ValueError(f"{name} is missing: send the request to the router, which names a prefill.")
        self._check_room(obj.bootstrap_room)

    async def _tokenize_texts(self, texts, is_cross_encoder: bool = False):
        """Adds that the samples of a prompt, which follow each other, are tokenized once, as they are by the engine."""
        if not isinstance(texts, str) or is_cross_encoder:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        text, tokens = self.last_text
        if not texts or text is not texts:
            tokens, _ = await super()._tokenize_texts(texts)
            self.last_text = texts, tokens
        return list(tokens), None

    def _validate_one_request(self, obj, input_ids) -> None:
        """Adds the scheduler's limit, which it would find only after the handshake, and options that nobody knows.

        A processor of images or sound has taken out by now what is for it alone.
        """
        super()._validate_one_request(obj, input_ids)
        if not isinstance(obj, GenerateReqInput):
            return
        check_names(obj.sampling_params)
        if input_ids is not None:
            self._check_prompt(obj, input_ids)

    def _create_tokenized_object(self, obj, *args, **kwargs):
        """Adds that a stop token is a token: of others, the engine makes places among the logits that there are not."""
        tokenized_obj = super()._create_tokenized_object(obj, *args, **kwargs)
        params = tokenized_obj.sampling_params
        params.stop_token_ids = stop_tokens(params.stop_token_ids, self.model_config.vocab_size)
        return tokenized_obj

    def _is_processed(self, obj) -> bool:
        """Whether a processor of images or sound makes another prompt of this one, and other options."""
        return bool(self.mm_processor and obj.contains_mm_input())

    def _check_prompt(self, obj, input_ids) -> None:
        if self._is_processed(obj):
            # Places of images are no tokens, and their number is known later.
            return
        if obj.session_params and not input_ids:
            # The session has the prompt.
            return
        # Without a peer, the scheduler may as well find it out: other prompts of a batch are served.
        alone = self.disaggregation_mode == DisaggregationMode.NULL
        limit = None if alone or self.server_args.allow_auto_truncate else self.max_req_input_len
        check_prompt(input_ids, self.model_config.vocab_size, limit)

    def _check_room(self, room: int | None) -> None:
        """Raise ValueError if decode has refused the request of this room."""
        reason = self.refused_rooms.reason(room)
        if reason is not None:
            raise ValueError(reason)

    def _req_stats_init(self, obj, request=None) -> None:
        """Adds a note of the states that are this request's own, and that none has been sent."""
        super()._req_stats_init(obj, request)
        rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        # The engine makes states for samples too, whose objects are its own.
        self.own_states.get(id(obj), {}).update({rid: self.rid_to_state[rid] for rid in rids})

    def _send_one_request(self, tokenized_obj) -> None:
        """Adds a last look at what decode says of it: from here on the scheduler is told."""
        state = self.rid_to_state.get(tokenized_obj.rid)
        word = getattr(state.obj, "word", None) if state is not None else None
        if word is not None and word.told and not word.too_late:
            del self.rid_to_state[tokenized_obj.rid]
            raise samples.SamplesHaveRooms
        self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
        super()._send_one_request(tokenized_obj)
        self._note_sent(tokenized_obj.rid)

    def _send_batch_request(self, tokenized_objs) -> None:
        """Adds the same for a batch."""
        for tokenized_obj in tokenized_objs:
            self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
        super()._send_batch_request(tokenized_objs)
        for tokenized_obj in tokenized_objs:
            self._note_sent(tokenized_obj.rid)

    def _note_sent(self, rid: str) -> None:
        if rid in self.rid_to_state:
            self.rid_to_state[rid].sent = True

    async def _wait_one_response(self, obj, state, request=None):
        """Adds that the engine's warm-up for samples gives way when decode announces that they have rooms.

        And that what decode has refused is the client's error, also where the scheduler had not heard of it in time.
        """
        answers = super()._wait_one_response(obj, state, request)
        word = getattr(obj, "word", None)
        try:
            if word is not None and not word.too_late:
                yield await self._answer_to_warmup(answers, obj, word)
            async for out in answers:
                yield out
        except HTTPException:
            self._check_room(getattr(obj, "bootstrap_room", None))
            raise

    async def _answer_to_warmup(self, answers, obj, word: samples.Word):
        answer = asyncio.ensure_future(answers.__anext__())
        told = asyncio.ensure_future(word.wait())
        try:
            await asyncio.wait({answer, told}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        finally:
            told.cancel()
        if answer.done():
            # If it has failed, this raises.
            out = answer.result()
            if self.samples.close(word):
                return out
        else:
            # Nobody has asked for this room, or will. What it is answered is of no interest.
            answer.add_done_callback(lambda task: task.cancelled() or task.exception())
            obj.lora_path = None
            self.send_to_scheduler.send_pyobj(AbortReq(rid=obj.rid))
        raise samples.SamplesHaveRooms

    async def _handle_batch_request(self, obj, request=None):
        """Adds that prefill is told of samples with rooms of their own before anything is sent for them."""
        if getattr(obj, "samples", 0) and self.disaggregation_mode == DisaggregationMode.DECODE:
            try:
                await samples.announce(obj, self.server_args.disaggregation_bootstrap_port)
            except samples.PrefillUnreachable as e:
                raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, str(e)) from e
            obj.announced = True
        async for out in super()._handle_batch_request(obj, request):
            yield out

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Adds that a request with samples is aborted by what its client calls it."""
        for one in () if abort_all or rid in self.rid_to_state else self.rids_of_samples.get(rid, ()):
            super().abort_request(one)
        super().abort_request(rid, abort_all)

    # ---- the two workers of a pair ----

    def _tell_peer(self, obj, reason: str, own: Mapping[str, ReqState] | None = None) -> None:
        """Tell the other worker that the rooms of this request are refused here.

        own: the request's states. A room of a request that is being served is that one's: this was a copy of it.
        """
        rooms = getattr(obj, "bootstrap_room", None)
        if self.disaggregation_mode == DisaggregationMode.NULL or rooms is None:
            return
        served = [state for rid, state in self.rid_to_state.items() if rid not in (own or {})]
        live = {getattr(state.obj, "bootstrap_room", None) for state in served}
        hosts, ports = obj.bootstrap_host, obj.bootstrap_port
        if getattr(obj, "samples", 0) and self.disaggregation_mode == DisaggregationMode.DECODE and not obj.announced:
            # Prefill knows only of the rooms of prompts.
            rooms, hosts, ports = obj.request_rooms, hosts[:: obj.samples], ports[:: obj.samples]
        for i, room in enumerate(rooms[:MOST_PROMPTS] if isinstance(rooms, list) else [rooms]):
            if not isinstance(room, int) or not 0 < room < 2**63 or room in live:
                continue
            if self.disaggregation_mode == DisaggregationMode.PREFILL:
                self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=False))
                continue
            host, port = _of_prompt(hosts, i), _of_prompt(ports, i)
            if host and (port or self.server_args.disaggregation_bootstrap_port):
                refusal.tell_prefill(host, port or self.server_args.disaggregation_bootstrap_port, room, reason)

    def _on_refused_by_decode(self, room: int, reason: str) -> None:
        """Called on the bootstrap server's thread."""
        if self.event_loop is None:
            self.refused_rooms.note(room, reason)
        else:
            self.event_loop.call_soon_threadsafe(self._refuse_room, room, reason)

    def _refuse_room(self, room: int, reason: str) -> None:
        logger.info("Decode has refused room %s: %s", room, reason)
        self.refused_rooms.note(room, reason)
        self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=True))
