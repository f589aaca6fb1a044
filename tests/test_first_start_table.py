"""Each line of "The first start on a GPU" in docs/operations.md is a property that a test without a GPU holds."""

from pathlib import Path

ROOT = Path(__file__).parent
SHARES, GPUS = "deployments/test_gpu_shares.py", "cluster/test_gpus.py"
BUILD, REFUSALS = "deployments/replica/engine/test_build.py", "cluster/channels/test_cuda_ipc_refusals.py"
TAKES = (SHARES, "test_a_pair_takes_two_gpus_where_they_are_free_else_one_and_only_what_is_left_open")
FALLS_BACK = (BUILD, "test_a_channel_that_does_not_carry_falls_back_unless_it_was_asked_for_by_name")
TAKES_OVER = (
    "deployments/replica/drafters/test_supervisor.py",
    "test_drafters_that_do_not_reach_the_channel_attach_to_the_one_that_takes_over",
)
TAKEN_IN = (TAKES_OVER[0], "test_an_engine_that_has_room_takes_the_drafter_in_that_does_not_reach_it")
LENT = "deployments/replica/test_lent_weights.py"
GRAPHS, MEMORY = "runtime/graphs/test_graph_runner.py", "runtime/engine/test_memory.py"
KERNELS, COMPARISON = "runtime/checks/test_kernel_check.py", "kernels/test_comparison.py"

HELD_BY = {
    "one free GPU, no shares given": [
        TAKES,
        (SHARES, "test_the_command_takes_a_gpu_of_this_machine_and_says_so_in_one_line"),
    ],
    "two free GPUs, no shares given": [TAKES],
    "no GPU, no shares given": [
        TAKES,
        (SHARES, "test_what_needs_a_gpu_is_refused_once_it_is_known_that_there_is_none"),
    ],
    "fewer GPUs than replicas, ranks and drafters need": [
        (SHARES, "test_fewer_gpus_than_the_settings_need_are_refused_by_what_to_change")
    ],
    "MIG": [(GPUS, "test_of_gpus_divided_by_mig_a_process_sees_one_instance")],
    "a share for the verifier alone, a drafter with weights": [
        (SHARES, "test_a_head_is_never_on_the_cpu_beside_a_verifier_on_a_gpu")
    ],
    "driver too old for torch, or torch without CUDA": [
        (GPUS, "test_a_driver_that_is_too_old_is_named_beside_the_one_that_torch_needs")
    ],
    "no CUDA IPC (WSL2, vGPU, some virtual machines and containers), one GPU": [
        TAKEN_IN,
        (TAKES_OVER[0], "test_an_engine_without_room_for_the_drafter_reaches_another_one_through_host_memory"),
        (BUILD, "test_a_verifier_that_may_take_its_drafter_in_warns_of_host_memory_only_once_a_drafter_attaches_there"),
        (BUILD, "test_a_verifier_whose_gpu_memory_cannot_be_shared_takes_host_memory_with_one_warning"),
        (REFUSALS, "test_a_gpu_that_shares_no_events_is_refused_on_either_side"),
        FALLS_BACK,
    ],
    "two GPUs without peer access": [
        (REFUSALS, "test_a_gpu_that_cannot_reach_the_verifiers_is_refused_in_one_line"),
        TAKES_OVER,
        FALLS_BACK,
    ],
    "memory or marks that do not arrive, or events that cannot be recorded": [
        (REFUSALS, "test_a_drafter_tries_events_and_memory_before_the_one_that_is_attached_is_replaced"),
        (
            "cluster/channels/test_cuda_ipc.py",
            "test_each_drafters_writes_and_marks_are_seen_by_the_verifier_before_it_drafts",
        ),
        TAKEN_IN,
        TAKES_OVER,
    ],
    "Triton missing, broken or without a C compiler": [
        (KERNELS, "test_an_installation_without_triton_runs_references"),
        (COMPARISON, "test_a_kernel_that_does_not_compile_is_replaced_with_the_reason"),
    ],
    "a compiler that hangs": [(KERNELS, "test_a_compiler_that_hangs_ends_the_start_with_what_to_switch_off")],
    "a kernel that computes something else on this GPU": [
        (KERNELS, "test_a_kernel_that_differs_is_replaced_by_its_reference_in_one_line")
    ],
    "layers with heads of more than 256 values, such as 512": [
        (COMPARISON, "test_heads_beyond_the_kernels_run_torchs_attention_and_narrower_ones_the_kernel")
    ],
    "fp8 KV below compute capability 8.9": [
        ("runtime/engine/test_fp8_kv.py", "test_a_gpu_without_fp8_is_refused_by_its_capability")
    ],
    "fp8 head weights below compute capability 8.9": [
        ("runtime/heads/test_fp8.py", "test_a_gpu_without_float8_is_refused_by_the_settings_name")
    ],
    "the largest round does not fit beside the weights": [
        (MEMORY, "test_a_round_too_large_for_the_gpu_is_refused_by_its_limits")
    ],
    "KV memory of fewer tokens than 16 rounds of prompts": [
        (MEMORY, "test_a_round_takes_fewer_prompt_tokens_where_memory_is_short_unless_they_are_given"),
        (MEMORY, "test_fewer_prompt_tokens_are_tried_where_a_round_does_not_fit_at_all"),
    ],
    "weights that cannot be shared with the drafter's process on the same GPU, such as with `expandable_segments`": [
        ("cluster/channels/test_lent_memory.py", "test_an_allocation_that_has_no_handle_is_a_reason_for_each"),
        (LENT, "test_where_nothing_can_be_had_a_drafter_loads_its_own_and_one_line_says_why"),
    ],
    "memory for less than a tenth of the model's positions": [
        (MEMORY, "test_a_memory_that_holds_less_than_a_tenth_of_the_positions_is_warned_of_once")
    ],
    "out of memory in the capture of a graph": [
        (GRAPHS, "test_a_capture_that_lacks_memory_leaves_the_smaller_ones_their_chance")
    ],
    "a capture that fails otherwise": [(GRAPHS, "test_a_failed_capture_runs_eagerly_with_one_warning_that_names_it")],
    "graphs whose replays write something else than eager rounds": [
        ("runtime/checks/test_graph_check.py", "test_graphs_that_write_something_else_are_not_replayed_and_it_is_said")
    ],
}


def test_every_line_of_the_table_has_a_test_and_every_test_a_line():
    text = (ROOT.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    table = text.partition("### The first start on a GPU")[2].partition("\n#")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == list(HELD_BY)
    for held in HELD_BY.values():
        for path, name in held:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
