"""What a storage below host memory is told: options, names of pages and folders; and the engine's routes for it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.host_tier import storage_scheduler
from sglang.srt.mem_cache.host_tier.storage import add_storage
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from sglang.srt.mem_cache.host_tier.storage_keys import first_hash, model_folder, page_names, rank_folder, weights_id
from sglang.srt.mem_cache.host_tier.storage_options import options_of, read_options
from sglang.srt.mem_cache.pegaflow.pages import model_namespace
from sglang.srt.server_args import ServerArgs
from storage_world import StorageWorld
from test_traps import tokens


def options(path: Any, **given: Any) -> Any:
    args = {
        "model_path": str(path),
        "revision": None,
        "download_dir": None,
        "load_format": "auto",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "page_size": 16,
        "hicache_mem_layout": "layer_first",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "speculative_draft_model_quantization": None,
        "speculative_draft_load_format": None,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": "best_effort",
        "tp_size": 1,
        "pegaflow_namespace": "",
    }
    return SimpleNamespace(**{**args, **given})


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    os.utime(path / "model.safetensors", (1, 1))
    return path


# ---- names ----


def test_pages_are_named_by_all_that_comes_before():
    first = page_names(tokens(1, 16), 4, first_hash(None))
    assert len(set(first)) == 4 and page_names(tokens(1, 18), 4, first_hash(None)) == first
    assert page_names(tokens(1, 16)[8:], 4, first[1]) == first[2:]
    other = page_names(tokens(1, 8) + tokens(50, 8), 4, first_hash(None))
    assert other[:2] == first[:2] and not set(other[2:]) & set(first)
    for key in ("", "a", "b", "\ud800"):
        assert not set(page_names(tokens(1, 16), 4, first_hash(key))) & set(first)
    pairs = list(zip(tokens(1, 16), tokens(2, 16), strict=True))
    assert len(page_names(pairs, 4, first_hash(None))) == 4
    assert page_names(pairs, 4, first_hash(None)) != page_names(tokens(1, 16), 4, first_hash(None))


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"page_size": 32},
        {"hicache_mem_layout": "page_first"},
        {"quantization": "fp8"},
        {"load_format": "dummy", "random_seed": 1},
    ],
)
def test_what_kv_depends_on_is_in_the_folder(model, given):
    name = model_folder(options(model), None)
    assert name == model_folder(options(model), None) and name.startswith("model-")
    assert model_folder(options(model, **given), None) != name


def test_other_weights_have_another_folder(model, tmp_path):
    name = model_folder(options(model), None)
    os.utime(model / "model.safetensors", (2, 2))
    assert model_folder(options(model), None) != name
    # What the operator says of them counts.
    named = model_folder(options(model), "llama-1")
    os.utime(model / "model.safetensors", (3, 3))
    assert model_folder(options(model), "llama-1") == named != model_folder(options(model), "llama-2")
    with pytest.raises(ValueError, match="--hicache-storage-backend cannot tell which weights .*: download"):
        weights_id(str(tmp_path / "nothing"), None)


@pytest.fixture
def experts(tmp_path):
    """Files of a model's experts for KTransformers."""
    path = tmp_path / "experts"
    path.mkdir()
    (path / "experts.safetensors").write_bytes(b"weights")
    os.utime(path / "experts.safetensors", (1, 1))
    return path


@pytest.mark.parametrize(
    "given",
    [
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/a"}'},
        {"custom_weight_loader": ["m.f"]},
        {"modelopt_checkpoint_restore_path": "/r"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"rl_quant_profile": "/p"},
        {"kt_weight_path": "{experts}"},
    ],
)
def test_options_that_change_weights_are_in_the_folder_and_in_a_namespace_of_pegaflow(model, experts, given):
    given = {name: str(experts) if value == "{experts}" else value for name, value in given.items()}
    for named in (lambda args: model_folder(args, None), model_namespace):
        assert named(options(model, **given)) != named(options(model))


def test_of_experts_apart_from_the_model_files_and_options_count(model, experts):
    kt = {"kt_weight_path": str(experts), "kt_method": "AMXINT4", "kt_num_gpu_experts": 0}
    given = [kt, *({**kt, name: value} for name, value in (("kt_method", "AMXINT8"), ("kt_num_gpu_experts", 1)))]
    given.append({**kt, "kt_max_deferred_experts_per_token": 1})
    for named in (lambda args: model_folder(args, None), model_namespace):
        names = [named(options(model, **one)) for one in given]
        os.utime(experts / "experts.safetensors", (2, 2))
        names.append(named(options(model, **kt)))
        assert len(set(names)) == len(names)
        os.utime(experts / "experts.safetensors", (1, 1))
    # Without a path the engine looks at none of them; and a name is of these weights too.
    assert model_namespace(options(model, kt_num_gpu_experts=1)) == model_namespace(options(model))
    named = model_folder(options(model, **kt), "name")
    os.utime(experts / "experts.safetensors", (2, 2))
    assert model_folder(options(model, **kt), "name") == named != model_folder(options(model), "name")


def test_what_is_not_set_changes_no_name_of_pegaflow(model):
    """What a server has of an ordinary engine is found by one that has these options."""
    unset = {"model_loader_extra_config": "{}", "custom_weight_loader": [], "modelopt_quant": None, "kt_method": None}
    assert model_namespace(options(model, **unset, quantize_and_serve=False)) == model_namespace(options(model))
    # Later parts of names, in storages too. The engine chooses "static" by itself.
    later = {"forward_hooks": None, "rl_on_policy_target": None, "decrypted_config_file": " "}
    later |= {"flashinfer_mxfp4_moe_precision": "default", "ep_dispatch_algorithm": "static"}
    for named in (lambda args: model_folder(args, None), model_namespace):
        assert named(options(model, **later)) == named(options(model))


def test_a_config_in_the_place_of_the_models_counts_by_its_content(model, tmp_path):
    """The engine reads the whole config from it, rope included; and the draft's."""
    files = [tmp_path / "a.json", tmp_path / "b.json", model / "inside.json"]
    for file, base in zip(files, (1, 2, 1), strict=True):
        file.write_text(f'{{"rope_theta": {base}}}')
    for named in (lambda args: model_folder(args, None), lambda args: model_folder(args, "name"), model_namespace):
        # A path that is not absolute is one in the model's folder.
        given = [named(options(model, decrypted_config_file=path)) for path in (*map(str, files), " inside.json ")]
        assert len({*given, named(options(model))}) == 3 and given[0] == given[2] == given[3]
        with pytest.raises(ValueError, match=r"--decrypted-config-file .*no\.json cannot be read"):
            named(options(model, decrypted_config_file="no.json"))
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(model)}
    drafts = [{}, {"decrypted_draft_config_file": str(files[0])}, {"decrypted_draft_config_file": str(files[1])}]
    assert len({model_folder(options(model, **eagle, **one), None) for one in drafts}) == 3
    # Without a draft the engine does not read it.
    assert model_folder(options(model, **drafts[1]), None) == model_folder(options(model), None)


#: Options of which the KV of the same tokens may depend, and a value; all others, as the engine has them: see below.
CHANGE_KV = {
    "dtype": "float16",
    "json_model_override_args": '{"rope_theta": 1}',
    "kv_cache_dtype": "fp8_e4m3",
    "load_format": "gguf",
    "model_impl": "transformers",
    "quantization": "fp8",
    "quantization_param_path": "/p",
    "torchao_config": "int8wo",
    "custom_weight_loader": ["m.f"],
    "model_loader_extra_config": '{"pattern": "a"}',
    "modelopt_checkpoint_restore_path": "/r",
    "modelopt_quant": "fp8",
    "quantize_and_serve": True,
    "rl_quant_profile": "/p",
    "page_size": 32,
    "forward_hooks": [{"name": "steer"}],
    "rl_on_policy_target": "fsdp",
    "enable_precise_embedding_interpolation": True,
    "flashinfer_mxfp4_moe_precision": "bf16",
    "ep_dispatch_algorithm": "fake",
    "fp8_gemm_runner_backend": "triton",
    "moe_runner_backend": "deep_gemm",
    "moe_a2a_backend": "deepep",
}
#: Those that count too, in a way of their own, which tests here or of configs go through; or the layout of a page (TP).
IN_A_WAY_OF_THEIR_OWN = """
    model_path revision download_dir random_seed tp_size hicache_mem_layout speculative_algorithm
    speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
    speculative_draft_model_quantization kt_weight_path kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token
    decrypted_config_file decrypted_draft_config_file mamba_ssm_dtype pegaflow_namespace
    speculative_moe_runner_backend speculative_moe_a2a_backend
"""
#: And those that change no KV of the same tokens but by rounding (kernels, parallelism, batches); by an adapter or an
#: image, which have an `extra_key` or tokens of their own; or of a model whose tree or pool is refused with both.
CHANGE_NONE = """
    tokenizer_path tokenizer_mode tokenizer_worker_num skip_tokenizer_init trust_remote_code context_length is_embedding
    enable_multimodal host port fastapi_root_path grpc_mode skip_server_warmup warmups nccl_port
    checkpoint_engine_wait_weights_before_ready ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
    enable_ssl_refresh enable_fp32_lm_head modelopt_checkpoint_save_path modelopt_export_path mem_fraction_static
    max_running_requests max_queued_requests max_total_tokens chunked_prefill_size enable_dynamic_chunking
    max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
    default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold schedule_conservativeness swa_full_tokens_ratio disable_hybrid_swa_memory
    radix_eviction_policy enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets device pp_size pp_max_micro_batch_size pp_async_batch_depth stream_interval
    stream_response_default_include_usage incremental_streaming_output enable_streaming_session
    constrained_json_whitespace_pattern constrained_json_disable_any_whitespace watchdog_timeout soft_watchdog_timeout
    dist_timeout model_checksum base_gpu_id gpu_id_step sleep_on_idle use_ray custom_sigquit_handler
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
    enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    collect_tokens_histogram prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs
    decode_log_interval enable_request_time_stats_logging kv_events_config enable_trace otlp_traces_endpoint
    export_metrics_to_file export_metrics_to_file_dir api_key admin_api_key served_model_name weight_version
    chat_template hf_chat_template_name completion_template file_storage_path enable_cache_report reasoning_parser
    tool_call_parser tool_server sampling_defaults dp_size load_balance_method attn_cp_size moe_dp_size dist_init_addr
    nnodes node_rank preferred_sampling_params enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules
    lora_paths max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
    experts_shared_outer_loras attention_backend decode_attention_backend prefill_attention_backend sampling_backend
    grammar_backend mm_attention_backend fp4_gemm_runner_backend nsa_prefill_backend
    nsa_decode_backend disable_flashinfer_autotune mamba_backend speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_token_map speculative_attention_mode speculative_draft_attention_backend
    speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
    speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity enable_multi_layer_eagle
    ep_size enable_flashinfer_allreduce_fusion
    enforce_disable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion deepep_mode ep_num_redundant_experts
    init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size enable_expert_distribution_metrics deepep_config moe_dense_tp_size
    elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device max_mamba_cache_size mamba_full_memory_ratio
    mamba_scheduler_strategy mamba_track_interval linear_attn_backend linear_attn_decode_backend
    linear_attn_prefill_backend enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy
    hicache_io_backend hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    enable_hisparse hisparse_config enable_lmcache kt_cpuinfer kt_threadpool_count dllm_algorithm dllm_algorithm_config
    enable_double_sparsity ds_channel_config_path ds_heavy_channel_num ds_heavy_token_num ds_heavy_channel_type
    ds_sparse_decode_threshold cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
    multi_item_scoring_delimiter disable_radix_cache cuda_graph_max_bs cuda_graph_bs disable_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc enable_layerwise_nvtx_marker
    enable_nccl_nvls enable_symm_mem disable_flashinfer_cutlass_moe_fp4_allgather enable_tokenizer_batch_encode
    disable_tokenizer_batch_decode disable_outlines_disk_cache disable_custom_all_reduce enable_mscclpp
    enable_torch_symm_mem pre_warm_nccl disable_overlap_schedule enable_mixed_chunk enable_dp_attention
    enable_dp_lm_head enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
    enable_torch_compile disable_piecewise_cuda_graph enforce_piecewise_cuda_graph enable_torch_compile_debug_mode
    torch_compile_max_bs piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens piecewise_cuda_graph_compiler
    enable_nan_detection enable_p2p_check triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
    triton_attention_split_tile_size num_continuous_decode_steps delete_ckpt_after_loading enable_memory_saver
    enable_weights_cpu_backup enable_draft_weights_cpu_backup allow_auto_truncate enable_custom_logit_processor
    flashinfer_mla_disable_ragged disable_shared_experts_fusion disable_chunked_prefix_cache
    disable_fast_image_processor keep_mm_feature_on_device enable_return_hidden_states enable_return_routed_experts
    scheduler_recv_interval numa_node enable_deterministic_inference enable_attn_tp_input_scattered gc_threshold
    enable_nsa_prefill_context_parallel nsa_prefill_cp_mode enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce
    enable_prefill_context_parallel prefill_cp_mode enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout debug_tensor_dump_output_folder debug_tensor_dump_layers
    debug_tensor_dump_input_file debug_tensor_dump_inject disaggregation_mode disaggregation_transfer_backend
    disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_offload_kvcache
    num_reserved_decode_tokens disaggregation_decode_polling_interval encoder_only language_only
    encoder_transfer_backend encoder_urls enable_adaptive_dispatch_to_encoder weight_loader_disable_mmap
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
    remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
    enable_pdmux pdmux_config_path sm_group_num enable_broadcast_mm_inputs_process enable_prefix_mm_cache
    mm_enable_dp_encoder mm_process_config limit_mm_data_per_request enable_mm_global_cache
    disaggregation_decode_enable_radix_cache disaggregation_decode_admission disaggregation_decode_max_overtaken
    disaggregation_decode_verify_pages disaggregation_decode_local_prefill
    disaggregation_decode_itl_target disaggregation_decode_ttft_target disaggregation_prefill_read_decode
    enable_pegaflow pegaflow_endpoint pegaflow_allow_non_loopback
"""


def test_of_each_option_it_is_known_whether_kv_depends_on_it(model):
    """A new option of the engine stops here: look whether two workers that differ in it may share pages."""
    own, none = set(IN_A_WAY_OF_THEIR_OWN.split()), set(CHANGE_NONE.split())
    assert not own & none and not set(CHANGE_KV) & (own | none)
    assert {*CHANGE_KV, *own, *none} == {field.name for field in dataclasses.fields(ServerArgs)}
    for named in (lambda args: model_folder(args, None), model_namespace):
        for name, value in CHANGE_KV.items():
            assert named(options(model, **{name: value})) != named(options(model)), name


def test_how_weights_are_loaded_is_in_no_name_of_pegaflow(model):
    """With more threads they are the same."""

    def named(given: str) -> str:
        return model_namespace(options(model, model_loader_extra_config=given))

    threads = '{"enable_multithread_load": true, "num_threads": 8'
    assert named(threads + "}") == named(" { } ") == named("") == model_namespace(options(model))
    assert named(threads + ', "pattern": "a"}') == named('{"pattern":"a"}')
    assert len({named(text) for text in ("{}", '{"pattern":"a"}', '{"pattern":"b"}')}) == 3
    # What the loader refuses, or reads in another way, counts as it is.
    assert len({named(text) for text in ("{}", "{", "[]", "null", "[1]")}) == 5


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--model-path", {"model_path": "no/such"}),
        ("--kt-weight-path", {"kt_weight_path": "no/such"}),
        ("--speculative-draft-model-path", {"speculative_algorithm": "S", "speculative_draft_model_path": "no/such"}),
    ],
)
def test_where_files_are_missing_the_option_that_names_them_is_told(model, option, given):
    with pytest.raises(ValueError, match=f"'no/such' has, .* or give a directory as {option}\\."):
        model_folder(options(model, **given), None)
    if "speculative_algorithm" not in given:
        with pytest.raises(ValueError, match=f"'no/such' has, .* or give a directory as {option}\\."):
            model_namespace(options(model, **given))


def test_a_draft_has_a_part_in_the_name(model, tmp_path):
    """Its KV is in the same files."""
    drafts = [tmp_path / name for name in ("draft", "other")]
    for draft in drafts:
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(draft.name.encode())
        (draft / "config.json").write_text(f'{{"is": "{draft.name}"}}')
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(drafts[0])}
    given = [
        {},
        eagle,
        {**eagle, "speculative_algorithm": "EAGLE3"},
        {**eagle, "speculative_draft_model_path": str(drafts[1])},
        {**eagle, "speculative_draft_model_quantization": "fp8"},
    ]
    for weights in (None, "name"):
        assert len({model_folder(options(model, **one), weights) for one in given}) == len(given)
    # A name is of both.
    named = model_folder(options(model, **eagle), "name")
    os.utime(drafts[0] / "model.safetensors", (7, 7))
    os.utime(model / "model.safetensors", (7, 7))
    assert model_folder(options(model, **eagle), "name") == named


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"load_format": "remote"}, "--load-format remote"),
        (
            # The engine has put it in the place of the model's.
            {"load_format": "auto", "speculative_algorithm": "EAGLE", "speculative_draft_load_format": "auto"},
            "--speculative-draft-load-format auto",
        ),
    ],
)
def test_weights_that_are_not_known_from_files_are_to_be_named(model, given, says):
    args = options(model, **{"speculative_draft_model_path": str(model), **given})
    with pytest.raises(ValueError, match=f"with {says} the weights are others than the files'"):
        model_folder(args, None)
    assert model_folder(args, "name")


def test_what_a_hub_has_by_its_digest_is_the_same_on_all_hosts(tmp_path):
    ids = []
    for host, digest in (("a", "1234"), ("b", "1234"), ("c", "5678")):
        blobs, snapshot = tmp_path / host / "blobs", tmp_path / host / "snapshots" / "main"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / digest).write_bytes(b"weights")
        os.utime(blobs / digest, (len(ids), len(ids)))
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        ids.append(weights_id(str(snapshot), None))
    assert ids[0] == ids[1] != ids[2]


def test_ranks_and_shapes_have_folders_of_their_own():
    made_of = [("MHATokenToKVPoolHost", "layer_first", "torch.float32", (2, 1, 4, 1, 1))]
    names = {
        rank_folder("m", made_of, 0, 1),
        rank_folder("m", made_of, 0, 2),
        rank_folder("m", made_of, 1, 2),
        rank_folder("m", [(*made_of[0][:3], (2, 1, 4, 2, 1))], 0, 1),
        rank_folder("n", made_of, 0, 1),
    }
    assert len(names) == 5
    # MLA: all ranks of all sizes have the same.
    assert rank_folder("m", made_of, None, 2) == rank_folder("m", made_of, None, 4)


# ---- options ----


def test_the_engines_limits(tmp_path):
    assert read_options("file", None, "best_effort") == (Limits(256, 1.0, 0.25), None, None)
    given = (
        '{"prefetch_threshold": 64, "prefetch_timeout_base": 0.5, "prefetch_timeout_per_ki_token": 2, "weights": "w"}'
    )
    assert read_options("file", given, "timeout") == (Limits(64, 0.5, 2), "w", None)
    for name, text in (("a.json", '{"weights": "w"}'), ("a.toml", 'weights = "w"'), ("a.yaml", "weights: w")):
        (tmp_path / name).write_text(text)
        assert read_options("file", f"@{tmp_path / name}", "timeout").weights == "w"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "give an object"),
        ('{"tp_lcm_size": 2}', "has tp_lcm_size; decode knows prefetch_threshold"),
        ('{"prefetch_threshold": 1.5}', "prefetch_threshold 1.5: give a number"),
        ('{"prefetch_timeout_base": -1}', "prefetch_timeout_base -1: give a number"),
        ('{"prefetch_timeout_base": true}', "prefetch_timeout_base True: give a number"),
        (f'{{"prefetch_timeout_base": {10**400}}}', "prefetch_timeout_base 10.*: give a number of 0 or more, at most"),
        (f'{{"prefetch_timeout_per_ki_token": {10**400}}}', "per_ki_token 10.*: give a number"),
        ('{"weights": ""}', "weights '': give a name"),
        ("@nowhere.json", "cannot be read"),
        ("@pyproject.ini", "cannot be read|ends in .json"),
    ],
)
def test_what_decode_does_not_know_is_refused(given, says):
    with pytest.raises(ValueError, match=f"--hicache-storage-backend-extra-config.*({says})"):
        read_options("file", given, "timeout")


def test_nobody_waits_for_a_storage_that_hangs():
    with pytest.raises(ValueError, match="wait_complete would have requests wait"):
        read_options("file", None, "wait_complete")


# ---- workers ----


@pytest.fixture
def worker(tmp_path, monkeypatch, model):
    """A decode worker whose storage was added as its options say."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    made = []

    def make(tp_rank: int = 0, tp_size: int = 1, **given: Any) -> StorageWorld:
        one = StorageWorld(tmp_path / "unused")
        one.close()
        given = {
            "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1, "prefetch_timeout_base": 20}',
            **given,
        }
        args = options(model, **given)
        add_storage(one.tree, args, options_of(args), tp_rank, tp_size)
        one.storage, one.threads = one.tier.storage, one.tier.storage.threads
        one.files = one.threads.files
        one.queue.loads = type(one.queue.loads)(one.tree)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("given", "hit"),
    [({}, 24), ({"dtype": "float16"}, 0), ({"tp_rank": 1, "tp_size": 2}, 0), ({"page_size": 32}, 0)],
)
def test_who_reads_what_another_worker_has_written(worker, monkeypatch, tmp_path, kind, given, hit):
    name, *master = kind.split()
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("MOONCAKE_MASTER", master[0] if master else "")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(1 << 25))
    one, two = worker(hicache_storage_backend=name), worker(hicache_storage_backend=name, **given)
    one.serve(tokens(1, 24))
    assert two.serve(tokens(1, 24)) == hit
    assert one.files.place == two.files.place if hit else one.files.place != two.files.place
    if master:
        # Each of them is a client, which begins to write at once.
        assert {type(files).__name__ for files in (one.files, two.files)} == {"PagesInMooncake"}
        for files in one.files, two.files:
            files._store.close()


def test_a_directory_that_cannot_be_made(worker, model, tmp_path, monkeypatch):
    one = worker()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file" / "kv"))
    args = options(model)
    with pytest.raises(ValueError, match="cannot use .*kv: .*SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        add_storage(one.tree, args, options_of(args), 0, 1)


def scheduler_of(one: StorageWorld) -> Scheduler:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.tree_cache = one.tree
    scheduler.told = []
    scheduler.send_to_tokenizer = SimpleNamespace(send_output=lambda *answer: scheduler.told.append(answer))
    return scheduler


def answered(one: StorageWorld, scheduler: Scheduler) -> bool:
    """Whether what was asked as "clear" has been done, when that is answered."""

    def come() -> bool:
        scheduler.answer_storage_clears()
        return bool(scheduler.told)

    one.until(come, step=False)
    ((answer, asked),) = scheduler.told
    assert asked == "clear" and not scheduler.storage_clears
    scheduler.told.clear()
    return answer.success


def test_the_engines_routes(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    assert one.stored() and scheduler.clear_hicache_storage_wrapped("clear") is None
    assert answered(one, scheduler) and not one.stored()
    for done, answer in (
        ("attached", scheduler.attach_hicache_storage_wrapped(None)),
        ("detached", scheduler.detach_hicache_storage_wrapped(None)),
    ):
        assert not answer.success and f"cannot be {done} while it runs" in answer.message
    one.tier.storage = None
    assert not scheduler.clear_hicache_storage_wrapped(None).success
    assert "no storage to be cleared" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_waits_while_it_is_cleared(worker, monkeypatch, fails):
    """But the client, who hears what has become of it; or that nothing has, when that has taken too long."""
    one = worker()
    scheduler, opened, clear = scheduler_of(one), threading.Event(), one.files.clear
    one.serve(tokens(1, 24))
    one.files.clear = lambda: opened.wait(30) and not fails and clear() or raising()
    begun = time.monotonic()
    assert scheduler.clear_hicache_storage_wrapped("clear") is None
    scheduler.answer_storage_clears()
    assert time.monotonic() - begun < 10 and not scheduler.told and one.stored()
    # What is written meanwhile is not what was to be removed.
    one.complete(decode_req := one.admit(tokens(50, 12), max_new=1))
    one.step()
    while decode_req.req in one.running:
        one.decode()
    one.until(lambda: one.tier.memory.wait() or not one.tier.saves.busy)
    opened.set()
    assert answered(one, scheduler) is not fails
    one.settle()
    assert len(one.stored()) == (9 if fails else 3)
    opened.clear()
    monkeypatch.setattr(storage_scheduler, "CLEAR_S", 0.0)
    scheduler.clear_hicache_storage_wrapped("clear")
    assert not answered(one, scheduler)
    opened.set()


def raising() -> None:
    raise OSError("it fails")


def test_a_weight_update_ends_its_use(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    for _ in range(2):
        scheduler.before_weight_update()
    assert one.storage.stopped and caplog.text.count("uses the storage of KV no more") == 1
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
