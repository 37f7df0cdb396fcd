"""What the engine does not do: followers that share their leader's pages while these are still being written.

For comparison with waiting for the leader's commit. A prompt enters the tree as soon as its KV has been asked for; who
matches pages that are on their way locks them, asks for what lies beyond them at once, and begins to decode when its
own transfer and that of the request which brings these pages are in. No transfer fails here: who had shared the pages
of one that does would have to start again.
"""

from __future__ import annotations

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.step_in_flight import OPEN

from sim.decode import Receiver, SimulatedQueue


class SharingReceiver(Receiver):
    """A request whose pages others count on before they have come."""

    _leader: SharingReceiver | None = None

    def send_metadata(self, page_indices, aux_index, state_indices, decode_prefix_len=None) -> None:
        landing, prompt, held = self.worker.landing, self.req.origin_input_ids, decode_prefix_len or 0
        if held:
            # Who brings the last page of what it matches has its own success bound to whoever brings those before.
            self._leader = landing.get(prompt[held - 1])
        self._brings = prompt[held:]
        self._followers: list[SharingReceiver] = []
        for slot in self._brings:
            landing[slot] = self
        super().send_metadata(page_indices, aux_index, state_indices, decode_prefix_len)

    def _arrived(self) -> None:
        if self._leader is not None and self._leader.state != KVPoll.Success:
            self._leader._followers.append(self)
            return
        for slot in self._brings:
            if self.worker.landing.get(slot) is self:
                del self.worker.landing[slot]
        super()._arrived()
        for follower in self._followers:
            follower._arrived()


class SharingQueue(SimulatedQueue):
    """The real queue, in which nobody waits for a transfer of others before admission."""

    receiver_type = SharingReceiver

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy.follow = False
        self._ask, self.admission.deltas.request = self.admission.deltas.request, self._ask_and_share

    def _ask_and_share(self, decode_req: DecodeRequest) -> None:
        self._ask(decode_req)
        self.admission.deltas.ask_admitted(OPEN)
        self.radix.commit_req(decode_req.req)
