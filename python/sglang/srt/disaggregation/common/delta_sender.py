"""A request on a prefill rank, from waiting for decode's request until its end has been reported.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with failures that
both backends tell decode (#36612, merged).
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

# For a failure without a recorded reason.
NO_REASON = "no reason was recorded"
# Prefix of the reason sent to decode if the request itself is at fault.
AT_FAULT = "the request is refused: "
# Each worker tokenizes the prompt itself.
OTHER_PROMPT = (
    "the prompts of prefill and decode differ. Likely causes: a chat template with the time in it, "
    "clocks or time zones (TZ) that differ, --chat-template or --reasoning-parser on one of them "
    "only, tokenizers or templates of two versions, an image that has another size each time it is "
    "fetched"
)


class Phase(enum.IntEnum):
    """The progress of a request. Phases come in this order; some are skipped."""

    # Not all decode ranks have asked for KV.
    WAITING = 0
    # All have asked, consistently: KV may be sent.
    ACCEPTED = 1
    # All is written, according to the engine's sender.
    DONE = 2
    # Failed for `reason`. Writes may be in flight, and decode has not been notified.
    FAILED = 3
    # Decode is notified, or will be when no write is in flight.
    TOLD = 4
    # Removed from all tables.
    CLOSED = 5


@dataclasses.dataclass
class SenderState:
    """A prefill rank's state of one request. Only its sender's commands change it.

    asked: each decode rank's request, by name; a copy, since the manager removes its own when all
    is sent. due_at: deadline for writes. It starts when the request is read here; decode's starts a
    little earlier. reason: why it failed.
    """

    phase: Phase = Phase.WAITING
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)
    decode_prefix_len: int = 0
    due_at: float = math.inf
    reason: str | None = None

    def fail(self, reason: str) -> None:
        """Fail the request; the first reason stays."""
        if self.phase < Phase.FAILED:
            self.phase, self.reason = Phase.FAILED, reason

    def reach(self, phase: Phase) -> bool:
        """Go on to a later phase; returns whether the phase changed."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True


def names_prefix(asked: Iterable[Any]) -> bool:
    """Whether a decode worker with a radix cache has asked: its message names a prefix."""
    return any(getattr(info, "names_prefix", False) for info in asked)


def check_asked(asked: Mapping[str, Any], prompt_len: int | None, page_size: int) -> int:
    """The prefix (tokens) to leave out, 0 without the flag. Raises ValueError if it is invalid."""
    infos = asked.values()
    prefixes = {getattr(info, "decode_prefix_len", None) or 0 for info in infos}
    sizes = {len(info.dst_kv_indices) for info in infos if not asks_for_nothing(info)}
    if len(prefixes) > 1 or len(sizes) > 1:
        raise ValueError(
            f"decode ranks disagree: prefixes {sorted(prefixes)}, delta pages {sorted(sizes)}"
        )
    prefix_len = prefixes.pop() if prefixes else 0
    if names_prefix(infos):
        if prompt_len is None:
            raise ValueError("this prefill does not know the length of the prompt")
        num_pages = sizes.pop() if sizes else None
        check_decode_prefix(prefix_len, num_pages, prompt_len, page_size)
    return prefix_len


# Placeholder: `conn.py` puts the engine's class behind this one.
Base: Any = object


class DeltaSender(Base):
    """Sender that knows which prefix decode holds, and keeps all its state in one object."""

    # The engine's attribute: creation time.
    init_time: float | None = None
    # Tokens of the prompt.
    prompt_len: int | None = None
    # Whether --allow-auto-truncate may have cut the prompt.
    is_cut: bool = False

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs):
        """Adds the request to the live rooms; a room that had ended begins anew.

        If another request holds the room, this one has failed and sends no message about the room.
        """
        self.state = SenderState()
        self.made_at = time.monotonic()
        if mgr.ends_rooms and not mgr.rooms.begin(bootstrap_room, self):
            self.state.fail(
                f"bootstrap_room {bootstrap_room} belongs to a request that is still being served; "
                f"{OWN_ROOM}"
            )
            self.state.reach(Phase.CLOSED)
        status = mgr.request_status.get(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        if self.has_failed():
            # Undo the engine's `__init__`, which overwrote the other request's status.
            if status is None:
                mgr.request_status.pop(bootstrap_room, None)
            elif status == KVPoll.Failed:
                mgr.update_status(bootstrap_room, status)

    @property
    def conclude_state(self) -> KVPoll | None:
        """The engine's attribute: the outcome, None while the request goes on."""
        if self.has_failed():
            return KVPoll.Failed
        return KVPoll.Success if self.state.phase == Phase.DONE else None

    @conclude_state.setter
    def conclude_state(self, outcome: KVPoll | None) -> None:
        if outcome == KVPoll.Failed:
            # Another thread or the engine recorded the reason.
            self.state.fail(self.kv_mgr.failure_records.get(self.bootstrap_room, NO_REASON))
        elif outcome == KVPoll.Success and not self.has_failed():
            self.state.phase = Phase.DONE

    @property
    def decode_prefix_len(self) -> int:
        """Tokens of the prompt that decode holds; 0 if it named none."""
        return self.state.decode_prefix_len

    def accept_decode_prefix(self) -> bool:
        """Read decode's prefix; returns False, and the request fails, if it is invalid."""
        manager, state = self.kv_mgr, self.state
        if state.phase >= Phase.ACCEPTED:
            return True
        with manager.rooms.lock:
            state.asked = dict(manager.transfer_infos.get(self.bootstrap_room, {}))
        try:
            named = names_prefix(state.asked.values())
            if named:
                # First: if the prompts differ, the rest of the message is wrong too.
                self._check_prompt()
            prefix_len = check_asked(state.asked, self.prompt_len, manager.kv_args.page_size)
            due_at = math.inf
            if named:
                # Cancellations up to `heard_until` are known, and decode keeps pages for the
                # timeout.
                due_at = min(i.heard_until for i in state.asked.values()) + manager.transfer_timeout
        except ValueError as e:
            self.fail(f"refused decode's request for KV: {e}")
            return False
        state.phase, state.decode_prefix_len, state.due_at = Phase.ACCEPTED, prefix_len, due_at
        self.fail_if_refused()
        return not self.has_failed()

    def _check_prompt(self) -> None:
        """Raise ValueError if decode's prompt, as far as reported, differs from this worker's."""
        if self.is_cut:
            # Decode's last page would not be filled.
            raise ValueError(
                "prefill has cut the prompt to the longest that it takes (--allow-auto-truncate)"
            )
        said = (getattr(info, "prompt", None) for info in self.state.asked.values())
        self.check_said({prompt for prompt in said if prompt is not None})

    def check_said(self, said: set[bytes]) -> None:
        """Raise ValueError if a prompt length reported by decode differs from this worker's."""
        if any(int.from_bytes(length, "little") != self.prompt_len for length in said):
            raise ValueError(OTHER_PROMPT)

    def poll_asked(self) -> int:
        """Status that `poll` returns once decode has asked. An extra may return another one."""
        return KVPoll.WaitingForInput

    def has_failed(self) -> bool:
        """Whether nothing more will be sent for this request."""
        return self.state.phase >= Phase.FAILED

    def failure_reason(self) -> str | None:
        """Why this request has failed or fails at its next poll; None if it goes on. Cheap."""
        if self.has_failed():
            return self.state.reason
        return self.kv_mgr.rooms.refused.get(self.bootstrap_room) or self.overdue()

    def overdue(self) -> str | None:
        """Why nothing more may be written: the transfer timeout is over. None before.

        Decode keeps its pages that long, and a NIXL write to a hung worker never ends. Never set
        for a decode worker without the flag.
        """
        if time.monotonic() < self.state.due_at:
            return None
        return (
            f"not all of its KV has been sent in the {self.kv_mgr.transfer_timeout:g} s for which "
            "it waits, by SGLANG_DISAGGREGATION_WAITING_TIMEOUT on prefill"
        )

    def fail(self, reason: str) -> None:
        """Fail this request on this worker and on decode. The first reason stays."""
        if not self.has_failed():
            # The engine's senders, like Mori's, read the reason from the manager's table.
            self.kv_mgr.fail_room(self.bootstrap_room, reason)
            self.state.fail(reason)
            self.on_failure()

    def waits_unasked(self) -> bool:
        """Whether decode has not asked yet and still may, as for most requests in a long queue."""
        manager, room = self.kv_mgr, self.bootstrap_room
        asked = manager.request_status.get(room) != KVPoll.Bootstrapping
        return not (asked or self.conclude_state is not None or room in manager.rooms.refused)

    def on_failure(self) -> None:
        """Called when the request fails here; overridden to act before the next poll."""

    def take_reason(self, default: str = NO_REASON) -> str:
        """Mark the request failed and return the reason, recorded here or on another rank."""
        if self.state.phase < Phase.CLOSED:
            self.state.fail(self.kv_mgr.take_reason(self.bootstrap_room, default))
        return self.state.reason or default

    def fail_if_refused(self) -> None:
        """Fail if decode's request was unusable or cancelled, or if its timeout is over."""
        if not self.has_failed() and (reason := self.failure_reason()) is not None:
            self.kv_mgr.rooms.refused.pop(self.bootstrap_room, None)
            self.fail(reason)

    def fail_if_overdue(self) -> None:
        """Fail this request, whose prompt has been computed, if its timeout is over."""
        # The poll may find that all is written, or fail the request for the same reason.
        if not self.has_failed() and (reason := self.overdue()) and self.poll() != KVPoll.Success:
            self.fail(reason)

    def end_failed_room(self, reason: str) -> set:
        """End this request's room; returns the decode ranks to notify, by the backend's names."""
        return self.kv_mgr.end_failed_room(self.bootstrap_room, self.state.asked, reason)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Wraps the engine's init: only the pages beyond the prefix are sent."""
        super().init(
            num_kv_indices - self.decode_prefix_len // self.kv_mgr.kv_args.page_size, aux_index
        )

    def drop(self) -> None:
        """End this request successfully: decode asked for nothing and computes the prompt."""
        if not self.state.reach(Phase.CLOSED):
            return
        manager, room = self.kv_mgr, self.bootstrap_room
        with manager.rooms.lock:
            manager.end_room(room)
            manager.forget(room)

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not report the cause."""
        raise RuntimeError(self.take_reason())
