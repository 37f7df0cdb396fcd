"""The targets for ITL and TTFT.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import NamedTuple

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.cache_support import FLAG

from sglang_pd_radix.patching import loader

__all__ = ["ServerArgs", "TtftOption", "ttft_option"]

# Largest target, 11 days: step times in picoseconds must fit into 64 bits.
MOST_MS = 1e9
REFUSE = ",refuse"


class TtftOption(NamedTuple):
    """A TTFT target in milliseconds, and whether requests that cannot meet it are refused."""

    target_ms: float
    refuses: bool


def ttft_option(given: str | float) -> TtftOption:
    """Parses ``--disaggregation-decode-ttft-target``. Raises ValueError if it is not a number."""
    text = str(given)
    return TtftOption(float(text.removesuffix(REFUSE)), text.endswith(REFUSE))


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Adds the ITL and TTFT targets."""

    disaggregation_decode_itl_target: float | None = None
    # Milliseconds, optionally with the suffix ",refuse".
    disaggregation_decode_ttft_target: float | str | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--disaggregation-decode-itl-target",
            type=float,
            metavar="MS",
            help="Bound the mean ITL: decode with a radix cache admits a request only if its next steps are predicted "
            "to take at most MS milliseconds. One request always runs.",
        )
        parser.add_argument(
            "--disaggregation-decode-ttft-target",
            metavar="MS[,refuse]",
            help="Decode with a radix cache moves requests that can no longer have their first token within MS "
            "milliseconds to the end of the queue. Every fourth admission still is one of them. With ,refuse it "
            "answers 503 to a request on arrival if the queue already makes MS impossible.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks the targets."""
        for name in ("itl", "ttft"):
            option = f"--disaggregation-decode-{name}-target"
            given = getattr(self, f"disaggregation_decode_{name}_target")
            if given is None:
                continue
            if not self.disaggregation_decode_enable_radix_cache:
                raise ValueError(f"{option} needs {FLAG}. Give both to the decode worker.")
            try:
                target_ms, refuses = (given, False) if name == "itl" else ttft_option(given)
            except ValueError:
                target_ms, refuses = 0.0, False
            if not 0 < target_ms <= MOST_MS:
                more = ", or with ,refuse behind them" if name == "ttft" else ""
                said = given if isinstance(given, str) else f"{given:g}"
                raise ValueError(f"{option} is {said}: give milliseconds, above 0 and at most {MOST_MS:g}{more}.")
            if name == "ttft" and not refuses:
                self.disaggregation_decode_ttft_target = target_ms
            if refuses and "failure_reports" not in loader.extras():
                raise ValueError(f"{option} {given} needs the extra failure_reports, which notifies prefill.")
        super()._handle_pd_disaggregation()
