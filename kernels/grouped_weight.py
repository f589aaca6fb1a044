"""Weights of few bits in groups of inputs that share a scale, as files have them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 1 << 21
"""Numbers of a weight that are unpacked together."""


class Form(NamedTuple):
    """A form of numbers."""

    name: str
    floats: Callable[[Tensor], Tensor]
    """The numbers in float32 that uint8 stand for."""


INT8 = Form("int8", lambda values: values.view(torch.int8).float())
UINT4, UINT5, UINT6 = (Form(f"uint{bits}", Tensor.float) for bits in (4, 5, 6))
E4M3 = Form("e4m3", lambda values: values.view(torch.float8_e4m3fn).float())
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
E2M1 = Form("e2m1", lambda values: _E2M1.to(values.device)[values.long()])
"""Twice the floats of four bits of MXFP4 (OCP Microscaling Formats 1.0), which are whole then."""


def half_powers(exponents: Tensor) -> Tensor:
    """Scales of `E2M1` numbers, bfloat16, from uint8 exponents of MXFP4 (E8M0), of which 255 is NaN."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)  # the numbers are twice the file's
    return powers.masked_fill(exponents == 255, torch.nan).bfloat16()


class Scales(NamedTuple):
    """A number of each group of a column, or the product of two."""

    numbers: Tensor
    """[columns, num_groups]: floats, or whole numbers of a byte"""
    by: Tensor | None = None
    """float16 [columns, num_groups / n]: each multiplies n neighbours."""

    def of(self, columns: slice) -> "Scales":
        """Scales of some columns."""
        return Scales(self.numbers[columns], None if self.by is None else self.by[columns])

    def floats(self) -> Tensor:
        """float32 [columns, num_groups]"""
        numbers = self.numbers.float()
        if self.by is None:
            return numbers
        return (numbers.unflatten(1, (self.by.shape[1], -1)) * self.by.float()[:, :, None]).flatten(1)


class GroupedWeight(NamedTuple):
    """A weight [columns, inputs] = number * scale + shift, with a scale and a shift of each group of inputs."""

    form: Form
    values: Tensor
    """uint8 [columns, inputs]: of which the form makes numbers"""
    scales: Scales
    minima: Scales | None = None
    """The shifts."""
    zeros: Tensor | None = None
    """[columns, num_groups], likewise; a shift is minus this times the scale."""
    offset: float = 0.0
    """A shift is this times the scale, where there is neither."""
    order: Tensor | None = None
    """int64 [inputs]: which input of a row each of these is; None where they are in order."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.values.shape[1] // self.scales.numbers.shape[1]

    def to(self, device: torch.device) -> "GroupedWeight":
        """A copy on a device."""
        return GroupedWeight(*(_moved(part, device) for part in self))

    def dense(self) -> Tensor:
        """The weight itself, in float32."""
        columns, inputs = self.values.shape
        at_once = max(1, _AT_ONCE // inputs)  # beside them lie the same numbers in float64
        parts = [self._dense(slice(begin, begin + at_once)) for begin in range(0, columns, at_once)]
        return torch.cat(parts) if parts else self.values.float()

    def _dense(self, columns: slice) -> Tensor:
        scales = self.scales.of(columns).floats()
        if self.minima is not None:
            shifts = self.minima.of(columns).floats()
        else:
            shifts = scales * (self.offset if self.zeros is None else -self.zeros[columns].float())
        numbers = self.form.floats(self.values[columns]).unflatten(1, (-1, self.group))
        # Rounded once: products with scales of float16 are float32 numbers, of wider ones not.
        wide = numbers.double().mul_(scales[:, :, None]).add_(shifts[:, :, None]).float().flatten(1)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, Scales):
        return Scales(*(_moved(each, device) for each in part))
    return part.to(device) if isinstance(part, Tensor) else part
