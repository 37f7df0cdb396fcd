"""The decode radix cache flag.

Upstream: 0.5.11, which has the flag under this name (sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG

from sglang_pd_radix.patching import loader
from sglang_pd_radix.supplied import cpu_host, mooncake_host

logger = logging.getLogger(__name__)

__all__ = ["ServerArgs"]

# Transfer backends whose messages carry a decode prefix.
DELTA_BACKENDS = ("nixl", "mooncake")
# Without the extra authentication a worker would ignore it and accept unsigned messages.
SECRET = "SGLANG_DISAGGREGATION_SECRET_FILE"


class _FlagAlias(argparse._StoreTrueAction):
    """Alias of the flag, with its own ``dest``, by which ``--config`` finds switches."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *given: object
    ) -> None:
        """Sets what the flag sets."""
        namespace.disaggregation_decode_enable_radix_cache = True


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the flag of the decode radix cache and its checks."""

    disaggregation_decode_enable_radix_cache: bool = False
    # Whether an aggregated server too keeps KV by extra_key and priority. Not an option.
    keyed = False

    def __post_init__(self) -> None:
        """First records whether the radix cache was turned off by the option."""
        self.radix_cache_is_unwanted = self.disable_radix_cache
        super().__post_init__()

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the flag, and its name in the incremental-transfer proposal as an alias."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            FLAG,
            action="store_true",
            help="Keep a radix cache on a PD decode worker, so that prefill sends only the KV "
            "decode does not hold.",
        )
        parser.add_argument(
            "--disaggregation-enable-decode-radix-cache",
            action=_FlagAlias,
            default=argparse.SUPPRESS,
            help=f"The same as {FLAG}.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Keeps the radix cache on, which the engine turns off on decode workers."""
        if not self.disaggregation_decode_enable_radix_cache:
            super()._handle_pd_disaggregation()
            return
        self._check_decode_radix_cache()
        level = engine.logger.level
        try:
            # Hides the engine's warning that decode has no radix cache.
            engine.logger.setLevel(logging.ERROR)
            super()._handle_pd_disaggregation()
        finally:
            engine.logger.setLevel(level)
        self.disable_radix_cache = False
        logger.info(
            "Decode worker keeps a radix cache: prefill is asked only for KV it does not hold."
        )

    def _check_decode_radix_cache(self) -> None:
        """Raise ValueError for the first option that is wrong or not verified with the flag."""
        if self.disaggregation_mode != "decode":
            raise ValueError(
                f"{FLAG} is for decode workers, but --disaggregation-mode is "
                f"{self.disaggregation_mode!r}. Give it to the decode worker only; prefill needs "
                "no flag."
            )
        if self.disaggregation_transfer_backend not in DELTA_BACKENDS:
            raise ValueError(
                f"{FLAG} needs a transfer backend with delta support "
                f"({', '.join(DELTA_BACKENDS)}), but --disaggregation-transfer-backend is "
                f"{self.disaggregation_transfer_backend!r}. Use one of these on prefill and "
                f"decode, or leave the flag out."
            )
        interval = self.disaggregation_decode_polling_interval
        for option, value, least in (
            ("--num-reserved-decode-tokens", self.num_reserved_decode_tokens, 0),
            ("--disaggregation-decode-polling-interval", interval, 1),
        ):
            if value < least:
                raise ValueError(f"{option} is {value}: give {least} or more with {FLAG}.")
        cache_support.check_not_turned_off(FLAG, self)
        cache_support.check(cache_support.DECODE, self)

    def check_server_args(self) -> None:
        """After all defaults: checks pages, secret, Mooncake, and that the cache is on."""
        if self.page_size < 1:
            raise ValueError(f"--page-size is {self.page_size}: give 1 or more.")
        super().check_server_args()
        if self.disaggregation_mode != "null":
            if (
                os.environ.get(SECRET, "").strip()
                and "authentication" not in loader.status()["extras"]
            ):
                raise ValueError(
                    f"{SECRET} is set, and messages would not be signed: the extra authentication "
                    f"is not loaded. Name it in {loader.EXTRAS}, or start without the secret."
                )
            if self.disaggregation_transfer_backend == "mooncake":
                mooncake_host.check(cpu_host.active())
        if self.disaggregation_decode_enable_radix_cache:
            cache_support.check_not_turned_off(FLAG, self)
