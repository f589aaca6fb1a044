"""Kernels held against their references on a device: right ones pass, wrong ones are named and replaced."""

from collections.abc import Callable, Iterator

import pytest
import torch

from wingbeat.kernels import choice
from wingbeat.kernels.gpu import comparison
from wingbeat.kernels.gpu.comparison import CASES, Shape, differences, replace_wrong

# Without a GPU a kernel runs on tensors of the CPU, in Triton's interpreter or as compiled for `--ptx`.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SHAPES = [
    Shape(torch.float32, 2, 1, head_dim=64),
    pytest.param(Shape(torch.float16, 2, 1, head_dim=80), marks=pytest.mark.slow),
    pytest.param(Shape(torch.float32, 2, 2, head_dim=256), marks=pytest.mark.slow),
]
SLOW = ("choose_tokens", "packed_product")
"""Kernels whose comparison takes more than a few seconds in the interpreter."""


@pytest.fixture
def kernels_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs kernels in the first run of each case and references in the second, as a GPU does without this fixture."""
    if DEVICE.type == "cuda":
        yield
        return
    runs = [0]

    def run_of(case: Callable) -> Callable:
        def run(device: torch.device, shape: Shape) -> list[torch.Tensor]:
            runs[0] += 1
            on = runs[0] % 2 == 1
            with monkeypatch.context() as patch:
                patch.setattr(choice, "compiled", lambda name, tensor: choice.module_of(name) if on else None)
                return case(device, shape)

        return run

    monkeypatch.setattr(comparison, "CASES", {name: run_of(case) for name, case in CASES.items()})
    monkeypatch.setattr(choice, "_replaced", set())
    yield
    assert runs[0]


def test_every_kernel_has_a_case():
    assert set(CASES) == set(choice.KERNELS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in choice.KERNELS]
)
def test_a_kernel_is_its_reference(kernels_first: None, monkeypatch: pytest.MonkeyPatch, shape: Shape, name: str):
    monkeypatch.setattr(comparison, "CASES", {name: comparison.CASES[name]})
    assert differences(DEVICE, shape) == []


@pytest.mark.parametrize("name", choice.KERNELS)
def test_a_kernel_that_computes_something_else_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(choice, "_replaced", set())
    runs = [0]

    def ruined(device: torch.device, shape: Shape) -> list[torch.Tensor]:
        runs[0] += 1
        parts = [part.clone() for part in CASES[name](device, shape)]
        if runs[0] == 1:
            last = parts[-1]
            last.copy_(last * 2 + 1 if last.is_floating_point() else last ^ 1)
        return parts

    monkeypatch.setattr(comparison, "CASES", {name: ruined})
    (difference,) = replace_wrong(DEVICE, Shape(torch.float32, head_dim=64))
    assert difference.name == name
    assert "differ" in str(difference)
    assert choice.replaced() == (name,)


def test_a_kernel_that_does_not_compile_is_replaced_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    def broken(device: torch.device, shape: Shape) -> list[torch.Tensor]:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(choice, "_replaced", set())
    monkeypatch.setattr(comparison, "CASES", {"silu_mul": broken})
    (difference,) = replace_wrong(DEVICE, Shape())
    assert str(difference) == "kernel silu_mul: RuntimeError: Failed to find C compiler."
    assert choice.replaced() == ("silu_mul",)


def test_heads_beyond_the_kernels_run_torchs_attention_and_narrower_ones_the_kernel(
    kernels_first: None, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def kernel(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        asked.append(query.shape[3])
        raise RuntimeError("the kernel")

    monkeypatch.setattr("wingbeat.kernels.gpu.attention.launch.tree_attention", kernel)
    monkeypatch.setattr(comparison, "CASES", {"attention": comparison.CASES["attention"]})
    assert replace_wrong(DEVICE, Shape(torch.float32, 2, 1, head_dim=512)) == []
    assert asked == []
    assert [one.name for one in replace_wrong(DEVICE, Shape(torch.float32, 2, 1, head_dim=64))] == ["attention"]
    assert asked == [64]


def test_caches_of_eight_bits_are_not_asked_for_where_there_are_none(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(comparison, "CASES", {"store_kv": lambda _, shape: asked.append(shape.fp8_cache) or []})
    assert differences(torch.device("cuda", 0), Shape(fp8_cache=True)) == []
    assert asked == [False, False]


def test_a_name_that_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel 'attend' does not exist: it must be one of attention, "):
        choice.replace("attend")
