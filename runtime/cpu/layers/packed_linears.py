"""Linear layers on CPUs whose weights are stored in an order that kernels can read fast: input-major, or packed in
panels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.cpu.eight_bits import GROUP, in_groups, to_eight_bits
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.library import largest_matrix
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.cpu.panels import Panels, fits_bfloat16, rounded
from wingbeat.kernels.cpu.structs import KINDS, Matrix, matrix_of
from wingbeat.runtime.verifier.layers.linears import PackableLinear

_LEAST_ROUNDED = 512
"""Fewest inputs of a draft head's weight that is rounded; smaller weights lie in caches."""


def lay_out_linears(module: nn.Module, deterministic: bool = False) -> int:
    """Stores float32 weights on the CPU input-major: [out, in] with strides (1, out). Returns the number of changed
    layers.

    With these strides the matrix product with eight rows (a chain to verify) takes half as long as with PyTorch's
    layout, and the product with a single row takes no longer. Shapes, names and values stay; tied embeddings share the
    new layout. Weights of other dtypes or on other devices are not changed, because torch's kernels for them are fast
    with the usual layout.

    Args:
        deterministic: whether to change weights of other dtypes too, because in deterministic mode the C++ kernels
            compute all matrix products, even where they are slower.
    """
    num_laid = 0
    for linear in module.modules():
        if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu":
            continue
        if linear.weight.dtype != torch.float32 and not deterministic:
            continue
        if isinstance(linear, InputMajorLinear) and linear.panels is not None:
            continue
        linear.weight.data = linear.weight.data.t().contiguous().t()
        if type(linear) is nn.Linear and linear.bias is None and not linear.weight.requires_grad:
            linear.__class__ = InputMajorLinear
            linear.deterministic = deterministic
            linear.repack()
        num_laid += 1
    return num_laid


class InputMajorLinear(PackableLinear):
    """A frozen linear layer with input-major or packed weights.

    The base class's forward is used where no kernel supports the layer. With C++ kernels, a row's output does not
    depend on the other rows.
    """

    deterministic = False
    """Whether to use the C++ kernels for all dtypes and sizes, so that a row's result never depends on other rows."""
    eight_bits = False
    """Whether the weight's values can be represented in eight bits (`wingbeat.kernels.cpu.eight_bits`), so that they
    are packed as int8.
    """
    _laid: tuple[Tensor, Tensor, bool] | None = None
    """The weight, its transposed view [in, out], and whether the C++ kernels may multiply by it."""
    panels: Panels | GroupPanels | None = None
    """The packed weight with the bias; None if the weight is not packed. If it is packed, `weight` keeps its shape and
    dtype, but its values are NaN.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies [..., in] -> [..., out]."""
        if self.panels is not None:
            return self._multiply(input)
        if self.bias is not None:
            return super().forward(input)
        # not `self.weight`, because attribute access to a parameter is slow
        weight, laid = self._parameters["weight"], self._laid
        if laid is None or laid[0] is not weight:
            laid = self.repack()
        _, laid_weight, ours = laid
        if self.deterministic:
            return cpu_kernels().linear(input.contiguous(), laid_weight, wide=self.wide)
        if not ours or torch.compiler.is_compiling() or torch.is_grad_enabled() or not input.is_contiguous():
            return torch.matmul(input, laid_weight)
        kernels = cpu_kernels()
        return torch.matmul(input, laid_weight) if kernels is None else kernels.linear(input, laid_weight)

    def _multiply(self, input: Tensor) -> Tensor:
        panels = self.panels
        kernels = None if torch.compiler.is_compiling() or torch.is_grad_enabled() else cpu_kernels()
        if kernels is None or input.dtype != panels.dtype:
            return functional.linear(input, panels.dense(), self.bias)
        return kernels.packed_linear(input.contiguous(), panels, wide=self.wide)

    def repack(self) -> tuple[Tensor, Tensor, bool]:
        """See `PackableLinear.repack`."""
        weight = self._parameters["weight"]
        ours = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.t().is_contiguous()
        ours = ours and weight.numel() <= largest_matrix()
        self._laid = (weight, weight.t(), ours)
        return self._laid

    def pack(self, kernels: CpuKernels, parts: tuple[int, ...] | None = None, held: torch.dtype | None = None) -> None:
        """Replaces the weight by panels, built by `Panels.pack`.

        Afterwards `weight` contains NaN; `dense_weight` returns the values.
        """
        weight, bias = self._parameters["weight"], self.bias
        bias = None if bias is None else bias.data.float()
        held = torch.int8 if self.eight_bits else held
        self._hold(Panels.pack(weight.data, kernels.panel, parts, held, bias))

    def round(self, kernels: CpuKernels, parts: tuple[int, ...] | None = None) -> None:
        """Replaces the weight by panels of int8 (`in_groups`), whose products round their rows to int8 as well.

        Args:
            parts: as for `GroupPanels.of`.
        """
        weight, bias = self._parameters["weight"].data, self.bias
        bias = None if bias is None else bias.data.float()
        self._hold(kernels.pack_groups(in_groups(weight), bias, parts=parts, dtype=weight.dtype))
        self.panels.round_rows()

    def _hold(self, panels: Panels | GroupPanels) -> None:
        weight = self._parameters["weight"]
        self.panels, self._laid = panels, None
        nothing = weight.data.new_full((), float("nan")).expand(weight.shape)
        self._parameters["weight"] = nn.Parameter(nothing, requires_grad=False)

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return super().dense_weight() if self.panels is None else self.panels.dense()

    @property
    def why_not_written(self) -> str | None:
        """See `Packable.why_not_written`."""
        return super().why_not_written if isinstance(self.panels, GroupPanels) else None

    def write(self, weight: Tensor) -> None:
        """See `Packable.write`. If the panels are bfloat16 and the new values are not representable in bfloat16, new
        panels are allocated.
        """
        panels = self.panels
        if panels is None:
            return super().write(to_eight_bits(weight).dense() if self.eight_bits else weight)
        held = panels.storage.dtype if self.eight_bits or fits_bfloat16(weight) else weight.dtype
        made = Panels.pack(weight, panels.storage.shape[2], panels.parts, held, panels.bias)
        if made.storage.dtype != panels.storage.dtype:
            self.panels = made
            return
        panels.storage.copy_(made.storage)
        if panels.scales is not None:
            panels.scales.copy_(made.scales)

    def write_bias(self, bias: Tensor) -> None:
        """See `PackableLinear.write_bias`."""
        super().write_bias(bias)
        if self.panels is not None and self.panels.bias is not None:
            self.panels.bias.copy_(bias)

    @property
    def storages(self) -> list[Tensor]:
        """See `Packable.storages`."""
        return [self.panels.storage] if isinstance(self.panels, Panels) else super().storages

    @property
    def packed(self) -> Panels | GroupPanels | None:
        """See `Packable.packed`."""
        return self.panels

    def unpack(self) -> None:
        """See `PackableLinear.unpack`."""
        if self.panels is not None:
            self._parameters["weight"] = nn.Parameter(self.panels.dense(), requires_grad=False)
            self.panels = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy omits the view, which would become a second copy of the weights, and the panels, which contain
        # addresses.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_laid", "panels")}
        if self.panels is not None:
            weight = nn.Parameter(self.panels.dense(), requires_grad=False)
            state["_parameters"] = self._parameters | {"weight": weight}
        return state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.panels is not None:
            destination[f"{prefix}weight"] = self.panels.dense()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "InputMajorLinear":
        self.unpack()
        self._laid = None
        return super()._apply(fn, recurse)


def pack_linear(
    linear: nn.Module, kernels: CpuKernels, parts: tuple[int, ...] | None = None, held: torch.dtype | None = None
) -> bool:
    """Packs a frozen linear layer on the CPU with `Panels.pack`. Returns whether the layer is packed now."""
    if not _can_pack(linear):
        return False
    if type(linear) is nn.Linear:
        linear.__class__ = InputMajorLinear
    if linear.panels is None:
        linear.pack(kernels, parts, held)
    return True


def _can_pack(linear: nn.Module) -> bool:
    if not isinstance(linear, InputMajorLinear) and type(linear) is not nn.Linear:
        return False
    weight = linear.weight
    return not weight.requires_grad and weight.device.type == "cpu" and weight.dtype in KINDS


def pack_draft_linear(linear: nn.Module, kernels: CpuKernels, parts: tuple[int, ...] | None = None) -> bool:
    """`pack_linear` for a draft head. A large weight is rounded to int8, and so are the rows that it multiplies,
    because reading weights takes most of the time of a draft, and no answer depends on them.
    """
    packed = isinstance(linear, InputMajorLinear) and linear.panels is not None
    if not packed and linear.in_features >= _LEAST_ROUNDED and linear.in_features % GROUP == 0:
        whole = all(part % kernels.panel == 0 for part in (parts or ())[:-1])
        if whole and _can_pack(linear):
            linear.__class__ = InputMajorLinear
            linear.round(kernels, parts)
    return pack_linear(linear, kernels, parts)


def matrices_of(linear: nn.Module) -> list[Matrix]:
    """Returns a linear layer's weight as the matrices that kernels read, which point to the layer's memory. The caller
    must keep the layer alive.

    Raises:
        ValueError: as for `matrix_of`; or the module is not a linear layer.
    """
    if isinstance(linear, InputMajorLinear) and linear.panels is not None:
        if linear.panels.order is not None:
            raise ValueError("its inputs lie in another order")
        return list(linear.panels.matrices)
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{type(linear).__name__} is no linear layer")
    return [matrix_of(linear.weight, linear.bias)]


def draft_matrices(linear: nn.Module) -> list[Matrix]:
    """`matrices_of` for a draft head. The kernels may round a draft head's activations to bfloat16, because no answer
    depends on them.
    """
    return [rounded(matrix) for matrix in matrices_of(linear)]
