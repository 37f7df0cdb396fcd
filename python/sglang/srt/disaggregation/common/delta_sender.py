"""A request on a prefill rank, from when it waits for decode's question to when its end has been told.

`DeltaSender` is what the backends' senders have in common. `conn.py` puts it before the engine's.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with failures that both backends tell
decode (#36612, merged).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.rooms import OWN_ROOM
from sglang.srt.disaggregation.common.wire import asks_for_nothing
from sglang.srt.disaggregation.decode_radix.prefix import check_decode_prefix

# Of a failure of which nobody has said why.
NO_REASON = "no reason was recorded"
# How the reason begins that decode is told where the request itself is at fault.
AT_FAULT = "the request is refused: "
# Each worker makes the tokens of a prompt itself.
OTHER_PROMPT = (
    "the prompts of prefill and decode differ. Likely causes: a chat template with the time in it, clocks or time "
    "zones (TZ) that differ, --chat-template or --reasoning-parser on one of them only, tokenizers or templates of two "
    "versions, an image that has another size each time it is fetched"
)


class Phase(enum.IntEnum):
    """Where a request is. It goes through them in this order and leaves some out."""

    # Decode's request for its KV has not come, or not from all ranks.
    WAITING = 0
    # It has, and can be right: KV may be sent.
    ACCEPTED = 1
    # All has been written, as far as the engine's sender says.
    DONE = 2
    # It has failed for `reason`. Something may still be being written, and decode has not been told.
    FAILED = 3
    # Decode is told as soon as nothing is being written, or has been.
    TOLD = 4
    # No book mentions it.
    CLOSED = 5


@dataclasses.dataclass
class SenderState:
    """What a prefill rank knows of one request. Only commands of its sender change it.

    asked: what each decode rank asked for, by its name; kept here since the manager forgets it when all is sent.
    due_at: until when KV may be written, by the clock that began when its request was found here; decode's began a
    little earlier. reason: why it failed.
    """

    phase: Phase = Phase.WAITING
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)
    decode_prefix_len: int = 0
    due_at: float = math.inf
    reason: str | None = None

    @property
    def failed(self) -> bool:
        """Whether nothing more will be sent."""
        return self.phase >= Phase.FAILED

    @property
    def outcome(self) -> KVPoll | None:
        """How it ended, in the engine's words; None if it goes on."""
        if self.failed:
            return KVPoll.Failed
        return KVPoll.Success if self.phase == Phase.DONE else None

    def accept(self, decode_prefix_len: int, due_at: float) -> None:
        """Decode's request for KV can be right."""
        self.phase, self.decode_prefix_len, self.due_at = Phase.ACCEPTED, decode_prefix_len, due_at

    def succeed(self) -> None:
        """All has been written."""
        if not self.failed:
            self.phase = Phase.DONE

    def fail(self, reason: str) -> None:
        """It fails, if it has not; the first reason stays."""
        if not self.failed:
            self.phase, self.reason = Phase.FAILED, reason

    def reach(self, phase: Phase) -> bool:
        """Go on to a later phase; whether this was an earlier one."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    def overdue(self, timeout_s: float) -> str | None:
        """Why nothing more is written: its KV has had as long to come as this worker says that it may take.

        Decode keeps its pages for so long. No write over NIXL to a worker that stands still ends by itself. None for a
        decode worker without the flag, for which nothing changes.
        """
        if time.monotonic() < self.due_at:
            return None
        return (
            f"not all of its KV has been sent in the {timeout_s:g} s for which it waits, by "
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT on prefill"
        )


def names_prefix(asked: Iterable[Any]) -> bool:
    """Whether a decode worker with a radix cache has asked, which says what it holds."""
    return any(getattr(info, "names_prefix", False) for info in asked)


def read_decode_prefix(asked: Mapping[str, Any]) -> tuple[int, int | None]:
    """The prefix (tokens) and delta size (pages; None if this rank sends no KV) that decode asks for.

    Raises ValueError when decode's ranks contradict each other.
    """
    infos = asked.values()
    prefixes = {getattr(info, "decode_prefix_len", None) or 0 for info in infos}
    sizes = {len(info.dst_kv_indices) for info in infos if not asks_for_nothing(info)}
    if len(prefixes) > 1 or len(sizes) > 1:
        raise ValueError(f"decode ranks disagree: prefixes {sorted(prefixes)}, delta pages {sorted(sizes)}")
    return (prefixes.pop() if prefixes else 0), (sizes.pop() if sizes else None)


def check_asked(asked: Mapping[str, Any], prompt_len: int | None, page_size: int) -> int:
    """The prefix (tokens) that decode asks to be left out. Raises ValueError where that cannot be right.

    A decode worker without the flag names none, and its message is left to the engine.
    """
    prefix_len, num_pages = read_decode_prefix(asked)
    if prefix_len or names_prefix(asked.values()):
        if prompt_len is None:
            raise ValueError("this prefill does not know the length of the prompt")
        check_decode_prefix(prefix_len, num_pages, prompt_len, page_size)
    return prefix_len


def said_prompts(asked: Mapping[str, Any]) -> set[bytes]:
    """What decode's ranks have said of its prompt; empty where none has."""
    return {info.prompt for info in asked.values() if getattr(info, "prompt", None) is not None}


def check_prompt(sender: DeltaSender) -> None:
    """Raise ValueError where decode's prompt, as far as it has said which that is, is not this worker's."""
    if sender.is_cut:
        # The last page of decode's prompt would not be filled.
        raise ValueError("prefill has cut the prompt to the longest that it takes (--allow-auto-truncate)")
    sender.check_said(said_prompts(sender.state.asked))


# The engine's class comes behind.
Base: Any = object


class DeltaSender(Base):
    """Sender that knows the prefix decode asked to be left out, and has one state.

    `fail`, `fail_if_refused`, `fail_if_overdue` and `poll` act; `has_failed` and `failure_reason` only answer.
    """

    # When it was made: the engine's.
    init_time: float | None = None
    # Tokens of the prompt.
    prompt_len: int | None = None
    # Whether this worker may have cut it to its own limit: --allow-auto-truncate.
    is_cut: bool = False

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs):
        """Adds the request to the rooms that are alive here; one of its number that had ended has begun anew.

        If the room is another's, which is still here, this one has failed, and says nothing of the room to anybody.
        """
        # Where the request is, and why it failed.
        self.state = SenderState()
        self.made_at = time.monotonic()
        if mgr.ends_rooms and not mgr.rooms.begin(bootstrap_room, self):
            self.state.fail(
                f"bootstrap_room {bootstrap_room} belongs to a request that is still being served; {OWN_ROOM}"
            )
            self.state.reach(Phase.CLOSED)
        status = mgr.request_status.get(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        if self.has_failed():
            # The engine has noted that it begins in the place of how far the other is.
            if status is None:
                mgr.request_status.pop(bootstrap_room, None)
            elif status == KVPoll.Failed:
                mgr.update_status(bootstrap_room, status)

    @property
    def conclude_state(self) -> KVPoll | None:
        """What the engine keeps in an attribute: how the request ended. What it sets goes into the state."""
        return self.state.outcome

    @conclude_state.setter
    def conclude_state(self, outcome: KVPoll | None) -> None:
        if outcome == KVPoll.Failed:
            # As another thread or the engine has recorded.
            self.state.fail(self.kv_mgr.failure_records.get(self.bootstrap_room, NO_REASON))
        elif outcome == KVPoll.Success:
            self.state.succeed()

    @property
    def decode_prefix_len(self) -> int:
        """Tokens of the prompt that decode says it holds; 0 when it named none."""
        return self.state.decode_prefix_len

    def accept_decode_prefix(self) -> bool:
        """Take over decode's prefix once its message is there; False, and the request fails, if it cannot be right."""
        manager, state = self.kv_mgr, self.state
        if state.phase >= Phase.ACCEPTED:
            return True
        with manager.rooms.lock:
            state.asked = dict(manager.transfer_infos.get(self.bootstrap_room, {}))
        try:
            named = names_prefix(state.asked.values())
            if named:
                # First: of another prompt, all that is asked for is wrong.
                check_prompt(self)
            prefix_len = check_asked(state.asked, self.prompt_len, manager.kv_args.page_size)
            due_at = math.inf
            if named:
                # No word that decode has given it up has been missed until then, and decode keeps pages for so long.
                due_at = min(info.heard_until for info in state.asked.values()) + manager.transfer_timeout
        except ValueError as e:
            self.fail(f"refused decode's request for KV: {e}")
            return False
        state.accept(prefix_len, due_at)
        self.fail_if_refused()
        return not self.has_failed()

    def check_said(self, said: set[bytes]) -> None:
        """Raise ValueError where a length that decode has said is not that of this worker's prompt."""
        if any(int.from_bytes(length, "little") != self.prompt_len for length in said):
            raise ValueError(OTHER_PROMPT)

    # ---- questions ----

    def poll_asked(self) -> int:
        """What a request polls that decode has asked for: it may begin. An extra may have it wait for more."""
        return KVPoll.WaitingForInput

    def has_failed(self) -> bool:
        """Whether nothing more will be sent for this request."""
        return self.state.failed

    def failure_reason(self) -> str | None:
        """Why this request has failed, or fails with its next poll; None if it goes on. It costs next to nothing."""
        if self.has_failed():
            return self.state.reason
        return self.kv_mgr.rooms.refused.get(self.bootstrap_room) or self.overdue()

    def overdue(self) -> str | None:
        """Why nothing may be written for this request any more, if so."""
        return self.state.overdue(self.kv_mgr.transfer_timeout)

    # ---- commands ----

    def fail(self, reason: str) -> None:
        """Fail this request, on this worker and on decode, and nothing else. The first reason stays."""
        if not self.has_failed():
            # The engine's senders, as Mori's, look for the reason in the manager's book.
            self.kv_mgr.fail_room(self.bootstrap_room, reason)
            self.state.fail(reason)
            self.on_failure()

    def waits_unasked(self) -> bool:
        """Whether decode's request has not come and still may. For polls over NIXL.

        As of most in a long queue, for which nothing has been posted.
        """
        manager, room = self.kv_mgr, self.bootstrap_room
        asked = manager.request_status.get(room) != KVPoll.Bootstrapping
        return not (asked or self.conclude_state is not None or room in manager.rooms.refused)

    def on_failure(self) -> None:
        """Called when it has been failed here. Backends that need not wait for the next poll override it."""

    def take_reason(self, default: str = NO_REASON) -> str:
        """Why the request has failed, here or on another rank: from here on it has, and no book says why."""
        if self.state.phase < Phase.CLOSED:
            self.state.fail(self.kv_mgr.take_reason(self.bootstrap_room, default))
        return self.state.reason or default

    def fail_if_refused(self) -> None:
        """Fail if decode's request for this room could not be used, or decode has given it up, or its time is over.

        This worker may have stood still for so long: nothing is written then to what decode may have given away.
        """
        if not self.has_failed():
            reason = self.kv_mgr.rooms.take_refusal(self.bootstrap_room) or self.overdue()
            if reason is not None:
                self.fail(reason)

    def fail_if_overdue(self) -> None:
        """Fail this request, whose prompt has been computed, if its time is over."""
        reason = None if self.has_failed() else self.overdue()
        # The poll may find that all has been written, or fail it itself, for the same reason, and close its books.
        if reason is not None and self.poll() != KVPoll.Success:
            self.fail(reason)

    def end_failed_room(self, reason: str) -> set:
        """End this request's room; returns the decode ranks that are to be told, by the backend's names for them."""
        return self.kv_mgr.end_failed_room(self.bootstrap_room, self.state.asked, reason)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Wraps the engine's init: the pages to send are those beyond the prefix."""
        super().init(num_kv_indices - self.decode_prefix_len // self.kv_mgr.kv_args.page_size, aux_index)

    def drop(self) -> None:
        """End this request well: decode has asked for nothing, and computes the prompt itself."""
        if not self.state.reach(Phase.CLOSED):
            return
        manager, room = self.kv_mgr, self.bootstrap_room
        with manager.rooms.lock:
            manager.end_room(room)
            manager.forget(room)

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not say what failed."""
        raise RuntimeError(self.take_reason())
