"""Pipeline stages receive failures of sampling from the last stage.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler_pp_mixin as engine

__all__ = ["SchedulerPPMixin"]

# Fields that `Sampler.forward` adds to its output.
FAILED, HOPELESS = "failed_processors", "hopeless"


class SchedulerPPMixin(engine.SchedulerPPMixin):
    """The last stage, which samples, sends the failures to the others."""

    def _pp_prepare_tensor_dict(self, result, batch):
        """Adds failed logit processors and requests without a possible token."""
        tensors = super()._pp_prepare_tensor_dict(result, batch)
        failed, hopeless = (getattr(result.logits_output, name, None) for name in (FAILED, HOPELESS))
        if failed:
            tensors[FAILED] = failed
        if hopeless is not None:
            # Some process group backends do not send booleans.
            tensors[HOPELESS] = hopeless.to(result.next_token_ids.device, non_blocking=True).int()
        return tensors

    def _pp_prep_batch_result(self, batch, mb_metadata, pp_outputs):
        """Adds the failures to the result on every stage."""
        result = super()._pp_prep_batch_result(batch, mb_metadata, pp_outputs)
        for name in (FAILED, HOPELESS):
            setattr(result, name, pp_outputs.tensors.get(name))
        return result
