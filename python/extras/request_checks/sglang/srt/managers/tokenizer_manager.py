"""Refuses requests that no worker can serve, on both workers of a pair, with status 400 and before they are sent.

Upstream: none is known for all of it; sgl-project/sglang#22175 and #28088 (merged) and #28794 (open) check one option
each.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_admission import RequestAdmission
from sglang.srt.managers.request_checks import check_labels, check_sampling, stop_tokens

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Tokenizer manager that checks each option of a request."""

    def generate_request(self, obj, request=None):
        """Marks requests that the engine makes from objects FastAPI has not checked: those for Vertex AI."""
        endpoint = (getattr(request, "scope", None) or {}).get("endpoint")
        if isinstance(obj, GenerateReqInput) and getattr(endpoint, "__name__", "") == "vertex_generate":
            obj.untyped = True
        return super().generate_request(obj, request)

    def _validate_rid_not_in_flight(self, obj) -> None:
        """Adds the checks of a request: here each prompt has its own options, and no state exists yet."""
        super()._validate_rid_not_in_flight(obj)
        if not isinstance(obj, GenerateReqInput):
            return
        if self.server_args.enable_lora and obj.lora_id is not None:
            if not obj.lora_path:
                # The scheduler does not have such an adapter.
                raise ValueError("lora_id cannot be set by a client: name the adapter in lora_path.")
            obj.lora_id = None
        if obj.custom_labels and self.enable_metrics:
            check_labels(obj.custom_labels, self.metrics_collector.labels)
        self._admission().check(obj)

    def _admission(self) -> RequestAdmission:
        return RequestAdmission(
            self.disaggregation_mode,
            self.server_args,
            self.model_config,
            self.mm_processor,
            self.tokenizer is not None,
            lambda: self.max_req_input_len,
            # From the extra failure_reports, if present.
            getattr(self, "_check_room", lambda room: None),
        )

    def _validate_one_request(self, obj, input_ids) -> None:
        """Adds the scheduler's limit, which it would check only after the handshake."""
        super()._validate_one_request(obj, input_ids)
        if isinstance(obj, GenerateReqInput) and input_ids is not None:
            self._admission().check_prompt(obj, input_ids)

    def _create_tokenized_object(self, obj, *args, **kwargs):
        """Adds checks of sampling parameters, and removes stop tokens outside the vocabulary.

        The engine would index the logits with them.
        """
        tokenized_obj = super()._create_tokenized_object(obj, *args, **kwargs)
        params = tokenized_obj.sampling_params
        if isinstance(obj, GenerateReqInput):
            deterministic = self.server_args.enable_deterministic_inference
            check_sampling(params, self.model_config.vocab_size, stream=obj.stream, deterministic=deterministic)
        params.stop_token_ids = stop_tokens(params.stop_token_ids, self.model_config.vocab_size)
        return tokenized_obj
