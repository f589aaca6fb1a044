"""Quantized weights of few bits, unpacked from a file. Each group of inputs shares a scale and a shift."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 1 << 21
"""Maximum number of weight elements that are dequantized at once."""


class Form(NamedTuple):
    """Number format of the stored values."""

    name: str
    floats: Callable[[Tensor], Tensor]
    """Converts the uint8 codes to the float32 numbers that they encode."""


INT8 = Form("int8", lambda values: values.view(torch.int8).float())
UINT4, UINT5, UINT6 = (Form(f"uint{bits}", Tensor.float) for bits in (4, 5, 6))
E4M3 = Form("e4m3", lambda values: values.view(torch.float8_e4m3fn).float())
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
E2M1 = Form("e2m1", lambda values: _E2M1.to(values.device)[values.long()])
"""MXFP4 numbers (OCP Microscaling Formats 1.0), doubled so that all of them are integers."""


def half_powers(exponents: Tensor) -> Tensor:
    """Converts MXFP4's uint8 exponents (E8M0, 255 is NaN) to bfloat16 scales for `E2M1` numbers."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)  # 128, not 127: numbers are doubled
    return powers.masked_fill(exponents == 255, torch.nan).bfloat16()


class Scales(NamedTuple):
    """Scales of the groups of each column. The scale of a group is one number, or the product of two numbers."""

    numbers: Tensor
    """[columns, num_groups], floating point or 8-bit integers."""
    factors: Tensor | None = None
    """float16 [columns, num_groups / n]: each multiplies the `numbers` of n neighbouring groups."""

    def select_columns(self, columns: slice) -> "Scales":
        """Scales of a range of columns."""
        return Scales(self.numbers[columns], None if self.factors is None else self.factors[columns])

    def floats(self) -> Tensor:
        """All scales, float32 [columns, num_groups]."""
        numbers = self.numbers.float()
        if self.factors is None:
            return numbers
        return (numbers.unflatten(1, (self.factors.shape[1], -1)) * self.factors.float()[:, :, None]).flatten(1)


class GroupedWeight(NamedTuple):
    """Quantized weight [columns, inputs] = number * scale + shift, with a scale and a shift per group of inputs."""

    form: Form
    values: Tensor
    """uint8 [columns, inputs]: codes that `form` converts to numbers."""
    scales: Scales
    minima: Scales | None = None
    """Shifts of the groups; None if they follow from `zeros` or `offset`."""
    zeros: Tensor | None = None
    """Zero points [columns, num_groups]: shift = -zero * scale. None if the weight has no zero points."""
    offset: float = 0.0
    """Zero point for all groups if `minima` and `zeros` are None: shift = offset * scale."""
    order: Tensor | None = None
    """int64 [inputs]: the input to which each stored position belongs; None if inputs are stored in order."""

    @property
    def group(self) -> int:
        """Inputs per group."""
        return self.values.shape[1] // self.scales.numbers.shape[1]

    def to(self, device: torch.device) -> "GroupedWeight":
        """Copies the weight to a device."""
        return GroupedWeight(*(_moved(part, device) for part in self))

    def dense(self) -> Tensor:
        """Dequantizes the weight to float32 [columns, inputs]."""
        columns, inputs = self.values.shape
        at_once = max(1, _AT_ONCE // inputs)  # limits the memory of the float64 intermediates
        parts = [self._dense(slice(begin, begin + at_once)) for begin in range(0, columns, at_once)]
        return torch.cat(parts) if parts else self.values.float()

    def _dense(self, columns: slice) -> Tensor:
        scales = self.scales.select_columns(columns).floats()
        if self.minima is not None:
            shifts = self.minima.select_columns(columns).floats()
        else:
            shifts = scales * (self.offset if self.zeros is None else -self.zeros[columns].float())
        numbers = self.form.floats(self.values[columns]).unflatten(1, (-1, self.group))
        # In float64 number * scale is exact, so the weight is rounded once, to float32. In float32 this product would
        # be exact only with float16 scales.
        wide = numbers.double().mul_(scales[:, :, None]).add_(shifts[:, :, None]).float().flatten(1)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, Scales):
        return Scales(*(_moved(each, device) for each in part))
    return part.to(device) if isinstance(part, Tensor) else part
