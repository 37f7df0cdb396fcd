"""Checks of a request on arrival: its options, its prompt, and its bootstrap fields.

Upstream: none is known for all of it; sgl-project/sglang#22175 and #28088 (merged) and #28794 (open) check one option
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.request_checks import (
    check_embeds,
    check_prompt,
    check_request,
    check_without_tokenizer,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.server_args import ServerArgs

__all__ = ["RequestAdmission"]


@dataclass(frozen=True)
class RequestAdmission:
    """What requests are checked against.

    processor: of images or sound; None without. max_input_len: returns the scheduler's limit of a prompt in tokens.
    check_room: raises ValueError for a room that the other worker has refused.
    """

    mode: DisaggregationMode
    args: ServerArgs
    model: Any
    processor: Any
    has_tokenizer: bool
    max_input_len: Callable[[], int]
    check_room: Callable[[int | None], None]

    def check(self, obj: GenerateReqInput) -> None:
        """Raise ValueError if a normalised request, including all its prompts, cannot be served.

        Called before tokenization; a text prompt is checked later.
        """
        count, paths = obj.batch_size * obj.parallel_sample_num, obj.lora_path
        if not obj.is_single and isinstance(paths, list) and len(paths) != count:
            # Excess adapters would be acquired and never released. With n samples: all prompts, n times.
            raise ValueError(f"lora_path must have an entry for each of the {obj.batch_size} prompts.")
        # The engine's samples are copies of these.
        for item in [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]:
            self._check_one(item)

    def _check_one(self, item: GenerateReqInput) -> None:
        args, disaggregated = self.args, self.mode != DisaggregationMode.NULL
        check_request(
            item,
            self.model.vocab_size,
            disaggregated,
            keyed=disaggregated or args.keyed,
        )
        if not self.has_tokenizer:
            check_without_tokenizer(item.sampling_params, self.mode != DisaggregationMode.PREFILL)
        if item.input_ids is not None:
            self.check_prompt(item, item.input_ids)
        elif item.text is None and args.disable_radix_cache:
            check_embeds(item.input_embeds, self.model.hidden_size)
        if disaggregated and args.disaggregation_transfer_backend != "fake":
            self._check_pair(item)

    def _check_pair(self, item: GenerateReqInput) -> None:
        """Raise ValueError for a request that did not come through a router, or that decode has refused.

        A missing room ends the DP controller of a worker that derives ranks from rooms.
        """
        decodes = self.mode == DisaggregationMode.DECODE
        for name in ("bootstrap_room", "bootstrap_host") if decodes else ("bootstrap_room",):
            if getattr(item, name) is None:
                raise ValueError(f"{name} is missing: send the request to the router, which names a prefill.")
        self.check_room(item.bootstrap_room)

    def check_prompt(self, item: GenerateReqInput, input_ids: Any) -> None:
        """Raise ValueError for tokens of a prompt that the scheduler would refuse."""
        if self.processor and item.contains_mm_input():
            # Image placeholders are not tokens, and their number is known later.
            return
        if item.session_params and not input_ids:
            # The prompt is in the session.
            return
        # Without a peer the scheduler checks this, and other prompts of a batch are served.
        alone = self.mode == DisaggregationMode.NULL
        # Prefill would truncate elsewhere, and unwritten pages would enter decode's tree.
        cuts = self.args.allow_auto_truncate and not self.args.disaggregation_decode_enable_radix_cache
        limit = None if alone or cuts else self.max_input_len()
        check_prompt(input_ids, self.model.vocab_size, limit)
