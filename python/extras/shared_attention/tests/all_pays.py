"""Reading together what is shared, however short it is: tests are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.shared_prefix import option, triton_shared


@contextmanager
def all_sharing_pays() -> Iterator[None]:
    """Within, the triton form is on, and reads together all that is shared."""
    with (
        patch.object(triton_backend, "get_attention_tp_size", lambda: 1),
        patch.object(triton_shared, "CALL", 0.0),
        patch.object(triton_shared, "PIECE", 0.0),
        patch.object(triton_shared, "PARTIAL", 0.0),
        patch.dict("os.environ", {option.OPTION: "1"}),
    ):
        yield
