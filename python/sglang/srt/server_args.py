"""The decode radix cache flag.

Upstream: the flag has this name in later releases; not in 0.5.10.post1.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging

from sglang.srt import server_args as engine
from sglang.srt.environ import envs

from sglang_pd_radix.supplied import cpu_host, mooncake_host

logger = logging.getLogger(__name__)

__all__ = ["ServerArgs"]

FLAG = "--disaggregation-decode-enable-radix-cache"
# How often a request may be overtaken before it goes first.
DEFAULT_MAX_OVERTAKEN = 32
# Speculative algorithms whose drafts' KV the tree is known to keep right.
SPECULATION = ("EAGLE",)
# Transfer backends whose wire carries a decode prefix.
DELTA_BACKENDS = ("nixl", "mooncake")


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the decode radix cache flag and the combinations it is verified for."""

    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_admission: str = "prefix"
    disaggregation_decode_max_overtaken: int = DEFAULT_MAX_OVERTAKEN

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the flag, and its name in the incremental-transfer proposal, to the engine's options."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            FLAG,
            "--disaggregation-enable-decode-radix-cache",
            dest="disaggregation_decode_enable_radix_cache",
            action="store_true",
            help="Keep a radix cache on a PD decode worker, so that prefill sends only the KV decode does not hold.",
        )

        parser.add_argument(
            "--disaggregation-decode-admission",
            choices=("prefix", "fcfs"),
            default="prefix",
            help="Order in which a decode worker with a radix cache admits requests. prefix: those whose prompt is "
            "mostly in the tree go first, and one that extends a prompt in transfer waits for it instead of having it "
            "sent again. fcfs: first come, first served, and nobody waits for others.",
        )
        parser.add_argument(
            "--disaggregation-decode-max-overtaken",
            type=int,
            default=DEFAULT_MAX_OVERTAKEN,
            metavar="N",
            help="With --disaggregation-decode-admission prefix: requests that may be admitted before one that came "
            "earlier; then it goes first. 0: none.",
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
        if self.speculative_algorithm is not None and self.grammar_backend != "none":
            self.grammar_backend = "none"
            logger.warning(
                "Grammars (json_schema, regex, ebnf, structural_tag) are not verified together with %s and speculative "
                "decoding: requests with one are refused.",
                FLAG,
            )
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
        unverified = {
            "--disable-radix-cache": self.disable_radix_cache,
            "--enable-hisparse": self.enable_hisparse,
            "--disaggregation-decode-enable-offload-kvcache": self.disaggregation_decode_enable_offload_kvcache,
            "--enable-hierarchical-cache": self.enable_hierarchical_cache,
            "--enable-lmcache": self.enable_lmcache,
            "--enable-streaming-session": self.enable_streaming_session,
            "--enable-lora": bool(self.enable_lora or self.lora_paths),
            "--enable-dp-attention": self.enable_dp_attention,
            **self._unverified_speculation(),
            "--pipeline-parallel-size above 1": self.pp_size > 1,
            "--attention-context-parallel-size above 1": self.attn_cp_size > 1,
            "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get(),
            "SGLANG_DISAGG_STAGING_BUFFER, which is Mooncake's": (
                envs.SGLANG_DISAGG_STAGING_BUFFER.get() and self.disaggregation_transfer_backend != "mooncake"
            ),
        }
        if self.disaggregation_decode_max_overtaken < 0:
            raise ValueError(
                f"--disaggregation-decode-max-overtaken is {self.disaggregation_decode_max_overtaken}: give 0 or more."
            )
        # Not at the top: the tree needs the engine's modules, which need this one.
        from sglang.srt.mem_cache.decode_radix_cache import watermark_part

        watermark_part()
        for name, used in unverified.items():
            if used:
                raise ValueError(f"{FLAG} is not verified together with {name}. Leave one of the two out.")

    def _unverified_speculation(self) -> dict[str, bool]:
        """Which options of speculative decoding, or beside it, are not verified with the flag."""
        name = self.speculative_algorithm
        if name is None:
            return {}
        own_draft = self.speculative_draft_model_path not in (None, self.model_path)
        return {
            f"--speculative-algorithm {name} ({', '.join(SPECULATION)} is)": name not in SPECULATION,
            "--speculative-eagle-topk above 1": (self.speculative_eagle_topk or 1) > 1,
            "a draft that is part of the model (MTP)": self.enable_multi_layer_eagle or not own_draft,
            f"--speculative-algorithm {name} and --tensor-parallel-size above 1": self.tp_size > 1,
            f"--speculative-algorithm {name} and --enable-custom-logit-processor": self.enable_custom_logit_processor,
        }

    def check_server_args(self) -> None:
        """Adds checks when all defaults are settled: of pages, the secret, Mooncake, and that the cache is still on."""
        if self.page_size < 1:
            raise ValueError(f"--page-size is {self.page_size}: give 1 or more.")
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.disaggregation.common.authentication import secret

            secret()
            if self.disaggregation_transfer_backend == "mooncake":
                mooncake_host.check(cpu_host.active())
        if self.disaggregation_decode_enable_radix_cache and self.disable_radix_cache:
            raise ValueError(
                f"{FLAG} needs the radix cache, but this model or option set disables it "
                "(--disable-radix-cache was set by the engine). Start this decode worker without the flag."
            )
