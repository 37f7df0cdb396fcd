"""What a decode worker knows of prefills: what each can do, and why one that does not answer is of no use.

Asked in threads: a scheduler waits for no peer.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) on all prefills.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import requests
from sglang.srt.disaggregation.common.handshakes import in_background
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE, DECODE_PREFIX_VERSION
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# Seconds for which a prefill that gives no usable answer is asked; as long as the engine does. And from one question to
# the next.
UNANSWERED_S, ASK_AGAIN_S = 15, 0.4
# Requests name prefills: questions that are remembered, and for how many seconds each is at least. Whom a request waits
# for is asked again before.
MOST_ASKED, FORGOTTEN_S = 1024, 60.0


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a prefill says that it can do.

    version: of the decode prefix that it understands, 0 for none. prompts: it compares digests of prompts.
    waiting_timeout, bootstrap_timeout: seconds for which it may write for a request that it has been asked for, and for
    which it leaves one of which decode does not speak; 0 where it does not say. all_cp_ranks: whether all of its
    context-parallel ranks send; None without such ranks, or where it does not say. others: see `listen_for`.
    """

    version: int = 0
    prompts: bool = False
    waiting_timeout: int = 0
    bootstrap_timeout: int = 0
    all_cp_ranks: bool | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def takes_prefix(self) -> bool:
        """Whether a prefix may be named to it."""
        return self.version == DECODE_PREFIX_VERSION


UNKNOWN = Capabilities()
_others: set[str] = set()
_checks: list[Callable[[Mapping[str, Any], Any], None]] = []


def listen_for(name: str) -> None:
    """Have `Capabilities.others` say what prefills answer under ``name``, if that is not no: for extras."""
    _others.add(name)


def check_with(check: Callable[[Mapping[str, Any], Any], None]) -> None:
    """Have ``check`` called with a prefill's answer and this worker's options: it raises ValueError where that prefill
    is of no use, which asking again does not mend. For extras."""
    _checks.append(check)


def parse_capabilities(answer: Mapping[str, Any]) -> Capabilities:
    """What a prefill's answer says. Raises KeyError, TypeError or ValueError for what is no answer."""
    version = int(answer["version"])
    takes = version == DECODE_PREFIX_VERSION

    def can(name: str) -> bool:
        return takes and bool(answer.get(name))

    def number(name: str) -> int:
        said = answer.get(name) if takes else 0
        return said if type(said) is int and said > 0 else 0

    waits = number("waiting_timeout"), number("bootstrap_timeout")
    # Whatever its version, which is 0 where all send.
    all_cp_ranks = None if answer.get("all_cp_ranks") is None else bool(answer["all_cp_ranks"])
    prompts, others = number("prompts") > 1, {name: answer[name] for name in _others if can(name)}
    return Capabilities(version, prompts, *waits, all_cp_ranks, others)


def check_cp_ranks(theirs: Capabilities) -> None:
    """Raise ValueError where a prefill's context-parallel ranks do not all send, or wait, as this worker has it."""
    ours = envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
    if theirs.all_cp_ranks is not None and theirs.all_cp_ranks != ours:
        # Those that are not asked would wait for ever, or this worker for those that send nothing.
        raise ValueError(
            f"of its context-parallel ranks, {'all send' if theirs.all_cp_ranks else 'the first sends'} KV, and this "
            f"decode worker asks {'all' if ours else 'the first'}. Give both the same "
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
        )


def check_tp_sizes(theirs: int, ours: int, what: str | None) -> None:
    """Raise ValueError where a prefill of another TP size cannot be used, since ``what`` would have to be cut."""
    if what is not None:
        raise ValueError(
            f"it has TP size {theirs} and this decode worker {ours}; the {what} of this "
            "model cannot be cut. Start both with the same --tp-size."
        )


class NotTrusted(requests.RequestException):
    """A prefill does not answer this worker, or not in a way that can be believed."""


class PrefillPeers:
    """The prefills of a decode worker with a radix cache.

    server_args: this worker's. met: told of each that takes a prefix, once hands have been shaken. shake: the engine's
    own questions to a prefill; whether they have been answered. get: asks it one of ours. asked: told of each time a
    prefill has been asked, and whether it has answered.
    """

    def __init__(
        self,
        server_args: Callable[[], Any],
        met: Callable[[str], object],
        shake: Callable[[str], bool],
        get: Callable[..., requests.Response] = requests.get,
        asked: Callable[[str, bool], object] = lambda addr, answered: None,
    ) -> None:
        self._server_args, self._met, self._shake, self._get, self._asked = server_args, met, shake, get, asked
        # Of those with which hands have been shaken, and for whose requests they say how to go on. For good, some 300
        # bytes each: one that is lost may still write for requests that go by this, and one in use is not asked again.
        self.capabilities: dict[str, Capabilities] = {}
        # Questions that are under way, and when each prefill was last asked, the latest last; and when and why one
        # turned out to be of no use.
        self._asking: set[str] = set()
        self._asked_at: OrderedDict[str, float] = OrderedDict()
        self._unusable: dict[str, tuple[float, str]] = {}

    def of(self, addr: str) -> Capabilities:
        """What is known of a prefill."""
        return self.capabilities.get(addr, UNKNOWN)

    def query(self, addr: str) -> None:
        """Have a prefill asked what it can do, unless it has been of late. `why_unreached` says what becomes of it."""
        now = time.monotonic()
        if addr not in self._asking and now - self._asked_at.get(addr, -math.inf) >= ASK_AGAIN_S:
            self._asked_at[addr] = now
            self._asked_at.move_to_end(addr)
            self._asking.add(addr)
            if in_background(lambda: self._query(addr), "ask-prefill") is not None:
                self._asking.discard(addr)
            self._forget_oldest(now)

    def _forget_oldest(self, now: float) -> None:
        """Forget what came of old questions. Not of those under way, of which more is still to be noted."""
        while len(self._asked_at) > MOST_ASKED:
            addr, at = next(iter(self._asked_at.items()))
            if addr in self._asking or now - at < FORGOTTEN_S:
                return
            for book in (self._asked_at, self._unusable):
                book.pop(addr, None)

    def _query(self, addr: str) -> None:
        """Put the engine's questions and one more to a prefill, and note why it is of no use if it is not."""
        now = time.monotonic()
        known = addr in self.capabilities
        try:
            # First, since with the engine's answer requests go on.
            version = self.ask_for_prefix(addr)
            answered = version is not None and self._shake(addr)
            known = known or answered
            self._asked(addr, answered)
            if version is not None and answered:
                self._warn(addr, version)
        except Exception as e:
            logger.exception("Prefill %s cannot be used", addr)
            # A client is told it, in JSON: a lone surrogate of prefill's would end that.
            self._unusable[addr] = (now, f"{type(e).__name__}: {e}".encode(errors="replace").decode())
        finally:
            if not known:
                # No request goes on with it. Any server may have answered that it knows no such route.
                self.capabilities.pop(addr, None)
            self._asking.discard(addr)

    def _warn(self, addr: str, version: int) -> None:
        if version != DECODE_PREFIX_VERSION:
            logger.warning(
                "Prefill %s does not understand a decode prefix (version %s, this worker has %s): "
                "it will send whole prompts. Install sglang-pd-radix there to send only what is missing.",
                addr,
                version or "none",
                DECODE_PREFIX_VERSION,
            )
            return
        self._met(addr)

    def ask_for_prefix(self, addr: str) -> int | None:
        """Which version of a decode prefix a prefill understands, 0 for none; None if it gives no answer.

        It is a route of its own, so that no message of the engine's protocol changes: a prefill without the patch
        answers 404 and is then sent no prefix. Raises NotTrusted where that prefill wants nothing of this worker, and
        ValueError where it is of no use, as where not all context-parallel ranks send that are asked.
        """
        try:
            reply = self._get(f"http://{addr}{DECODE_PREFIX_ROUTE}", timeout=5)
            if reply.status_code == 401:
                raise NotTrusted(reply.text)
            if reply.status_code == 503:
                logger.info("Prefill %s is starting: %s", addr, reply.text)
                return None
            if reply.status_code not in (200, 404):
                raise ValueError(f"status {reply.status_code}")
            answer = reply.json() if reply.status_code == 200 else {"version": 0}
            found = parse_capabilities(answer)
        except NotTrusted:
            raise
        except Exception as e:
            logger.error("Could not ask prefill %s whether it understands a decode prefix: %s", addr, e)
            return None
        check_cp_ranks(found)
        for check in _checks:
            check(answer, self._server_args())
        self.capabilities[addr] = found
        return found.version

    def why_unreached(self, addr: str, since: float, is_known: bool, timeout_s: float) -> str | None:
        """Why a request that has waited for its handshake with a prefill ``since`` then need not wait any longer.

        is_known: whether that prefill has answered. timeout_s: seconds that a request may wait for a handshake.
        """
        now = time.monotonic()
        at, reason = self._unusable.get(addr, (0.0, ""))
        if at > since:
            return f"prefill {addr} cannot be used: {reason}"
        if not is_known and now - since > UNANSWERED_S:
            return f"prefill {addr} has not answered for {UNANSWERED_S} s"
        if now - since > timeout_s:
            return f"timed out after {now - since:.0f} s, in which prefill {addr} has not known of it"
        return None
