"""Files of each optional feature, which are deleted with it: source, tests, documents and data.

This table is the only list of them; `python -m tests.without NAME` deletes by it. The source finds a feature by its
line in `deployments/parts.py`.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[1]
Value = TypeVar("Value")


class Feature(NamedTuple):
    """An optional feature."""

    paths: tuple[str, ...]
    """Files and folders below the root, as globs."""
    needs: tuple[str, ...] = ()
    """Features that it cannot be without: it is deleted with any of them."""
    words: tuple[str, ...] = ()
    """Its endpoints, commands and settings: cases of other tests that have one are deleted with it."""


FEATURES = {
    "tensorrt": Feature(
        (
            *("deployments/tensorrt", "runtime/tensorrt", "docs/tensorrt.md"),
            *("tests/deployments/tensorrt", "tests/runtime/tensorrt"),
        ),
        needs=("one_pass", "fingerprint", "fused_layers", "model_trial", "late_commands"),
        words=("build-engine", "engine_dir", "tensorrt"),
    ),
    "fingerprint": Feature(("runtime/heads/fingerprint.py", "tests/runtime/quantised/test_gguf_fingerprint.py")),
    "recordings": Feature(
        (
            *("deployments/recordings", "runtime/recordings", "docs/recordings.md"),
            *("tests/deployments/recordings", "tests/runtime/recordings"),
            "tests/runtime/quantised/test_gguf_recordings.py",
        ),
        needs=("fingerprint", "file_lock", "late_commands"),
        words=(
            *("extract", "recording_dir", "recording_share", "recording_max_bytes", "wingbeat_recorded_requests"),
            *("wingbeat_recorded_requests_total", "wingbeat_recording_dropped", "wingbeat_recording_dropped_total"),
            "wingbeat_recording_stopped",
        ),
    ),
    "unrolled": Feature(("runtime/heads/unroll.py", "tests/runtime/latent_heads/test_unrolled_latent.py")),
    "training": Feature(
        (
            *("deployments/training", "runtime/training", "docs/training.md"),
            *("tests/deployments/training", "tests/runtime/training", "tests/runtime/training_world.py"),
            *("benchmarks/narrow_head.py", "benchmarks/domains.py"),
        ),
        needs=("recordings", "unrolled"),
        words=("train", "train drafter"),
    ),
    "server_calls": Feature(("deployments/cli/server_calls.py",)),
    "fleet_names": Feature(("deployments/fleet/fleet_names.py",)),
    "head_swaps": Feature(("runtime/head_swaps", "tests/runtime/packed/test_packed_fp8_heads.py")),
    "learning": Feature(
        (
            *("deployments/learning", "runtime/learning", "docs/learning.md"),
            *("tests/deployments/learning", "tests/runtime/learning"),
            *(
                "tests/e2e/test_learning.py",
                "tests/e2e/test_page_heads.py",
                "benchmarks/learning*.py",
                "benchmarks/process_pause.py",
                "benchmarks/moved_verifier.py",
            ),
            *("benchmarks/results/learning*", "benchmarks/results/moved_verifier*"),
        ),
        needs=("training", "server_calls", "head_swaps", "file_lock"),
        words=(
            *("/v1/drafter", "drafter list", "drafter promote", "drafter rollback", "drafter repair", "learn"),
            *("wingbeat_head_decisions", "wingbeat_head_decisions_total", "wingbeat_learner_seconds"),
            *("wingbeat_learner_seconds_total", "wingbeat_learner_samples", "wingbeat_learner_bytes"),
        ),
    ),
    "local": Feature(
        ("deployments/local", "tests/deployments/local"), needs=("late_commands",), words=("'generate'", "generate hi")
    ),
    "bench": Feature(
        (
            *("deployments/bench", "tests/deployments/bench"),
            *("benchmarks/real_model.py", "benchmarks/packed.py", "benchmarks/packed_child.py"),
        ),
        needs=("local",),
        words=("bench",),
    ),
    "inspection": Feature(
        (
            *("deployments/inspection", "tests/deployments/inspection", "tests/runtime/mtp/test_mtp_inspection.py"),
            "tests/runtime/one_pass/test_one_pass_inspected.py",
        ),
        needs=("local", "doctor"),
        words=("inspect",),
    ),
    "offline": Feature(
        (
            *("deployments/offline", "docs/offline.md", "tests/deployments/offline"),
            *("tests/e2e/test_offline_document.py", "tests/e2e/test_ray_data_losses.py"),
        ),
        needs=("local",),
    ),
    "live_settings": Feature(
        ("deployments/live_settings", "tests/deployments/live_settings", "tests/e2e/test_user_config.py"),
        words=("user_config",),
    ),
    "load_policy": Feature(
        (
            *("deployments/load_policy", "cluster/autoscaling.py", "cluster/engine_speed.py"),
            *("tests/deployments/load_policy", "tests/e2e/test_scaling_live.py", "tests/e2e/test_ray_llm_scaling.py"),
        ),
    ),
    "help_panels": Feature(("deployments/help_panels", "tests/deployments/help_panels")),
    "repeated_lines": Feature(("deployments/repeated_lines", "tests/deployments/repeated_lines")),
    "late_commands": Feature(("deployments/cli/late_commands.py",)),
    "field_names": Feature(("deployments/api/field_names.py",)),
    "vocabulary_pieces": Feature(("runtime/vocabulary_pieces.py",)),
    "template_forms": Feature(("deployments/api/template_forms", "tests/deployments/api/test_template_forms.py")),
    "load_route": Feature(
        ("deployments/api/load_route", "tests/deployments/api/endpoints/test_load.py"), words=("/load",)
    ),
    "start_progress": Feature(("deployments/start_progress", "tests/deployments/start_progress")),
    "refused_models": Feature(("deployments/refused_models", "tests/deployments/refused_models")),
    "bound_socket": Feature(("deployments/bound_socket.py",)),
    "front_door": Feature(
        ("deployments/front_door", "tests/deployments/front_door"),
        needs=("bound_socket",),
    ),
    "ray_guard": Feature(("deployments/ray_guard", "tests/deployments/ray_guard")),
    "start_checks": Feature(
        ("deployments/start_checks", "tests/deployments/start_checks"),
        needs=("bound_socket",),
        words=("a port that is taken", "a host that is none", "an address that is none", "tokenizer pointer"),
    ),
    "memory_check": Feature(
        ("deployments/memory_check", "tests/deployments/memory_check"),
        needs=("start_checks",),
        words=("of memory are free", "this machine has"),
    ),
    "doctor": Feature(
        (
            *("deployments/doctor", "tests/deployments/doctor"),
            *("benchmarks/gpu/doctor.py", "tests/e2e/test_gpu_first.py"),
        ),
        needs=("local", "start_checks", "engine_checks", "kernel_tools"),
    ),
    "page": Feature(
        ("deployments/page", "tests/deployments/page", "tests/e2e/test_page*.py", "tests/e2e/page_driver.py")
    ),
    "adaptive": Feature(
        (
            *("runtime/adaptive", "runtime/cpu/adaptive", "tests/runtime/adaptive", "tests/runtime/cpu/adaptive"),
            *("tests/runtime/cpu/grammar/test_certain_alone.py", "tests/runtime/cpu/one_pass/test_one_pass_growth.py"),
            *("tests/runtime/host_counts.py", "tests/runtime/test_host_counts.py", "tests/e2e/test_page_troubles.py"),
            *("tests/e2e/test_gpu_first.py", "benchmarks/load_sweep.py", "benchmarks/never_loses.py"),
            *("tests/runtime/deferral", "tests/deployments/learning/test_weak_head.py"),
        ),
        words=("'trees': 'adaptive'", "'shape': 'adaptive'", "'adaptive': True", "graphs of a verifier"),
    ),
    "one_graph": Feature(
        ("runtime/one_graph", "tests/runtime/one_graph", "tests/gpu_of_numbers/one_graph_cases.py"),
        words=("one graph",),
    ),
    "drawn_trees": Feature(("runtime/drawn_trees", "tests/runtime/drawn_trees"), words=("drawn",)),
    "latent_heads": Feature(
        ("runtime/latent_heads", "tests/runtime/latent_heads"),
        words=("latent", "latent-grids", "eagle3_latent", "MLA"),
    ),
    "ngram": Feature(
        ("runtime/ngram", "tests/runtime/ngram"), words=("ngram", "prompt_lookup_max", "prompt_lookup_min")
    ),
    "suffix": Feature(
        ("runtime/suffix", "tests/runtime/suffix"),
        words=(
            *("suffix", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        ),
    ),
    "suffix_beside": Feature(
        (
            *("runtime/suffix_beside", "deployments/suffix_beside", "tests/runtime/suffix_beside"),
            *("tests/deployments/suffix_beside", "benchmarks/suffix_beside.py", "benchmarks/results/suffix_beside*"),
        ),
        needs=("suffix", "adaptive"),
        words=(
            *("suffix_beside", "sa_config", "wingbeat_text_rounds", "wingbeat_text_rounds_total"),
            *("wingbeat_text_draft_tokens", "wingbeat_text_draft_tokens_total"),
            *("wingbeat_text_accepted_tokens", "wingbeat_text_accepted_tokens_total"),
        ),
    ),
    "embeddings": Feature(
        (
            *("deployments/embeddings", "runtime/pooling"),
            *("tests/deployments/embeddings", "tests/runtime/pooling", "tests/e2e/test_embeddings.py"),
            "tests/runtime/tensor_parallel/test_rank_embeddings.py",
        ),
        words=("/v1/embeddings", "embeddings"),
    ),
    "generation_rules": Feature(("runtime/generation_rules", "tests/deployments/generation_rules")),
    "tokens": Feature(
        ("deployments/api/tokens", "tests/deployments/api/endpoints/test_token_routes.py"),
        words=("/tokenize", "/detokenize", "/tokenizer_info"),
    ),
    "token_generation": Feature(
        ("deployments/api/token_generation", "tests/deployments/api/test_token_generation.py"),
        needs=("field_names",),
        words=("/inference/v1/generate", "/v1/chat/completions/render"),
    ),
    "handles": Feature(("deployments/api/handles", "tests/deployments/api/test_by_handle.py")),
    "description": Feature(
        (
            *("deployments/api/description", "tests/deployments/api/test_description.py"),
            *("tests/deployments/learning/test_described_routes.py", "tests/clients/*schemathesis*.py"),
        ),
        words=("/openapi.json", "/docs"),
    ),
    "foreign": Feature(
        (
            *("deployments/api/foreign", "tests/deployments/api/test_foreign_fields.py"),
            "tests/deployments/api/foreign_fields.*",
        ),
    ),
    "round_traces": Feature(("deployments/round_traces", "tests/deployments/round_traces"), words=("/trace",)),
    "spans": Feature(
        ("deployments/spans", "tests/deployments/spans"),
        needs=("client_metrics",),
        words=("otlp_traces_endpoint", "--otlp-traces-endpoint"),
    ),
    "prefixes": Feature(
        (
            *("deployments/prefixes", "runtime/prefixes", "docs/prefixes.md", "tests/deployments/prefixes"),
            *("tests/runtime/prefixes", "tests/runtime/prefix_world.py", "tests/e2e/test_saved_prefixes.py"),
            "tests/deployments/several_models/test_prefixes_of_several.py",
            *("tests/runtime/media/test_media_prefixes.py", "tests/runtime/tensorrt/test_engine_prefixes.py"),
            *("tests/deployments/media/test_prefix_images.py", "tests/runtime/cpu/prefixes"),
            "tests/runtime/kv_windows/test_window_prefixes.py",
        ),
        needs=("server_calls", "fleet_names"),
        words=("/v1/prefixes", "prefix", "prefix_dir", "max_pinned_tokens"),
    ),
    "kv_windows": Feature(
        ("runtime/kv_windows", "tests/runtime/kv_windows", "tests/gpu_of_numbers/window_cases.py"),
        words=("num_window_blocks",),
    ),
    "rollouts": Feature(
        (
            *("deployments/rollouts", "runtime/rollouts", "docs/rollouts.md", "examples/rollouts.py"),
            *("tests/deployments/rollouts", "tests/runtime/rollouts", "tests/e2e/test_rollouts.py"),
            *("tests/gpu_of_numbers/rollout_cases.py", "tests/runtime/tensor_parallel/test_rank_weights.py"),
            *("tests/runtime/tensor_parallel/test_rank_sleeps.py", "tests/e2e/test_rank_rollouts.py"),
            *("benchmarks/moved_verifier.py", "benchmarks/results/moved_verifier*"),
            *("tests/e2e/test_ray_data_losses.py", "tests/runtime/packed/test_written_packed.py"),
            "tests/runtime/cpu/layers/test_written_eight_bits.py",
        ),
        needs=("server_calls", "head_swaps", "refused_models"),
        words=("rollouts", "rollouts_journal", "weight_transfer_config", "/pause", "/update_weights"),
    ),
    "weights": Feature(
        (
            *("deployments/weights", "runtime/successor.py"),
            *("tests/deployments/weights", "tests/runtime/test_successor.py", "tests/e2e/test_weights_update.py"),
            "tests/e2e/test_adapters_of_pushed_weights.py",
        ),
        needs=("server_calls", "refused_models"),
        words=("/v1/weights", "/v1/weights/update", "weights show", "weights update", "wingbeat_weights_info"),
    ),
    "vllm_words": Feature(
        (
            *("deployments/vllm_words", "tests/deployments/vllm_words", "docs/ray_serve_llm.md"),
            "tests/deployments/suffix_beside/test_sa_config.py",
        ),
        words=("speculative_config", "enforce_eager", "trusting code"),
    ),
    "several_models": Feature(
        (
            *("deployments/several_models", "tests/deployments/several_models"),
            "tests/e2e/test_several_models.py",
        ),
    ),
    "ray_llm": Feature(
        (
            *("deployments/ray_llm", "examples/ray_llm", "tests/deployments/ray_llm"),
            *("tests/e2e/test_ray_llm.py", "tests/e2e/test_ray_llm_scaling.py"),
        ),
        needs=("vllm_words", "several_models", "handles", "gpu_shares"),
    ),
    "grammars": Feature(
        (
            *("runtime/grammar", "deployments/grammars", "tests/runtime/grammar", "tests/deployments/grammars"),
            *("tests/deployments/parsing/test_call_format.py", "tests/runtime/cpu/grammar"),
            *("tests/hostile/*grammar*.py", "tests/hostile/bystander_times.py"),
            *("benchmarks/structured.py", "benchmarks/schema_files.py"),
        ),
        needs=("masks", "vocabulary_pieces"),
        words=("structured_outputs", "response_format", "grammar"),
    ),
    "states": Feature(
        (
            *("runtime/state", "kernels/state", "tests/runtime/state", "tests/kernels/state"),
            *("tests/runtime/engine/test_hybrid_lossless.py", "tests/runtime/lora/test_hybrid_adapters.py"),
            "tests/runtime/lora/test_fused_hybrid_adapters.py",
            "tests/gpu_of_numbers/hybrid_cases.py",
        ),
        needs=("kernel_tools",),
        words=(
            *("recurrent state", "a model with recurrent state", "state_interval", "num_saved_states", "delta_rule"),
            *("selective_scan", "convolve", "advance_recurrence", "advance_convolution"),
            *("channel_scan", "advance_channels", "scan_tokens"),
            *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe_text", "bamba", "falcon_h1", "nemotron_h"),
            *("jamba", "mamba", "zamba"),
        ),
    ),
    "ranks": Feature(
        (
            *("runtime/tensor_parallel", "deployments/ranks", "tests/runtime/tensor_parallel"),
            *("tests/e2e/test_ranks.py", "tests/e2e/test_rank_rollouts.py"),
        ),
        words=("tensor_parallel_size", "--tensor-parallel-size", "ranks", "two ranks"),
    ),
    "kernel_tools": Feature(("kernels/launching.py", "kernels/comparison_inputs.py")),
    "fused_layers": Feature(
        (
            *("runtime/fused", "kernels/few_rows", "tests/runtime/fused", "tests/kernels/few_rows"),
            *("tests/gpu_of_numbers", "tests/runtime/packed", "tests/runtime/tensor_parallel"),
            *("tests/runtime/lora/test_fused_adapters.py", "tests/runtime/rollouts/test_written_fused.py"),
            *("tests/runtime/test_launch_counts.py", "tests/runtime/state/test_hybrid_launches.py"),
            "tests/runtime/lora/test_fused_hybrid_adapters.py",
        ),
        needs=("kernel_tools",),
    ),
    "experts": Feature(
        (
            *("runtime/experts", "kernels/experts", "tests/runtime/experts", "tests/kernels/experts"),
            "tests/gpu_of_numbers/expert_cases.py",
        ),
        needs=("kernel_tools",),
        words=("fused attention and experts", "grouped_product", "choose_experts", "route_experts", "sum_experts"),
    ),
    "latent_attention": Feature(
        (
            *("runtime/latent_attention", "kernels/latent_attention", "tests/runtime/latent_attention"),
            *("tests/kernels/latent_attention", "tests/gpu_of_numbers/latent_cases.py"),
            "tests/runtime/prefixes/test_prefixes_of_latents.py",
        ),
        needs=("kernel_tools", "fused_layers", "gpu_kernels"),
        words=("attention over latents", "store_latents", "keep_latents"),
    ),
    "deferral": Feature(("runtime/deferral", "tests/runtime/deferral")),
    "masks": Feature(("runtime/masks",), words=("bad_words", "bad words")),
    "prompt_graphs": Feature(
        (
            *("runtime/prompt_graphs", "tests/runtime/prompt_graphs", "tests/runtime/round/test_poisoned_graphs.py"),
            *("tests/runtime/grammar/test_captured_prompts.py", "tests/runtime/lora/test_adapters_in_prompt_graphs.py"),
            *("tests/runtime/tensor_parallel/test_rank_launches.py", "tests/gpu_of_numbers"),
            *("tests/runtime/tensor_parallel/test_captured_ranks.py", "tests/runtime/test_launch_counts.py"),
            "tests/e2e/test_gpu_benchmarks.py",
        ),
    ),
    "shown_rounds": Feature(
        (*("runtime/shown_rounds", "tests/runtime/shown_rounds", "tests/runtime/adaptive/test_forced_drafts.py"),),
        words=("trace",),
    ),
    "file_lock": Feature(("runtime/file_lock.py",)),
    "promises": Feature(("runtime/promises", "tests/runtime/promises"), needs=("file_lock",)),
    "model_trial": Feature(("runtime/model_trial", "tests/runtime/model_trial")),
    "engine_checks": Feature(
        (
            *("runtime/engine_checks", "tests/runtime/engine_checks", "tests/runtime/fitted_pair.py"),
            *("tests/runtime/mtp/test_mtp_pair.py", "tests/runtime/draft_model/test_draft_model_tested.py"),
            *("tests/deployments/learning/test_weak_head.py", "tests/runtime/tensor_parallel/test_captured_ranks.py"),
            "tests/gpu_of_numbers",
        ),
        needs=("kernel_tools",),
    ),
    "gpu_kernels": Feature(
        (
            *("kernels/gpu", "tests/kernels/gpu", "tests/kernels/*/launches.py", "tests/ptx", "tests/gpu_of_numbers"),
            *("tests/runtime/engine_checks/test_kernel_check.py", "tests/runtime/state/test_hybrid_launches.py"),
            *("tests/runtime/test_launch_counts.py", "tests/runtime/test_host_counts.py"),
            *("tests/runtime/test_fake_gpu.py", "tests/runtime/test_compiled_before_requests.py"),
            "tests/runtime/kv_windows/test_window_gpu.py",
            "tests/runtime/draft_rules/test_rules_on_fake_gpu.py",
            *("tests/runtime/tensor_parallel/test_rank_launches.py", "tests/kernels/state/test_triton_state.py"),
            "tests/kernels/few_rows/test_triton_*.py",
        ),
        needs=("kernel_tools",),
    ),
    "draft_rules": Feature(
        (
            *("runtime/draft_rules", "tests/runtime/draft_rules", "tests/runtime/grammar/test_masked_drafts.py"),
            *("tests/runtime/cpu/drafting/test_kernel_rules.py", "tests/runtime/cpu/one_pass/test_one_pass_masks.py"),
            *("tests/runtime/one_pass/test_one_pass_masks.py", "tests/runtime/drawn_trees/test_allowed_candidates.py"),
        ),
        words=(
            *("rules in a level of a chain", "rules in a level of a tree", "rules in a draft of one level"),
            *("rules beside the graphs of a round", "graphs of a drafter for rounds with rules"),
        ),
    ),
    "head_families": Feature(
        ("runtime/head_families", "tests/runtime/heads/test_other_families.py"),
        words=("Domino", "Medusa", "EAGLE-4", "efficient_lm_head.weight"),
    ),
    "config_values": Feature(
        (
            *("runtime/config_values", "tests/runtime/config_values", "tests/runtime/test_mutated_models.py"),
            *("tests/runtime/heads/test_mutated_heads.py", "tests/runtime/one_pass/test_mutated_one_pass_heads.py"),
        ),
        words=('hidden_size is "wide"', "num_hidden_layers is -1", "a field of the wrong kind", "float7"),
    ),
    "belonging": Feature(
        ("runtime/belonging", "tests/runtime/heads/test_belonging.py"), words=("belongs to another verifier",)
    ),
    "grouped_weight": Feature(("kernels/grouped_weight.py",)),
    "fp8_heads": Feature(
        ("runtime/fp8_heads", "tests/runtime/fp8_heads", "tests/runtime/packed/test_packed_fp8_heads.py"),
        needs=("grouped_weight",),
        words=("eagle-fp8",),
    ),
    "quantised": Feature(
        (
            *("runtime/quantised", "tests/runtime/quantised", "tests/runtime/cpu/quantised"),
            "tests/runtime/cpu/activations/test_rounded_experts.py",
        ),
        needs=("grouped_weight",),
        words=("awq", "gptq", "gguf", "unknown quantisation"),
    ),
    "packed_on_gpus": Feature(
        (
            *("kernels/packed", "runtime/packed", "tests/kernels/packed", "tests/runtime/packed"),
            *("tests/gpu_of_numbers/packed_cases.py", "tests/gpu_of_numbers/alike_packed_cases.py"),
            "benchmarks/gpu/packed_weights.py",
        ),
        needs=("quantised", "gpu_kernels", "experts", "kernel_tools"),
    ),
    "alike": Feature(
        (
            *("kernels/alike", "runtime/alike", "tests/kernels/alike", "tests/runtime/alike"),
            *("tests/gpu_of_numbers/alike*_cases.py", "tests/ptx/test_compiled_alike.py"),
            *("tests/gpu_of_numbers/test_alike_texts.py", "benchmarks/gpu/deterministic.py"),
            "benchmarks/gpu/_alike_costs.py",
        ),
        needs=("gpu_kernels", "fused_layers", "kernel_tools"),
        words=("alike_product",),
    ),
    "named_models": Feature(
        (
            *("runtime/named_models", "deployments/named_models", "examples/smollm2_eagle3"),
            *("src/wingbeat/smollm2_eagle3", "tests/runtime/named_models", "tests/deployments/named_models"),
            "tests/models/test_smollm2_head.py",
        ),
        needs=("quantised", "file_lock"),
        words=("fetch", "smollm2"),
    ),
    "mtp": Feature(
        ("runtime/mtp", "runtime/training/mtp", "tests/runtime/mtp", "tests/runtime/training/mtp"),
        words=("mtp", "mtp-1", "mtp-3", "two MTP modules"),
    ),
    "one_pass": Feature(
        (
            *("runtime/one_pass", "runtime/training/one_pass", "deployments/one_pass", "tests/runtime/one_pass"),
            *("tests/runtime/training/one_pass", "tests/runtime/conventions/test_one_pass_readings.py"),
            *("examples/demo_pair/dflash2", "benchmarks/gpu/drafter_kinds.py"),
            *("runtime/cpu/one_pass", "tests/runtime/cpu/one_pass"),
        ),
        needs=("head_families",),
        words=("one_pass", "dflash", "dflash2", "dspark", "dspark-rnn", "jetspec", "peagle", "p-eagle"),
    ),
    "vocabulary": Feature(("runtime/heads/vocabulary.py",)),
    "assistants": Feature(
        ("runtime/assistants", "tests/runtime/assistants"),
        needs=("vocabulary",),
        words=("shared_keys", "an assistant of four layers"),
    ),
    "draft_model": Feature(
        (
            *("runtime/draft_model", "tests/runtime/draft_model"),
            *("examples/demo_pair/draft_model", "benchmarks/gpu/drafter_kinds.py"),
        ),
        needs=("vocabulary",),
        words=("draft_model", "draft-model", "draft-model-windows", "a model of 16 layers"),
    ),
    "foreign_vocabulary": Feature(
        ("runtime/foreign_vocabulary", "tests/runtime/foreign_vocabulary"),
        needs=("draft_model", "vocabulary_pieces"),
        words=("foreign_vocabulary", "foreign-vocabulary", "a model of another vocabulary"),
    ),
    "user_drafter": Feature(
        ("runtime/user_drafter", "tests/runtime/user_drafter", "examples/user_drafter"),
        words=("bigram_drafter", "some.module.Class", "nowhere.Drafter", "collections.OrderedDict"),
    ),
    "lora": Feature(
        (
            *("runtime/lora", "deployments/lora", "kernels/lora", "runtime/tensor_parallel/lora"),
            *("runtime/tensorrt/lora", "docs/adapters.md", "examples/ray_llm/adapters.yaml", "tests/deployments/lora"),
            *("tests/runtime/lora", "tests/runtime/lora_world.py", "tests/runtime/tensorrt/lora", "tests/kernels/lora"),
            *("tests/e2e/test_adapters*.py", "tests/gpu_of_numbers/adapter_cases.py"),
            "benchmarks/gpu/adapter_profile.py",
            "tests/deployments/several_models/test_adapters_of_several.py",
            *("tests/runtime/quantised/test_packed_adapters.py", "tests/runtime/packed/test_adapters_on_packed.py"),
            "tests/runtime/prefixes/test_prefixes_of_adapters.py",
            "tests/runtime/recordings/test_adapters.py",
            *("tests/runtime/tensor_parallel/test_rank_adapters.py", "runtime/cpu/lora", "tests/runtime/cpu/lora"),
            "tests/runtime/rollouts/test_adapters_over_written_weights.py",
            "tests/runtime/cpu/activations/test_rounded_adapters.py",
        ),
        needs=("fleet_names", "kernel_tools", "live_settings", "field_names"),
        words=(
            *("lora_modules", "--lora-modules", "lora_update_dir", "lora_config", "max_loras", "--max-loras"),
            *("max_lora_rank", "--max-lora-rank", "enable_lora", "--enable-lora", "request_labels"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
            *("vllm:lora_requests_info", "ray_vllm_lora_requests_info"),
        ),
    ),
    "cpu": Feature(
        (
            *("runtime/cpu", "kernels/cpu", "kernels/lora/native.*", "tests/runtime/cpu", "tests/kernels/cpu"),
            *("tests/kernels/lora/test_native.py", "benchmarks/cpu_kernels.py", "benchmarks/results/cpu_kernels*"),
        ),
        needs=("grouped_weight", "fused_layers"),
        words=("int8", "deterministic", "CPU kernels"),
    ),
    "activations": Feature(
        (
            *("runtime/cpu/activations", "deployments/cpu_activations", "tests/runtime/cpu/activations"),
            *("tests/deployments/test_cpu_activations.py", "tests/deployments/local/test_local_activations.py"),
        ),
        needs=("cpu",),
        words=("cpu_activations",),
    ),
    "own_template": Feature(("runtime/own_template", "tests/runtime/own_template")),
    "conventions": Feature(
        ("runtime/conventions", "tests/runtime/conventions"), needs=("unrolled", "fingerprint", "engine_checks")
    ),
    "parsing": Feature(
        (
            *("deployments/parsing", "deployments/api/parsed", "tests/deployments/parsing"),
            *("tests/deployments/api/test_tools.py", "tests/deployments/api/test_tool_histories.py"),
            *("tests/deployments/grammars/test_forms_of_calls.py", "tests/deployments/clients/*agent_bodies.py"),
        ),
        words=(
            *("tools", "tool_choice", "parallel_tool_calls", "tool_calls", "tool_call_id", "include_reasoning"),
            *("tool_call_parser", "reasoning_parser", "--tool-call-parser"),
        ),
    ),
    "tcp": Feature(
        (
            *("cluster/channels/tcp", "deployments/two_nodes", "tests/cluster/channels/test_remote*.py"),
            "tests/deployments/two_nodes",
            *("benchmarks/remote_channel.py", "benchmarks/delaying_proxy.py", "benchmarks/results/remote_channel.*"),
        ),
        words=(
            *("remote", "drafter_resources", "drafter on another node"),
            "drafters of two nodes for verifiers of two",
        ),
    ),
    "gpu_memory": Feature(
        (
            *("cluster/channels/cuda", "deployments/gpu_memory", "tests/cluster/channels/cuda"),
            *("deployments/rollouts/ipc", "tests/deployments/rollouts/ipc"),
            *("tests/deployments/gpu_memory", "benchmarks/gpu/hop.py", "benchmarks/gpu/two_processes.py"),
        ),
        words=("cuda_ipc", "fake-cuda"),
    ),
    "gpu_shares": Feature(
        (
            *("deployments/gpu_shares", "tests/deployments/gpu_shares"),
            "tests/deployments/several_models/test_gpus_of_several.py",
        ),
    ),
    "client_metrics": Feature(
        ("deployments/client_metrics", "tests/deployments/client_metrics"),
        words=("vllm", "wingbeat_router_requests", "wingbeat_router_answers", "wingbeat_router_answers_total"),
    ),
    "ray_metrics": Feature(
        ("deployments/ray_metrics", "tests/deployments/ray_metrics", "examples/grafana_ray.json"),
        needs=("client_metrics",),
    ),
    "shared_drafters": Feature(
        (
            *("deployments/shared_drafters", "runtime/shared_drafters", "cluster/channels/any_bell.py"),
            *("tests/deployments/shared_drafters", "tests/runtime/shared_drafters", "tests/runtime/shared_drafter.py"),
            "tests/runtime/adaptive/test_shared_followed.py",
            *("tests/cluster/channels/*any_bell.py", "tests/e2e/test_shared_drafters.py"),
            "examples/serve/shared_drafters.yaml",
        ),
        words=(
            *("'drafters'", "`drafters`", "shared drafters", "wingbeat_drafter_lacks_room"),
            "drafters of two nodes for verifiers of two",
        ),
    ),
    "media": Feature(
        (
            *("deployments/media", "runtime/media", "runtime/tensorrt/media", "tests/deployments/media"),
            *("tests/runtime/media", "tests/runtime/tensorrt/media", "tests/runtime/one_pass/test_parallel_sees.py"),
            "tests/runtime/lora/test_media_adapters.py",
        ),
        needs=("model_trial",),
        words=(
            *("image", "image_url", "input_image", "input_audio", "audio_url", "limit_mm_per_prompt"),
            *("allowed_media_domains", "max_media_memory_bytes", "wingbeat_media_cache_bytes"),
            *("wingbeat_media_encoded", "wingbeat_media_encoded_total", "wingbeat_media_cache_hits"),
            *("wingbeat_media_cache_hits_total", "wingbeat_prompt_image_tokens", "wingbeat_prompt_image_tokens_total"),
            *("wingbeat_prompt_audio_tokens", "wingbeat_prompt_audio_tokens_total"),
        ),
    ),
    "responses": Feature(
        (
            *("deployments/api/responses_api", "tests/deployments/api/test_responses_api.py"),
            "tests/clients/test_responses_client.py",
        ),
        needs=("parsing", "field_names"),
        words=("/v1/responses",),
    ),
    "messages": Feature(
        (
            *("deployments/api/messages_api", "tests/deployments/api/test_messages_api.py"),
            "tests/clients/test_anthropic_client.py",
        ),
        needs=("parsing", "field_names"),
        words=("/v1/messages",),
    ),
}


def without(names: set[str]) -> set[str]:
    """These features, and all that need one of them."""
    more = {name for name, feature in FEATURES.items() if names & set(feature.needs)} - names
    return without(names | more) if more else names


@cache
def words_gone() -> re.Pattern[str] | None:
    """Words of features that are deleted; None where none is."""
    words = [word for one in FEATURES.values() if is_deleted(one) for word in one.words]
    return re.compile("|".join(rf"(?<![\w/-]){re.escape(word)}(?![\w-])" for word in words)) if words else None


def is_deleted(feature: Feature, root: Path = ROOT) -> bool:
    """Whether a feature is not in this tree."""
    return not any(root.glob(feature.paths[0]))


def is_gone(case: object) -> bool:
    """Whether a case of a test has a word of a feature that is deleted."""
    words = words_gone()
    return words is not None and words.search(repr(case)) is not None


def kept(table: Mapping[str, Value]) -> dict[str, Value]:
    """The rows of a table without those of deleted features."""
    return {name: value for name, value in table.items() if not is_gone((name, value))}


def belongs_to_deleted(path: str) -> bool:
    """Whether a path below the root is that of a feature that is deleted."""
    return any(
        is_deleted(one) and any(Path(path).match(glob) or path.startswith(f"{glob}/") for glob in one.paths)
        for one in FEATURES.values()
    )
