"""The option for local prefill.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.disaggregation.local_support import LOCAL, OPTION, may_compute_prompts
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG

__all__ = ["ServerArgs"]


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the option for local prefill."""

    disaggregation_decode_local_prefill: str | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the option."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--disaggregation-decode-local-prefill",
            metavar="off|auto|N",
            help="Decode with a radix cache computes a short uncached part of a prompt itself instead of asking "
            "prefill. auto, the default: up to 128 tokens, within a budget of decode time, and not if prefill uses the "
            "same GPU. N: always, up to N tokens. off: never.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks that the option comes with the flag."""
        given, has_flag = self.disaggregation_decode_local_prefill, self.disaggregation_decode_enable_radix_cache
        if given not in (None, "off", "false") and not has_flag:
            raise ValueError(f"{OPTION} needs {FLAG}. Give both to the decode worker.")
        super()._handle_pd_disaggregation()

    def _check_decode_radix_cache(self) -> None:
        """Checks the option, and sets its default."""
        # Not at the top: their imports import this module.
        from sglang.srt.disaggregation.local_policy import Policy

        given = self.disaggregation_decode_local_prefill
        if Policy.of("auto" if given is None else given) is None:
            given = self.disaggregation_decode_local_prefill = "off"
        super()._check_decode_radix_cache()
        cache_support.check(LOCAL, self)
        if given is None:
            self.disaggregation_decode_local_prefill = "auto" if may_compute_prompts(self) else "off"
