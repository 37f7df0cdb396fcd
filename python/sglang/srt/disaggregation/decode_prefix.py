"""The decode prefix: what both workers must agree on when decode already holds the start of a prompt.

Backends bring the wire; the arithmetic and the checks are here, once.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_pd_radix.environment import switched_on

logger = logging.getLogger(__name__)

__all__ = [
    "DECODE_PREFIX_ROUTE",
    "DECODE_PREFIX_VERSION",
    "check_decode_prefix",
    "compares_prompts",
    "count_runs",
    "has_images",
    "pages",
    "prompt_digest",
    "prompt_digests",
    "say_images",
]

# Where a prefill's bootstrap server says that it understands a decode prefix, and in which version.
DECODE_PREFIX_ROUTE = "/decode_prefix"
DECODE_PREFIX_VERSION = 1
COMPARE_PROMPTS = "SGLANG_DISAGGREGATION_COMPARE_PROMPTS"
# The bytes of a `prompt_digest`, and of the length of a prompt, which is said in the place of one.
DIGEST_SIZE = 16
LENGTH_SIZE = 8
# Of a request's row of `MetadataBuffers.output_ids`, a number that the engine sends and nobody reads: 1 if prefill has
# computed it with other images than decode's.
OTHER_IMAGES = 12


def pages(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens occupy, the last one possibly in part."""
    return -(-num_tokens // page_size)


def count_runs(sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> int:
    """Runs of pages that are contiguous on both sides; a backend sends one descriptor for each, layer, and K or V."""
    # Of a decode worker without the flag, prefill takes what fits; it has not been checked here.
    length = min(len(sources), len(targets))
    if length == 0:
        return 0
    sources, targets = sources[:length], targets[:length]
    return 1 + int(np.count_nonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)))


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


def check_decode_prefix(prefix_len: int, num_delta_pages: int | None, prompt_len: int, page_size: int) -> None:
    """Check a decode prefix against the prompt it is for (invariant I4).

    prefix_len: tokens that decode says it holds. num_delta_pages: pages it offers for the rest, None from a rank that
    receives no KV. prompt_len: tokens of the prompt. Raises ValueError with the reason.
    """
    if prefix_len < 0:
        raise ValueError(f"decode_prefix_len {prefix_len} is negative")
    if prefix_len % page_size:
        raise ValueError(f"decode_prefix_len {prefix_len} is not a multiple of the page size {page_size}")
    if prefix_len > prompt_len:
        raise ValueError(f"decode_prefix_len {prefix_len} is beyond the prompt of {prompt_len} tokens")
    expected = pages(prompt_len - prefix_len, page_size)
    if num_delta_pages is not None and num_delta_pages != expected:
        raise ValueError(
            f"decode_prefix_len {prefix_len} leaves {expected} pages of a prompt of {prompt_len} tokens, "
            f"but decode allocated {num_delta_pages}"
        )
