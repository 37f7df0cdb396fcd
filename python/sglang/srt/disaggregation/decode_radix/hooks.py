"""Extension points: what an extra may do in the core's objects. The core imports no extra.

An extra subclasses a class of this module and registers it from an overlay, usually its
``disaggregation/decode.py``::

    hooks.register(hooks.DecodeHooks, MyHooks.of)

The core calls ``of`` with what the class names; ``of`` returns None if the options do not ask for
it. Hooks run in the order of ``python/extras/ORDER``, the same on all ranks. A hook starts no
collective and never blocks. A method without overrides costs the core one look at an empty tuple.

Upstream: none is known.
"""

# No hook without an override is called.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek
    from sglang.srt.server_args import ServerArgs


Point = TypeVar("Point")
# Per class of this module: the factories of the extras' hooks.
_makers: defaultdict[type, list[Callable[..., Any]]] = defaultdict(list)


def register(point: type[Point], make: Callable[..., Point | None]) -> None:
    """Call ``make`` for each object of the core that has hooks of the class ``point``."""
    _makers[point].append(make)


class Hooks(Generic[Point]):
    """The hooks of one object: under each method's name a tuple of its overrides, in order."""

    def __init__(self, point: type[Point], *given: Any):
        hooks = [hook for make in _makers[point] if (hook := make(*given)) is not None]
        for name in [name for name in dir(point) if not name.startswith("_")]:
            of = [
                getattr(hook, name)
                for hook in hooks
                if getattr(type(hook), name) is not getattr(point, name)
            ]
            setattr(self, name, tuple(of))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...


def hooks_of(scheduler: Any) -> Hooks[DecodeHooks]:
    """The `DecodeHooks` of a scheduler; `NO_HOOKS` if the worker does not decode."""
    queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
    hooks: Hooks[DecodeHooks] = NO_HOOKS if queue is None else queue.hooks
    return hooks


def has_work(scheduler: Any) -> bool:
    """Whether the worker is busy with work that is in none of the core's queues."""
    return any(has_work() for has_work in hooks_of(scheduler).has_work)


def events_of(args: ServerArgs) -> Events:
    """The `Events` of a worker with these options."""
    makers = _makers[Events]
    return makers[-1](args) if makers else NO_EVENTS


class Measured(Protocol):
    """Figures of the first rank that all ranks use; part of the one reduction (`Ranks.agree`)."""

    width: int

    def own(self) -> list[int]:
        """This rank's figures: `width` integers of 0 or more."""

    def take(self, figures: list[int]) -> None:
        """Receive the first rank's figures. The order of this step may have been made already."""


class Limit(Protocol):
    """Limits which requests decode, besides memory, in one step of admission or resume."""

    def add(self, plan: AdmissionPlan, req: Req, at_once: bool) -> bool:
        """Whether ``req`` may be admitted; if not, the step ends. at_once: without a transfer."""

    def held_live(self) -> int | None:
        """After a refusal: retry below this number of live requests; None: in the next step."""


class Events:
    """What happens to the requests and transfers of one rank, to be counted.

    ``make`` gets the worker's options and always returns the same object. The last one registered
    is used.
    """

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of all metrics of this process; empty without metrics."""
        return {}

    @property
    def counts_requests(self) -> bool:
        """Whether this rank counts what is the same on all TP ranks."""
        return False

    def blocked(self) -> None:
        """The next request does not fit in memory, and was not refused in the step before."""

    def admitted(self, decode_req: DecodeRequest, prefix_len: int, loaded: int) -> None:
        """A request has its memory. prefix_len: prompt tokens in the tree; loaded: from a tier."""

    def overtaken(self, num_requests: int) -> None:
        """The requests that a step has admitted bypassed this number of others."""

    def committed(self, prompt_len: int, prefix_len: int, computed: int = 0) -> None:
        """The delta of a prompt has arrived; or it is computed here (``computed`` tokens)."""

    def ended(self, reason: Any) -> None:
        """A request has ended with the engine's ``reason``: an abort if its transfer failed."""

    def lost_peer(self) -> None:
        """A worker at the other end is lost."""

    def sent(
        self,
        kv_args: Any,
        their_item_len: int,
        sent_pages: int,
        saved_pages: int,
        runs: int = 0,
        states: int = 0,
    ) -> None:
        """Prefill has started a transfer to one decode rank, which gets its heads or all of them.

        kv_args: the engine's, of this rank. their_item_len: bytes of a page in one buffer of the
        receiver. saved_pages: not sent because decode holds them. runs: of pages that are
        contiguous on both sides. states: slots or pages.
        """


NO_EVENTS = Events()


class DecodeHooks:
    """Hooks of one decode rank with a radix cache.

    ``of`` gets the new transfer queue, which has `policy`. There is no admission queue yet.
    """

    # ---- what is measured ----

    def measured(self) -> Measured:
        """Figures for each step's reduction; one width on all ranks. Called once, at start-up."""

    def note_step(self, batch: Any, result: Any) -> None:
        """The result of a batch has been processed on this rank."""

    def idle(self) -> None:
        """The loop has no batch: the time until the next result is not that of a step."""

    def has_work(self) -> bool:
        """Whether the worker is busy with work that is in none of the core's queues."""

    def state(self) -> dict[str, Any]:
        """More entries for ``kv_pool`` of the worker's internal state."""

    # ---- waiting requests ----

    def entered(self, entry: QueueEntry) -> None:
        """The request joins the queue. This, `admitted` and `left`: same steps on all ranks."""

    def admitted(self, entry: QueueEntry) -> None:
        """The request is admitted."""

    def left(self, entry: QueueEntry) -> None:
        """It will not be admitted; or its delta has arrived, is computed here, or is lost."""

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """Its delta has arrived, or its last prompt step begins, ``seconds`` after admission."""

    def keeps(self, entry: QueueEntry) -> bool:
        """Whether the tree will keep its delta; if not, none waits for it. Same on all ranks."""

    def limit(self, live: LiveReqs) -> Limit:
        """Called once in a step that may admit or resume. live: requests that decode or will."""

    def held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        """At the end of a step: the request that a `limit` refused, if any; the number waiting."""

    # ---- which requests decode ----

    def joins(self) -> Callable[[Req], bool]:
        """Called once in a step that may resume. Returns a test, called in order: whether the
        request decodes in this step, given those that wait and those that passed.
        """

    def may_begin(self) -> Callable[[Req], bool]:
        """Called once before a prompt step. Returns a test like that of `joins`, for candidates."""

    def began(self, reqs: Iterable[Req]) -> None:
        """Requests that had not begun are in the next prompt step."""

    # ---- where the delta of a request comes from ----

    def source(self) -> DeltaSource:
        """A source of deltas besides prefill; the same object on each call."""

    # ---- requests in an extra's own queues ----

    def reqs(self) -> Sequence[Req]:
        """Requests that hold KV, do not decode, and are in no core queue. Same on all ranks."""

    def beside(self, queue: Sequence[DecodeRequest]) -> Sequence[Req]:
        """Unfinished requests of this rank that neither decode nor are in ``queue`` (transfers)."""

    def begun(self) -> tuple[Sequence[Req], Sequence[Req]]:
        """Requests that wait for a prompt step: those computed in part, and the others."""

    def in_step(self) -> Sequence[Req]:
        """Requests of a prompt batch in flight."""


#: Used before any extra has registered.
NO_HOOKS = Hooks(DecodeHooks)


class DeltaSource(Protocol):
    """Brings the part of a prompt that the tree lacks, instead of prefill; see `PrefillDeltas`.

    One per rank. Ranks ask in the same steps and must get the same answers, except from `lets`,
    which is reduced. A request is in `Phase.LOCAL` from `request` until it decodes.
    """

    def lets(self, decode_req: DecodeRequest) -> bool:
        """Whether its prefill lets this source bring the delta of a request. MIN over the ranks."""

    def takes(self, req: Req, found: PrefixPeek, live: Callable[[], LiveReqs]) -> bool:
        """Whether it takes ``req``. found: what tree or tier hold of it. live: requests with KV."""

    def request(self, decode_req: DecodeRequest) -> None:
        """Accept an admitted request: prefix locked, memory allocated. Errors fail the request."""

    def agree(self, decode_req: DecodeRequest) -> bool:
        """No rank has lost the request: it leaves the transfer queue. A single rank asks at
        admission, and if this returns False, when it polls the queue.
        """

    def forget(self, decode_req: DecodeRequest) -> None:
        """The request has failed before `agree`."""

    def taken(self) -> Sequence[DecodeRequest]:
        """Accepted requests of this rank that are not committed."""

    def writes(self) -> bool:
        """Whether a batch in flight may write to pages that are already in the tree."""


@dataclass(frozen=True)
class MessagePart:
    """Frames that an extra adds to decode's request for KV: a tag and the frames after it.

    Append it to `PARTS` in an overlay of ``disaggregation/common/conn.py``, which both workers
    load. Parts follow the frames of the prefix, in the order of ``python/extras/ORDER``. The extra
    writes its part only for a prefill that reports that it reads it, see `Capabilities.others`.


    tag: its first frame. size: its number of frames, with the tag.
    dummies: whether prefill ranks that write nothing for the request get it too.

    write: on decode, scheduler thread, once per request. Gets the receiver and the pages to be
    written, int32; returns the frames after the tag, or None to leave the part out.
    read: on prefill, on the thread that reads decode's messages. Gets the frames after the tag;
    returns what ``parts`` of the rank's TransferInfo has under the tag. A ValueError refuses the
    request.
    answer: on prefill, scheduler thread, before a chunk is sent to a rank that sent the part. Gets
    the sender, the chunk's pages, the index of its first page in the delta, and whether it is the
    last chunk; with the last, returns an ASCII text for each such rank, see
    `DeltaReceiver.answers`. Over Mooncake this is the one frame for it in the success message.
    A ValueError fails the request.
    """

    tag: bytes
    size: int
    write: Callable[[Any, npt.NDArray[np.int32]], list[bytes] | None]
    read: Callable[[list[bytes]], Any]
    dummies: bool = True
    answer: Callable[[Any, npt.NDArray[np.int32], int, bool], str | None] | None = None


#: The parts of extras, in order.
PARTS: list[MessagePart] = []
