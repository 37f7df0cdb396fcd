"""Decode sends digests of its prompts, and keeps KV of differing images out of the tree.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.prompt_digests import ImageHooks, compares_prompts, prompt_digests

__all__ = ["DecodeRequest", "DecodeTransferQueue"]

hooks.register(hooks.DecodeHooks, ImageHooks.of)


class DecodeRequest(engine.DecodeRequest):
    """Sends a digest of its prompt."""

    def said_prompt(self) -> bytes:
        """The digests, if prompts are compared."""
        return prompt_digests(self.req) if compares_prompts() else super().said_prompt()


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Checks for differing images before the tree takes the KV."""

    # None if prompts are not compared.
    images: ImageHooks | None = None

    def _commit_transfer_to_req(self, decode_req) -> bool:
        """Adds the check."""
        done = super()._commit_transfer_to_req(decode_req)
        if done and self.images is not None and not decode_req.is_aborted:
            self.images.keep_same(decode_req, self.metadata_buffers.output_ids)
        return done
