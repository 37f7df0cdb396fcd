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

# Transfer backends whose wire carries a decode prefix.
DELTA_BACKENDS = ("nixl", "mooncake")
# Without what heeds it a worker would run open to everybody who reaches its ports.
SECRET = "SGLANG_DISAGGREGATION_SECRET_FILE"


class _SecondName(argparse._StoreTrueAction):
    """Another name of the flag, with a ``dest`` of its own: the engine knows switches of a ``--config`` by that."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *given: object) -> None:
        """Sets what the flag sets."""
        namespace.disaggregation_decode_enable_radix_cache = True


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the flags of the decode radix cache, and what they are verified for."""

    disaggregation_decode_enable_radix_cache: bool = False
    # Whether a server by itself keeps KV under a request's key too, by its priority. No option.
    keyed = False

    def __post_init__(self) -> None:
        """Notes first whether the radix cache is off because that was asked for."""
        self.radix_cache_is_unwanted = self.disable_radix_cache
        super().__post_init__()

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the flags, one also by its name in the incremental-transfer proposal, to the engine's options."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            FLAG,
            action="store_true",
            help="Keep a radix cache on a PD decode worker, so that prefill sends only the KV decode does not hold.",
        )
        parser.add_argument(
            "--disaggregation-enable-decode-radix-cache",
            action=_SecondName,
            default=argparse.SUPPRESS,
            help=f"The same as {FLAG}.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Wraps the engine's handling, which turns the radix cache of every decode worker off, to keep it on."""
        if not self.disaggregation_decode_enable_radix_cache:
            super()._handle_pd_disaggregation()
            return
        self._check_decode_radix_cache()
        level = engine.logger.level
        try:
            # The engine's warning that decode has no radix cache would be wrong here.
            engine.logger.setLevel(logging.ERROR)
            super()._handle_pd_disaggregation()
        finally:
            engine.logger.setLevel(level)
        self.disable_radix_cache = False
        logger.info("Decode worker keeps a radix cache: prefill is asked only for KV it does not hold.")

    def _check_decode_radix_cache(self) -> None:
        """Raise ValueError for the first combination with the flag that is wrong or not verified."""
        if self.disaggregation_mode != "decode":
            raise ValueError(
                f"{FLAG} is for decode workers, but --disaggregation-mode is {self.disaggregation_mode!r}. "
                "Give it to the decode worker only; prefill needs no flag."
            )
        if self.disaggregation_transfer_backend not in DELTA_BACKENDS:
            raise ValueError(
                f"{FLAG} needs a transfer backend with delta support ({', '.join(DELTA_BACKENDS)}), "
                f"but --disaggregation-transfer-backend is {self.disaggregation_transfer_backend!r}. "
                f"Use one of these on prefill and decode, or leave the flag out."
            )
        for option, value, least in (
            ("--num-reserved-decode-tokens", self.num_reserved_decode_tokens, 0),
            ("--disaggregation-decode-polling-interval", self.disaggregation_decode_polling_interval, 1),
        ):
            if value < least:
                raise ValueError(f"{option} is {value}: give {least} or more with {FLAG}.")
        cache_support.check_not_turned_off(FLAG, self)
        cache_support.check(cache_support.DECODE, self)

    def check_server_args(self) -> None:
        """Checks pages and Mooncake, with all defaults settled.

        Checks that the cache is still on.
        """
        if self.page_size < 1:
            raise ValueError(f"--page-size is {self.page_size}: give 1 or more.")
        super().check_server_args()
        if self.disaggregation_mode != "null":
            if os.environ.get(SECRET, "").strip() and "authentication" not in loader.status()["extras"]:
                raise ValueError(
                    f"{SECRET} is set, and messages would not be signed: the extra authentication is not loaded. "
                    f"Name it in {loader.EXTRAS}, or start without the secret."
                )
            if self.disaggregation_transfer_backend == "mooncake":
                mooncake_host.check(cpu_host.active())
        if self.disaggregation_decode_enable_radix_cache:
            cache_support.check_not_turned_off(FLAG, self)
