"""The kernels' own tests on compiled code: what Triton makes for a GPU is executed, and held against the references.

In a process of its own: whether Triton interprets or compiles is chosen once per process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
KERNELS = {
    "tree_attention_kernel",
    "merge_splits_kernel",
    "_store_kv_kernel",
    "_move_kv_kernel",
    "_add_rms_norm_kernel",
    "_rotate_and_store_kernel",
    "_silu_mul_kernel",
    "_shrink_kernel",
    "_expand_kernel",
    "_noise_kernel",
    "_count_kernel",
    "_scale_kernel",
    "_edge_kernel",
    "_pass_kernel",
    "_filter_kernel",
    "_best_kernel",
    "_embed_beside_kernel",
    "_few_rows_product_kernel",
    "_embed_to_heads_kernel",
    "_choose_experts_kernel",
    "_route_experts_kernel",
    "_grouped_product_kernel",
    "_sum_experts_kernel",
    "_rotations_kernel",
    "_slot_mapping_kernel",
    "_check_kernel",
    "_place_kernel",
    "_settle_kernel",
    "_candidates_kernel",
    "level_kernel",
    "_finalize_kernel",
    "_walk_kernel",
    "_ancestors_kernel",
    "_paths_kernel",
    "_delta_rule_kernel",
    "_selective_scan_kernel",
    "_convolve_kernel",
    "_advance_recurrence_kernel",
    "_advance_convolution_kernel",
    "_gated_norm_kernel",
    "_packed_product_kernel",
    "_unpack_kernel",
    "_norm_parts_kernel",
    "_store_latents_kernel",
    "_keep_latents_kernel",
}
SMALL = (
    "(counts_what_its_reference and 13-1) or "
    "(groups_are and 150-4 and biased) or (a_shared_expert and whole) or (experts_are_chosen and 3-8) or "
    "(pairs_are and 7-3) or embeddings_are or (few_rows_are and 17-130 and (added or normed)) or "
    "(heads_of and 3-70 and tree and norms) or levels_of or "
    "angles_are or addresses_are or best_tokens or (trees_are_believed and sound-trees) or (nodes_lie and 6)"
    " or (paths_are_settled and (move or 9-12)) or "
    "splits_without_keys or strided_rows or longer_than_a_program_move or chain_of_moves or noise_has or walks_are"
    " or masks_and_paths or word_has_bits or gated_activation or norm_of_a_sum or queries_keys_and_values or row_of_nan"
    " or longer_than_a_program_are_stored or without_any_token or (kernels_of_gpus and one-1)"
    " or (packed and (its_reference or numbers_are) and q4_k) or a_tile_of_the_device or (a_row_alone and plain)"
    " or (alike and (bfloat16 or tree)) or (the_delta_rule and 2-7-12-41-normed)"
    " or ((selective_scan or channel_scan) and 2-7) or (a_convolution_is and 2-7-41) or (states_advance and 2-7-4-3)"
    " or (a_gated_norm and dtypes1) or a_norm_is_added or (rows_go_where and deep)"
)
"""A case or a few of each kernel."""


def run(capability: int, *options: str, report: Path, files: tuple[str, ...] = ("",)) -> set[str]:
    """Run the kernels' tests, all or those of some files, for a target; returns the kernels that were executed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", *(f"tests/kernels/{file}" for file in files)]
    command += ["--ptx", str(capability), "--ptx-report", str(report)]
    command += ["-p", "no:cacheprovider", "--tb=short", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return set(json.loads(report.read_text()))


def test_a_few_kernels_are_their_references_as_compiled(tmp_path):
    """Attention and a walk: compiling the others takes a minute and a half."""
    files = ("gpu/test_triton_attention.py", "gpu/test_triton_tree.py")
    chosen = "splits_without_keys or (walks_are and 9-4)"
    executed = run(90, "-k", chosen, "-m", "not slow", report=tmp_path / "ran", files=files)
    assert executed >= {"tree_attention_kernel", "_walk_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_is_its_reference_as_compiled(tmp_path, capability):
    chosen = f"({SMALL}) and not test_triton_compile"
    executed = run(capability, "-k", chosen, "-m", "not gpu and not soak", report=tmp_path / "ran")
    assert executed >= KERNELS, f"not executed: {KERNELS - executed}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_every_case_is_its_reference_as_compiled(tmp_path, capability):
    """Before capability 8.9 Triton compiles nothing that has float8."""
    skipped = " and not fp8" if capability < 89 else ""
    chosen = f"(triton or alike or adapters) and not test_triton_compile{skipped}"
    executed = run(capability, "-k", chosen, "-m", "not gpu and not soak", report=tmp_path / "ran")
    assert executed >= KERNELS, f"not executed: {KERNELS - executed}"
