"""What the workers compare of a prompt, each of its own, and what follows from images that differ.

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
# Of a request's row of `MetadataBuffers.output_ids`, a number that the engine sends and nobody reads: 1 if prefill has
# computed it with other images than decode's.
OTHER_IMAGES = 12
# Of no tree: see `DecodeRadixCache.accepts`.
NO_GENERATION = -1


def compares_prompts() -> bool:
    """Whether a decode worker says of a prompt which tokens and images are in it, and not only how many tokens.

    Raises ValueError for a value of the variable that is neither yes nor no.
    """
    return switched_on(COMPARE_PROMPTS, "to compare tokens and images of prompts", "to compare their lengths only")


def prompt_digest(token_ids: Sequence[int], prompt_len: int) -> bytes:
    """What the workers compare of a prompt, each of its own: 16 bytes of SHA-256.

    token_ids: before images are padded with hashes of their features, of which two hosts may differ in the last bit.
    prompt_len: tokens with the images.
    """
    digest = hashlib.sha256(b"%d " % prompt_len)
    digest.update(_packed(token_ids))
    return digest.digest()[:DIGEST_SIZE]


def _packed(token_ids: Sequence[int]) -> array[int] | bytes:
    # 128K tokens take 1.0 ms in all: 0.7 for reading the list, 0.3 for the hash. NumPy, and each signed type, reads it
    # in 2 to 2.4.
    for code in "I", "q":
        try:
            return array(code, token_ids)
        except OverflowError:
            # A number of the model's own, which is no token, in the place of an image: 3.4 ms.
            continue
    return repr([*token_ids]).encode()


def prompt_digests(req: Any) -> bytes:
    """The `prompt_digest` of a prompt; behind it, with images, 16 bytes that say which of them are where.

    The engine makes another list where there are images, with hashes of their features, by which a tree knows them. Of
    a prompt without, the tokenizer process has made the digest: here it would be part of a step of the scheduler.
    """
    unpadded, padded = req.origin_input_ids_unpadded, req.origin_input_ids
    length, made = getattr(req.sampling_params, "prompt_digest", (-1, b""))
    if padded is unpadded and length == len(padded):
        return made
    images = b"" if padded is unpadded else prompt_digest(padded, len(padded))
    return prompt_digest(unpadded, len(padded)) + images


def has_images(req: Any) -> bool:
    """Whether the engine has put hashes of features into the prompt."""
    return req.origin_input_ids is not req.origin_input_ids_unpadded


def say_images(req: Any, buffers: Any) -> None:
    """Write into the metadata of ``req`` whether prefill has computed it with other images than decode has."""
    sender = req.disagg_kv_sender
    if hasattr(sender, "other_images"):
        buffers.output_ids[req.metadata_buffer_index, OTHER_IMAGES] = sender.other_images


class ImageHooks(DecodeHooks):
    """Keeps out of the tree what prefill has computed with other images."""

    @classmethod
    def of(cls, queue: Any) -> ImageHooks | None:
        """Those of a queue of transfers; None where nothing is compared."""
        queue.images = cls(queue) if compares_prompts() else None
        found: ImageHooks | None = queue.images
        return found

    def __init__(self, transfers: Any):
        self._transfers = transfers
        # Prefills whose images were others than decode's the last time: of such a transfer the tree keeps nothing.
        self._others: set[Hashable] = set()

    def keeps(self, entry: QueueEntry) -> bool:
        """Nobody waits for a transfer of a prefill that had other images."""
        if entry.prefill not in self._others:
            return True
        # Who has just been admitted is still in the queue before.
        queued = *self._transfers.queue, *self._transfers.scheduler.disagg_decode_prealloc_queue.queue
        return not any(dr.entry is entry and has_images(dr.req) for dr in queued)

    def keep_same(self, decode_req: DecodeRequest, output_ids: torch.Tensor) -> None:
        """Have the tree take nothing of a request that has just arrived if prefill has computed it with other images.

        It is served: its client sees what it gets, and two hosts may compute features that differ in the last bit. But
        the tree would keep KV of prefill's images for all who come with decode's. Nor does anybody wait for the next
        such transfer. output_ids: int32 [buffers, 16].
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
