"""Linear layers that are more than torch's: weights that a part holds in a form of its own, and logits in float32.

An output matrix in half precision on a GPU leaves float32: rounding makes no two tokens equally likely.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.runtime.parts import hooks

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
_MANY_ROWS = 128
"""Rows that no kernel for few of them takes."""


class Packable:
    """A module that may hold its weight in another form; `weight` then has its shape and dtype alone."""

    def dense_weight(self) -> Tensor:
        """The weight [out, in] as numbers, a copy where it is packed."""
        return self.weight

    @property
    def packed(self) -> "Packed | None":
        """The packed weight; None where `weight` holds it."""
        return None

    def packed_tensors(self) -> list[Tensor]:
        """Tensors of the packed weight, where kernels read these as they lie."""
        return []


class Packed(Protocol):
    """A weight in another form."""

    def nbytes(self) -> int:
        """Memory that it takes."""
        ...


class FewRows(Protocol):
    """Products of a linear layer by few rows, where a kernel is faster than the library."""

    def takes(self, num_rows: int) -> bool:
        """Whether it is for so many rows."""
        ...

    def ours(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """The products, added to a total in place where there is one."""
        ...


FEW_ROWS = "_few_rows"
"""Attribute of linear layers with a `FewRows`."""


class PackableLinear(Packable, nn.Linear):
    """A linear layer that may be packed."""

    wide = False
    """Then products leave as float32."""
    into: Tensor | None = None
    """Where they go then, [num_rows, out]; None makes room."""
    alike = False
    """Whether a row of its product has the same bits in any batch."""

    @property
    def multiplies(self) -> bool:
        """Whether its product is another one than torch's."""
        return self.packed is not None

    def product(self, rows: Tensor) -> Tensor:
        """[num_rows, in] -> [num_rows, out], without what others add to the layer's output."""
        return functional.linear(rows, self.dense_weight(), self.bias)

    def add_product(self, total: Tensor, rows: Tensor) -> Tensor:
        """A total [num_rows, out] and products of rows [num_rows, in]; the total may change."""
        return total + self.product(rows)

    def unpack(self) -> None:
        """Hold the weight row by row again."""

    def lay(self) -> object:
        """Take the weights as they now are."""

    @property
    def is_writable(self) -> bool:
        """Whether its form holds any numbers."""
        return self.packed is None

    def write(self, weight: Tensor) -> None:
        """Hold other numbers [out, in] of the weight's dtype, of a writable layer, in the memory of the old ones."""
        self.weight.data.copy_(weight)

    def write_bias(self, bias: Tensor) -> None:
        """Hold another bias [out]."""
        self.bias.data.copy_(bias)

    @property
    def storage(self) -> Tensor:
        """A tensor that lies where the weight does, in whatever form."""
        return self.weight.data


def lay_out_linears(module: nn.Module, deterministic: bool = False) -> None:
    """Let parts store the weights of linear layers as their device reads them quickest.

    Args:
        deterministic: a row shall have the same bits whatever is beside it, whatever that takes.
    """
    for lay_out in hooks("lay_out_linears"):
        lay_out(module, deterministic)


def dense_weight(module: nn.Module) -> Tensor | None:
    """The weight of any module as a tensor of numbers, a copy where it is packed; None where it has none."""
    return module.dense_weight() if isinstance(module, Packable) else getattr(module, "weight", None)


def held_bytes(model: nn.Module) -> int:
    """Of a model's parameters as they lie, packed or not."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    found = [one.packed for one in model.modules() if isinstance(one, Packable)]
    packed = {id(one): one for one in found if one is not None}
    return sum(storages.values()) + sum(one.nbytes() for one in packed.values())


def product(linear: nn.Linear, rows: Tensor) -> Tensor:
    """See `PackableLinear.product`."""
    if isinstance(linear, PackableLinear) and linear.multiplies:
        return linear.product(rows)
    few: FewRows | None = linear.__dict__.get(FEW_ROWS)
    if few is not None and few.takes(len(rows)):
        return few.ours(rows)
    return functional.linear(rows, linear.weight, linear.bias)


def add_product(linear: nn.Linear, total: Tensor, rows: Tensor) -> Tensor:
    """See `PackableLinear.add_product`."""
    if isinstance(linear, PackableLinear) and linear.multiplies:
        return linear.add_product(total, rows)
    few: FewRows | None = linear.__dict__.get(FEW_ROWS)
    if few is not None and few.takes(len(rows)):
        return few.ours(rows, total)
    if linear.bias is not None:
        return total + functional.linear(rows, linear.weight, linear.bias)
    # The product is added where it is summed: one launch, and one rounding less.
    return total.addmm_(rows, linear.weight.t())


class WideLinear(nn.Linear):
    """A frozen linear layer on a GPU whose products leave as float32, in which they are summed anyway."""

    wide = True
    into: Tensor | None = None
    """See `PackableLinear.into`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> float32 [..., out]"""
        rows, given = input.reshape(-1, input.shape[-1]), {} if self.into is None else {"out": self.into}
        # What transformers does to logits behind it, such as caps and scales, then is in float32, too.
        out = torch.mm(rows, self.weight.t(), out_dtype=torch.float32, **given)
        return (out if self.bias is None else out.add_(self.bias)).view(*input.shape[:-1], self.out_features)


@torch.inference_mode()
def widen_logits(model: nn.Module) -> bool:
    """Let a model's output matrix leave float32 where it is a plain one in half precision on a GPU; whether it does.

    Parts change decoder layers alone, and weights stay what they are, tied or not.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_cuda or head.weight.dtype not in HALVES:
        return False
    multiplies = isinstance(head, PackableLinear) and head.multiplies
    if not multiplies and type(head) is not nn.Linear:
        return False
    if multiplies:
        head.wide = True
    else:
        head.__class__ = WideLinear
    head.into = head.weight.new_empty(_MANY_ROWS, head.out_features, dtype=torch.float32)
    try:
        head(head.weight.new_zeros(_MANY_ROWS, head.in_features))
    except RuntimeError as error:  # NotImplementedError is one
        if multiplies:
            head.wide = False
        else:
            head.__class__ = nn.Linear
        logger.info("logits stay in %s: %s", head.weight.dtype, str(error).splitlines()[0])
        return False
    finally:
        head.into = None
    return True
