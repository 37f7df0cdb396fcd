"""Prefill with several pipeline stages, each of which writes its own layers.

Upstream: sgl-project/sglang#28229 (open).
"""

from __future__ import annotations

from functools import cached_property

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.layer_pointers import pointers_of_stage

__all__ = ["CommonKVBootstrapServer", "CommonKVManager"]


class CommonKVManager(engine.CommonKVManager):
    """Finds the addresses of a stage's layers on decode."""

    @cached_property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.server_args.get_model_config().num_hidden_layers

    def get_mha_kv_ptrs_with_pp(self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]):
        """Fixes the engine's for a pipeline stage whose number of layers does not divide the model's.

        The engine takes the remainder for a draft model's layers, and writes V to addresses of other K or V.
        """
        if self.pp_size == 1 or len(dst_kv_ptrs) // 2 != self.num_layers:
            return super().get_mha_kv_ptrs_with_pp(src_kv_ptrs, dst_kv_ptrs)
        return pointers_of_stage(src_kv_ptrs, dst_kv_ptrs, self.kv_args.prefill_start_layer)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Reports support for a decode prefix with any number of stages."""

    takes_stages = True
