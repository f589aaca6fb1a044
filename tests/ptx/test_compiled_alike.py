"""Rows that are alike, on compiled code: the bits of a row alone, in a chunk, in a tree and among 3 to 512 others."""

import pytest

pytest.importorskip("triton")

from tests.ptx.test_compiled import run

FILES = ("gpu/test_alike_attention.py", "gpu/test_alike_rows.py", "alike")


def test_a_row_has_the_same_bits_as_compiled(tmp_path):
    executed = run(90, "-m", "not slow", report=tmp_path / "ran", files=FILES)
    attention = {"tree_attention_kernel", "merge_splits_kernel"}
    assert executed == attention | {"_alike_product_kernel", "_add_rms_norm_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_every_case_has_the_same_bits_as_compiled(tmp_path, capability):
    run(capability, "-m", "", report=tmp_path / "ran", files=FILES)
