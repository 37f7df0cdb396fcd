"""Decode says which tokens and images are in its prompts, and keeps nothing of what prefill had other images for.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.prompt_digests import ImageHooks, compares_prompts, prompt_digests

__all__ = ["DecodeRequest", "DecodeTransferQueue"]

hooks.register(hooks.DecodeHooks, ImageHooks.of)


class DecodeRequest(engine.DecodeRequest):
    """A request whose prompt is compared."""

    def said_prompt(self) -> bytes:
        """Its digests, where they are to be compared."""
        return prompt_digests(self.req) if compares_prompts() else super().said_prompt()


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Looks at what arrives, before it is the tree's."""

    # What compares images; None where nothing is compared.
    images: ImageHooks | None = None

    def _commit_transfer_to_req(self, decode_req) -> bool:
        """Adds what prefill says of the images."""
        done = super()._commit_transfer_to_req(decode_req)
        if done and self.images is not None and not decode_req.is_aborted:
            self.images.keep_same(decode_req, self.metadata_buffers.output_ids)
        return done
