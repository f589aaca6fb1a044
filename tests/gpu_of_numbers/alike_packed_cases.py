"""Deterministic mode over packed weights on the GPU of numbers; as `alike_cases`, with `--ptx`."""

import pytest
import torch

pytest.importorskip("gguf")
from tests.gpu_of_numbers.alike_cases import COUNT, check_load, check_texts, plainly, short_splits  # noqa: F401, a fixture
from tests.gpu_of_numbers.device import CUDA
from tests.gpu_of_numbers.packed_cases import write
from wingbeat.runtime.verifier.loading.loader import load_model


@pytest.mark.parametrize("kind", ["Q4_0", "fp8", "awq"])
def test_texts_by_packed_weights_are_the_same_on_and_off_and_alone(gpu, tmp_path, kind):
    verifier = load_model(write(tmp_path, kind), torch.bfloat16, CUDA, deterministic=True)
    check_load(check_texts(verifier, "tree", plainly(verifier, COUNT, 1)))
    assert gpu.launches["_packed_product_kernel"] > 0
