"""The decode prefix: what both workers agree on when decode already holds the start of a prompt.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Route of prefill's bootstrap server that reports which version of the decode prefix it supports.
DECODE_PREFIX_ROUTE = "/decode_prefix"
DECODE_PREFIX_VERSION = 1
# Bytes of a prompt's length on the wire.
LENGTH_SIZE = 8


def pages(num_tokens: int, page_size: int) -> int:
    """Pages of ``num_tokens`` tokens; the last one may be partial."""
    return -(-num_tokens // page_size)


def count_runs(sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> int:
    """Runs of pages contiguous on both sides: one descriptor each per layer, and K or V."""
    # A decode worker without the flag is not checked; prefill uses the common length.
    length = min(len(sources), len(targets))
    if length == 0:
        return 0
    sources, targets = sources[:length], targets[:length]
    return 1 + int(np.count_nonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)))


def check_decode_prefix(
    prefix_len: int, num_delta_pages: int | None, prompt_len: int, page_size: int
) -> None:
    """Check a decode prefix against its prompt (invariant I4). Raises ValueError with the reason.

    prefix_len: tokens that decode holds. num_delta_pages: pages for the rest, None from a rank that
    receives no KV. prompt_len: tokens of the prompt.
    """
    if prefix_len < 0:
        raise ValueError(f"decode_prefix_len {prefix_len} is negative")
    if prefix_len % page_size:
        raise ValueError(
            f"decode_prefix_len {prefix_len} is not a multiple of the page size {page_size}"
        )
    if prefix_len > prompt_len:
        raise ValueError(
            f"decode_prefix_len {prefix_len} is beyond the prompt of {prompt_len} tokens"
        )
    expected = pages(prompt_len - prefix_len, page_size)
    if num_delta_pages is not None and num_delta_pages != expected:
        raise ValueError(
            f"decode_prefix_len {prefix_len} leaves {expected} pages of a prompt of {prompt_len} "
            f"tokens, but decode allocated {num_delta_pages}"
        )
