"""Extension points: what an extra may do in the objects of the core, which does not know it.

An extra subclasses a class of this module and registers it from an overlay, usually its ``disaggregation/decode.py``::

    hooks.register(hooks.DecodeHooks, MyHooks.of)

``of`` gets what the class says, and returns None where the options ask for nothing. The order of
hooks is that of ``python/extras/ORDER``: the same on all ranks. A hook begins no collective and
waits for nothing. A method that no hook overrides costs the core a look at an empty tuple.

Upstream: none is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.disaggregation.decode_radix.overlap_guard import Fence
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "NO_EVENTS",
    "NO_HOOKS",
    "DecodeHooks",
    "DeltaSource",
    "Events",
    "Hooks",
    "Limit",
    "Lines",
    "Measured",
    "MessagePart",
    "add_part",
    "events_of",
    "has_work",
    "hooks_of",
    "parts",
    "register",
]

Point = TypeVar("Point")
# Of each class of this module, what makes the hooks of extras.
_makers: defaultdict[type, list[Callable[..., Any]]] = defaultdict(list)


def register(point: type[Point], make: Callable[..., Point | None]) -> None:
    """Have ``make`` called for each object of the core that has hooks of the class ``point``."""
    _makers[point].append(make)


class Hooks(Generic[Point]):
    """The hooks of one object. Of each event, by its name: the methods that override it, in
    order.
    """

    def __init__(self, point: type[Point], *given: Any):
        made = [hook for make in _makers[point] if (hook := make(*given)) is not None]
        for name in [name for name in dir(point) if not name.startswith("_")]:
            of = [
                getattr(hook, name)
                for hook in made
                if getattr(type(hook), name) is not getattr(point, name)
            ]
            setattr(self, name, tuple(of))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...


def hooks_of(scheduler: Any) -> Hooks[DecodeHooks]:
    """The `DecodeHooks` of a scheduler; of a worker that does not decode none."""
    queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
    hooks: Hooks[DecodeHooks] = NO_HOOKS if queue is None else queue.hooks
    return hooks


def has_work(scheduler: Any) -> bool:
    """Whether a worker is busy though it has nothing in the core's queues."""
    return any(has_work() for has_work in hooks_of(scheduler).has_work)


def events_of(args: ServerArgs) -> Events:
    """The `Events` of a worker with these options."""
    makers = _makers[Events]
    return makers[-1](args) if makers else NO_EVENTS


class Measured(Protocol):
    """What goes by figures that the first rank has measured: they are part of the one reduction
    (`Ranks.agree`).
    """

    width: int

    def own(self) -> list[int]:
        """This rank's, `width` of 0 or more."""
        ...

    def take(self, figures: list[int]) -> None:
        """Those that all ranks go by; the order of this step may have been made."""
        ...


class Limit(Protocol):
    """What bounds who decodes, beside memory, in one step of admission or resume."""

    def add(self, plan: AdmissionPlan, req: Req, at_once: bool) -> bool:
        """Whether ``req``, whose admission takes ``plan``, may be admitted; if not, it ends the
        step.

        at_once: nothing is sent for it.
        """
        ...

    def held_live(self) -> int | None:
        """After a refusal: with fewer live requests than so many it is asked again; None: in the
        next step.
        """
        ...


class Lines:
    """In which of two lines those that wait stand; here all in the first.

    Of one priority, those in the second let those in the first pass, which is not counted as
    overtaking; in each line the order is that of admission. Where the first go in place of the
    second, and where not, is for `mix` to say. All of it is the same on all ranks.
    """

    #: Steps of a blocked queue between two looks at it, where that is less than the core's.
    look_every: int | None = None

    def begin_step(self, first: QueueEntry | None) -> None:
        """The queue is looked at; ``first``: who came first of those that wait."""

    def measured_alone(self) -> None:
        """There is one rank, and what it has measured in this step counts for the order of this
        step.
        """

    def is_second(self, entry: QueueEntry) -> bool:
        """In which line it stands."""
        return False

    def split(
        self, entries: Sequence[QueueEntry]
    ) -> tuple[Sequence[QueueEntry], Sequence[QueueEntry]]:
        """Those in the first line, and those in the second."""
        return entries, ()

    def looked_at(
        self, ready: list[DecodeRequest], entry_of: Callable[[DecodeRequest], QueueEntry]
    ) -> list[DecodeRequest]:
        """Those of a queue that is too long for a step, in the order in which it looks at them.
        ready: as they came.
        """
        return ready

    def mix(self, order: list[int], entries: Sequence[QueueEntry]) -> list[int]:
        """The order of both lines. order: that of admission, of indices of ``entries``, by
        priority.
        """
        return order

    def version(self) -> Hashable:
        """Another where `mix` may give another order of the same."""
        return None


class Events:
    """What happens to the requests and transfers of one rank, for who counts it. Of several the
    last counts.

    Made with the options of the worker, and once in a process: who asks again is given the same.
    """

    @property
    def labels(self) -> Mapping[str, str]:
        """Those of all metrics of this process; none without metrics."""
        return {}

    @property
    def counts_requests(self) -> bool:
        """Whether this rank counts what is the same on all TP ranks."""
        return False

    def blocked(self) -> None:
        """There is no memory for the request whose turn it is, which was not so in the step
        before.
        """

    def admitted(self, decode_req: DecodeRequest, prefix_len: int, loaded: int) -> None:
        """A request has its memory. prefix_len: tokens of its prompt in the tree; loaded: those
        that a tier adds.
        """

    def overtaken(self, num_requests: int) -> None:
        """Those that a step has admitted have overtaken so many others."""

    def committed(self, prompt_len: int, prefix_len: int, computed: int = 0) -> None:
        """The rest of a prompt has come; or all of it, ``computed`` tokens, is computed here."""

    def ended(self, reason: Any) -> None:
        """A request has ended, for the engine's ``reason``: an abort if its handshake or transfer
        has failed.
        """

    def lost_peer(self) -> None:
        """A worker at the other end is gone."""

    def sent(
        self,
        kv_args: Any,
        their_item_len: int,
        sent_pages: int,
        saved_pages: int,
        runs: int = 0,
        states: int = 0,
    ) -> None:
        """A prefill has begun a transfer to one decode rank, which gets its own share of the heads,
        or all of them.

        kv_args: the engine's, of this rank. their_item_len: bytes of a page of one buffer there.
        saved_pages: that are not sent, as decode held them. runs: of pages that are contiguous on
        both sides. states: slots or pages.
        """


NO_EVENTS = Events()


class DecodeHooks:
    """One rank of a decode worker with a radix cache. Made with its scheduler and its tree, before
    its queues.
    """

    # ---- what is measured ----

    def measured(self) -> Measured:
        """Called once, when the queues are made: what ranks agree on in each step. Of one width on
        all ranks.
        """
        raise NotImplementedError

    def note_step(self, batch: Any, result: Any) -> None:
        """The result of a step has been processed, on this rank."""

    def idle(self) -> None:
        """This turn of the loop has no step: the time until the next result is not that of a
        step.
        """

    def has_work(self) -> bool:
        """Whether the worker is busy with what is in none of the core's queues."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """More for ``kv_pool`` of the worker's internal state."""
        raise NotImplementedError

    # ---- requests that wait ----

    def lines(self) -> Lines:
        """Called once, when the queues are made. Of several the last counts."""
        raise NotImplementedError

    def entered(self, entry: QueueEntry) -> None:
        """A request has joined those that wait. This and the next two: on all ranks, in the same
        steps.
        """

    def admitted(self, entry: QueueEntry) -> None:
        """It is admitted."""

    def left(self, entry: QueueEntry) -> None:
        """It is admitted no more; or what it was admitted with has come, is computed here, or is
        lost.
        """

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """What it was admitted with has come, or its last step over its prompt begins, ``seconds``
        later.
        """

    def keeps(self, entry: QueueEntry) -> bool:
        """Whether the tree is to keep what comes for ``entry``: if not, nobody waits for it. Alike
        on all ranks.
        """
        raise NotImplementedError

    def limit(self, live: LiveReqs) -> Limit:
        """Called once in a step in which somebody could be admitted, or come back. live: who
        decodes, or will.
        """
        raise NotImplementedError

    def held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        """At the end of that step, and of each in which nobody could: whom a `limit` has refused,
        and how many wait.
        """

    # ---- which requests decode ----

    def joins(self) -> Callable[[Req], bool]:
        """Called once in a step in which retracted requests may come back. Returns a test, which is
        asked of one after the other: whether it decodes in this turn, beside those that wait and
        those that passed before it.
        """
        raise NotImplementedError

    def may_begin(self) -> Callable[[Req], bool]:
        """Called once before a step over prompts is made. Returns a test, as `joins`, of those that
        could be in it.
        """
        raise NotImplementedError

    def began(self, reqs: Iterable[Req]) -> None:
        """Requests that had not begun are in the next step over prompts."""

    # ---- where the delta of a request comes from ----

    def source(self) -> DeltaSource:
        """Returns a source beside prefill, the same each time."""
        raise NotImplementedError

    # ---- what prefill is asked for ----

    def targets(self, decode_req: DecodeRequest) -> torch.Tensor:
        """Called when a request has its memory, before prefill is asked. Returns the first slots of
        pages, on the device, that the message is to name beside those to be written. One copy of a
        step brings all to the host.
        """
        raise NotImplementedError

    def named(self, decode_req: DecodeRequest, slots: np.ndarray, fence: Fence) -> bool:
        """These are on the host. Returns whether to ask one step later, when the step behind
        ``fence`` is over. Who overrides this or `targets` overrides both.
        """
        raise NotImplementedError

    # ---- requests in queues of an extra's own ----

    def reqs(self) -> Sequence[Req]:
        """Those that hold KV, do not decode, and are in no queue of the core's. The same on all
        ranks.
        """
        raise NotImplementedError

    def beside(self, queue: Sequence[DecodeRequest]) -> Sequence[Req]:
        """Those that have not ended, do not decode, and are not in ``queue``, of transfers. On this
        rank.
        """
        raise NotImplementedError

    def begun(self) -> tuple[Sequence[Req], Sequence[Req]]:
        """Those that wait for a step: those of which a step has computed a part, and the others."""
        raise NotImplementedError

    def in_step(self) -> Sequence[Req]:
        """Those in a step over prompts that is in flight."""
        raise NotImplementedError


#: Before anything is registered.
NO_HOOKS = Hooks(DecodeHooks)


class DeltaSource:
    """What brings the part of a prompt that the tree lacks, in place of the request's prefill; see
    `PrefillDeltas`.

    One rank's. Ranks ask in the same steps and must be answered alike, but for `lets`, which is
    reduced. A request that it takes is in the phase `Phase.LOCAL` from `request` until it decodes.
    """

    def lets(self, decode_req: DecodeRequest) -> bool:
        """Whether this source may bring the delta of a request, as far as its prefill goes. By MIN
        over the ranks.
        """
        raise NotImplementedError

    def takes(self, req: Req, found: PrefixPeek, live: Callable[[], LiveReqs]) -> bool:
        """Whether it does, of a candidate for admission of which tree or tier hold ``found``. live:
        who has KV.
        """
        raise NotImplementedError

    def request(self, decode_req: DecodeRequest) -> None:
        """Take in an admitted request: its prefix is locked, its memory allocated. What raises
        fails the request.
        """
        raise NotImplementedError

    def agree(self, decode_req: DecodeRequest) -> bool:
        """No rank has lost the request, which leaves the queue of transfers with that. One rank
        alone asks when it has admitted it, and if this returns False once more when the queue is
        polled.
        """
        raise NotImplementedError

    def forget(self, decode_req: DecodeRequest) -> None:
        """A request has failed before that."""
        raise NotImplementedError

    def taken(self) -> Sequence[DecodeRequest]:
        """The requests that it has taken in and that are not committed, on this rank."""
        raise NotImplementedError

    def writes(self) -> bool:
        """Whether a step in flight may write to pages that are in the tree already."""
        raise NotImplementedError


@dataclass(frozen=True)
class MessagePart:
    """Frames that an extra adds to decode's request for KV: a tag, and what follows it.

    To be added from an overlay of ``disaggregation/common/conn.py``, which both workers load. Parts
    stand behind the frames of the prefix in the order in which they were added, and so in that of
    ``python/extras/ORDER``. The extra writes its part only for a prefill that says that it reads
    it, see `Capabilities.others`.

    tag: its first frame. size: its frames, with that.

    write: on decode, on the scheduler's thread, once for a request that is being sent. Of its
    receiver and the pages to be written, int32: the frames behind the tag; None to leave the part
    out.
    dummies: whether prefill ranks that write nothing for the request are sent it too.

    read: on prefill, on the thread that reads decode's messages. Of the frames behind the tag: what
    ``parts`` of the rank's TransferInfo has under the tag. Raises ValueError: then the request is
    refused.
    answer: on prefill, on the scheduler's thread, before a chunk is sent to a rank that has sent
    the part. Of the request's sender, the chunk's pages, the place of the first of them in the
    delta, and whether the chunk is the last: with that, what each such rank is told, in ASCII. See
    `DeltaReceiver.answers`. Over Mooncake it comes with the message of a success, which has one
    frame for it. Raises ValueError: then the request fails.
    """

    tag: bytes
    size: int
    write: Callable[[Any, npt.NDArray[np.int32]], list[bytes] | None]
    read: Callable[[list[bytes]], Any]
    dummies: bool = True
    answer: Callable[[Any, npt.NDArray[np.int32], int, bool], str | None] | None = None


_parts: list[MessagePart] = []


def add_part(part: MessagePart) -> None:
    """Have requests for KV carry ``part``, and be read with it."""
    _parts.append(part)


def parts() -> Sequence[MessagePart]:
    """Those there are, in order."""
    return _parts
