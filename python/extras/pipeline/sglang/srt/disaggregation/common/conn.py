"""A prefill of several pipeline stages, of which each writes its own layers.

Upstream: sgl-project/sglang#28229 (open).
"""

from __future__ import annotations

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.layer_pointers import pointers_of_stage

__all__ = ["CommonKVBootstrapServer", "CommonKVManager"]


class CommonKVManager(engine.CommonKVManager):
    """Knows which of decode's layers are its own."""

    def get_mha_kv_ptrs_with_pp(self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]):
        """Mends the engine's for a pipeline stage whose number of layers does not divide that of the model.

        It takes the rest for a draft model's, and writes V of every layer to the place of another's K or V.
        """
        if self.pp_size == 1 or len(dst_kv_ptrs) // 2 != self.num_layers:
            return super().get_mha_kv_ptrs_with_pp(src_kv_ptrs, dst_kv_ptrs)
        return pointers_of_stage(src_kv_ptrs, dst_kv_ptrs, self.kv_args.prefill_start_layer)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Says that its prefill understands a decode prefix, in whichever stages."""

    takes_stages = True
