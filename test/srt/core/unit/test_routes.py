"""What the OpenAI endpoints hand on to a client of a decode worker."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.entrypoints.openai.utils import process_cached_tokens_details_from_ret


def test_openais_endpoints_hand_on_what_prefill_held_alone():
    """As docs/reference.md says of ``sglext.cached_tokens_details``."""
    details = {"device": 0, "host": 0, "decode_prefix": 960, "transferred": 40}
    asked = SimpleNamespace(return_cached_tokens_details=True)
    said = process_cached_tokens_details_from_ret({"meta_info": {"cached_tokens_details": details}}, asked)
    assert said.model_dump() == {"device": 0, "host": 0}
