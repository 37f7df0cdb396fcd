"""Digests by which the workers of a pair compare a prompt, and the handling of images that differ.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

from sglang_pd_radix.environment import switched_on

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry

logger = logging.getLogger(__name__)

__all__ = ["ImageHooks", "compares_prompts", "has_images", "prompt_digest", "prompt_digests", "say_images"]

COMPARE_PROMPTS = "SGLANG_DISAGGREGATION_COMPARE_PROMPTS"
# The bytes of a `prompt_digest`.
DIGEST_SIZE = 16
# Column of `MetadataBuffers.output_ids` that the engine sends and does not read: 1 if prefill's images differ from
# decode's.
OTHER_IMAGES = 12
# Matches no tree: see `DecodeRadixCache.accepts`.
NO_GENERATION = -1


def compares_prompts() -> bool:
    """Whether workers compare a prompt's tokens and images, not only its length.

    Raises ValueError for a value of the variable that is neither yes nor no.
    """
    return switched_on(COMPARE_PROMPTS, "to compare tokens and images of prompts", "to compare their lengths only")


def prompt_digest(token_ids: Sequence[int], prompt_len: int) -> bytes:
    """16 bytes of SHA-256 of a prompt.

    token_ids: before images are padded with feature hashes: features may differ in the last bit between hosts.
    prompt_len: tokens with images.
    """
    digest = hashlib.sha256(b"%d " % prompt_len)
    digest.update(_packed(token_ids))
    return digest.digest()[:DIGEST_SIZE]


def _packed(token_ids: Sequence[int]) -> array[int] | bytes:
    # 1.0 ms for 128K tokens: 0.7 to read the list, 0.3 to hash. NumPy and signed types take 2 to 2.4.
    for code in "I", "q":
        try:
            return array(code, token_ids)
        except OverflowError:
            # Some models put numbers that are no tokens in place of images: 3.4 ms.
            continue
    return repr([*token_ids]).encode()


def prompt_digests(req: Any) -> bytes:
    """The `prompt_digest`; with images, followed by 16 bytes for the images and their places.

    The engine keeps a second list with images' feature hashes, by which the tree distinguishes them. Without images
    the tokenizer process has computed the digest, so that it takes no time of the scheduler's step.
    """
    unpadded, padded = req.origin_input_ids_unpadded, req.origin_input_ids
    length, made = getattr(req.sampling_params, "prompt_digest", (-1, b""))
    if padded is unpadded and length == len(padded):
        return made
    images = b"" if padded is unpadded else prompt_digest(padded, len(padded))
    return prompt_digest(unpadded, len(padded)) + images


def has_images(req: Any) -> bool:
    """Whether the prompt contains feature hashes."""
    return req.origin_input_ids is not req.origin_input_ids_unpadded


def say_images(req: Any, buffers: Any) -> None:
    """Write into the request's metadata whether prefill's images differ from decode's."""
    sender = req.disagg_kv_sender
    if hasattr(sender, "other_images"):
        buffers.output_ids[req.metadata_buffer_index, OTHER_IMAGES] = sender.other_images


class ImageHooks(DecodeHooks):
    """Keeps KV of differing images out of the tree."""

    @classmethod
    def of(cls, queue: Any) -> ImageHooks | None:
        """queue: the transfer queue. None if prompts are not compared."""
        queue.images = cls(queue) if compares_prompts() else None
        found: ImageHooks | None = queue.images
        return found

    def __init__(self, transfers: Any):
        self._transfers = transfers
        # Prefills whose images differed in the last transfer.
        self._others: set[Hashable] = set()

    def keeps(self, entry: QueueEntry) -> bool:
        """False for transfers from a prefill whose images differed: the tree may keep nothing of them."""
        if entry.prefill not in self._others:
            return True
        # A request just admitted is still in the queue before.
        queued = *self._transfers.queue, *self._transfers.scheduler.disagg_decode_prealloc_queue.queue
        return not any(dr.entry is entry and has_images(dr.req) for dr in queued)

    def keep_same(self, decode_req: DecodeRequest, output_ids: torch.Tensor) -> None:
        """Keep a received request's KV out of the tree if prefill's images differ.

        The request itself is served: features may differ in the last bit between hosts. But the tree would share KV of
        prefill's images with requests that have decode's. Later requests do not wait for that prefill's transfers.
        output_ids: int32 [buffers, 16].
        """
        req, entry = decode_req.req, decode_req.entry
        if is_warmup(req):
            return
        other = bool(output_ids[decode_req.metadata_buffer_index, OTHER_IMAGES])
        if entry is not None and has_images(req):
            (self._others.add if other else self._others.discard)(entry.prefill)
            if (waited_for := getattr(self._transfers.policy, "transfers", None)) is not None:
                waited_for.changes += 1
        if other:
            logger.warning(
                "Request %s: the images of prefill and decode differ, so none of its KV is kept on decode", req.rid
            )
            req.kv_generation = NO_GENERATION
