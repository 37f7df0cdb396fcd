"""Pipeline stages that hear for whom no token was left, and whose logit processor has failed.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler_pp_mixin as engine

__all__ = ["SchedulerPPMixin"]

# What `Sampler.forward` adds to its output.
FAILED, HOPELESS = "failed_processors", "hopeless"


class SchedulerPPMixin(engine.SchedulerPPMixin):
    """Has the last stage, which samples, tell the others."""

    def _pp_prepare_tensor_dict(self, result, batch):
        """Adds whose logit processor has failed, and for whom there was no token, which only the last stage sees."""
        tensors = super()._pp_prepare_tensor_dict(result, batch)
        failed, hopeless = (getattr(result.logits_output, name, None) for name in (FAILED, HOPELESS))
        if failed:
            tensors[FAILED] = failed
        if hopeless is not None:
            # Not every backend of process groups sends booleans.
            tensors[HOPELESS] = hopeless.to(result.next_token_ids.device, non_blocking=True).int()
        return tensors

    def _pp_prep_batch_result(self, batch, mb_metadata, pp_outputs):
        """Adds the same to the result from which every stage goes on."""
        result = super()._pp_prep_batch_result(batch, mb_metadata, pp_outputs)
        for name in (FAILED, HOPELESS):
            setattr(result, name, pp_outputs.tensors.get(name))
        return result
