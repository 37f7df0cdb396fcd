"""Prefill compares decode's digest of the prompt with its own.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.delta_sender import OTHER_PROMPT
from sglang.srt.disaggregation.decode_radix.prefix import LENGTH_SIZE
from sglang.srt.disaggregation.prompt_digests import DIGEST_SIZE

__all__ = ["CommonKVSender"]


class CommonKVSender(engine.CommonKVSender):
    """Compares prompts."""

    # Returns its `prompt_digests`.
    own_prompt: Callable[[], bytes]
    # Whether decode's images differ.
    other_images: bool = False

    def check_said(self, said: set[bytes]) -> None:
        """Adds the comparison of `prompt_digests`."""
        digests = {one for one in said if len(one) != LENGTH_SIZE}
        super().check_said(said - digests)
        if not digests:
            return
        own = self.own_prompt()
        if {one[:DIGEST_SIZE] for one in digests} != {own[:DIGEST_SIZE]}:
            raise ValueError(OTHER_PROMPT)
        self.other_images = digests != {own}
