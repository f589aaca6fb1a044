"""Linear layers whose weights a runtime part may pack, and output heads with float32 logits.

A half-precision output head on a GPU returns float32, because rounding to half precision could give two tokens equal
logits.
"""

import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.runtime.parts import hooks

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
_MANY_ROWS = 128
"""Number of rows of the float32 logits buffer and of the trial product in `widen_logits`; no few-rows kernel takes so
many.
"""


class Packable:
    """A module that may hold its weight in packed form.

    `weight` is then a placeholder with the right shape and dtype.
    """

    def dense_weight(self) -> Tensor:
        """Returns the weight [out, in] as numbers; the result is a copy if the weight is packed."""
        return self.weight

    @property
    def packed(self) -> "Packed | None":
        """Packed weight; None if `weight` holds the numbers."""
        return None

    def packed_tensors(self) -> list[Tensor]:
        """Returns the tensors of the packed weight, if kernels read these tensors in place; else an empty list."""
        return []

    @property
    def why_not_written(self) -> str | None:
        """Reason why new weights cannot be written into the module; None if they can."""
        return None if self.packed is None else "packed as in the checkpoint"

    def write(self, weight: Tensor) -> None:
        """Writes new weights [out, in] of the same dtype into the memory of the old weights, rounded to a packed form.

        `why_not_written` must be None.
        """
        self.weight.data.copy_(weight)

    def save(self) -> Any:
        """Returns a copy of the weight in host memory, from which `restore` restores the weight exactly."""
        return self.dense_weight().detach().to("cpu", copy=True)

    def restore(self, saved: Any) -> None:
        """Writes the weight that `save` has returned."""
        self.write(saved.to(self.weight.device))

    @property
    def storages(self) -> list[Tensor]:
        """Returns tensors in the memory that holds the weight, packed or not."""
        return self.packed_tensors() or [self.weight.data]


class PackedParameters(Packable, ABC):
    """A packable module that is saved with its parameters as floats."""

    @abstractmethod
    def dense_parameters(self) -> dict[str, Tensor]:
        """Returns the packed parameters as floats, by name; empty if no parameter is packed."""
        ...

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": weight for name, weight in self.dense_parameters().items()})


@cache
def packed_class(kind: type[nn.Module], packed: type[PackedParameters]) -> type[nn.Module]:
    """Returns the class of modules of a kind whose parameters are packed."""
    return type(kind.__name__, (packed, kind), {})


class Packed(Protocol):
    """A weight in packed form."""

    def nbytes(self) -> int:
        """Size in bytes."""
        ...


class PackableLinear(Packable, nn.Linear):
    """A linear layer whose weight may be packed."""

    wide = False
    """Whether the matrix product is returned as float32."""
    into: Tensor | None = None
    """Output buffer [num_rows, out] for the float32 product; None allocates the output."""
    alike = False
    """Whether a row's product has the same bits whatever other rows are in the batch."""

    @property
    def multiplies(self) -> bool:
        """Whether this class's own kernels compute the product, instead of torch."""
        return self.packed is not None

    def product(self, rows: Tensor) -> Tensor:
        """Computes [num_rows, in] -> [num_rows, out].

        Terms that runtime parts (such as LoRA) add to the output are left out.
        """
        return functional.linear(rows, self.dense_weight(), self.bias)

    def add_product(self, total: Tensor, rows: Tensor) -> Tensor:
        """Returns `total` [num_rows, out] plus the layer's product for rows [num_rows, in]; may overwrite `total`."""
        return total + self.product(rows)

    def unpack(self) -> None:
        """Restores the weight's row-major form; does nothing in this class."""

    def repack(self) -> object:
        """Rebuilds the packed form from the current weights; does nothing in this class."""

    def write_bias(self, bias: Tensor) -> None:
        """Writes a new bias [out]."""
        self.bias.data.copy_(bias)


class RowsLinear(PackableLinear):
    """A linear layer whose forward is its `product` over flat rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies [..., in] -> [..., out]."""
        return self.product(input.reshape(-1, self.in_features)).view(*input.shape[:-1], self.out_features)


def lay_out_linears(module: nn.Module, deterministic: bool = False) -> None:
    """Lets runtime parts store the weights of linear layers in the layout that their device reads fastest.

    Args:
        deterministic: whether a row's bits must be independent of other rows, even if products are slower.
    """
    for lay_out in hooks("lay_out_linears"):
        lay_out(module, deterministic)


def dense_weight(module: nn.Module) -> Tensor | None:
    """Returns a module's weight as numbers (a copy if the weight is packed); None if the module has no weight."""
    return module.dense_weight() if isinstance(module, Packable) else getattr(module, "weight", None)


def held_bytes(model: nn.Module) -> int:
    """Returns the bytes of memory that a model's parameters take, packed or not; shared storage counts once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    found = [one.packed for one in model.modules() if isinstance(one, Packable)]
    packed = {id(one): one for one in found if one is not None}
    return sum(storages.values()) + sum(one.nbytes() for one in packed.values())


def product(linear: nn.Linear, rows: Tensor) -> Tensor:
    """See `PackableLinear.product`."""
    if isinstance(linear, PackableLinear) and linear.multiplies:
        return linear.product(rows)
    return functional.linear(rows, linear.weight, linear.bias)


def add_product(linear: nn.Linear, total: Tensor, rows: Tensor) -> Tensor:
    """See `PackableLinear.add_product`."""
    if isinstance(linear, PackableLinear) and linear.multiplies:
        return linear.add_product(total, rows)
    if linear.bias is not None:
        return total + functional.linear(rows, linear.weight, linear.bias)
    # addmm adds `total` within the same kernel as the matrix product, which saves a kernel launch and a rounding.
    return total.addmm_(rows, linear.weight.t())


class WideLinear(nn.Linear):
    """A frozen linear layer on a GPU with float32 output.

    The product is accumulated in float32 anyway, whatever the dtype of the weights.
    """

    wide = True
    into: Tensor | None = None
    """See `PackableLinear.into`."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns float32 [..., out] for input [..., in]."""
        rows, given = input.reshape(-1, input.shape[-1]), {} if self.into is None else {"out": self.into}
        # transformers' later operations on logits, such as caps and scales, then run in float32 too.
        out = torch.mm(rows, self.weight.t(), out_dtype=torch.float32, **given)
        return (out if self.bias is None else out.add_(self.bias)).view(*input.shape[:-1], self.out_features)


@torch.inference_mode()
def widen_logits(model: nn.Module) -> bool:
    """Makes a plain half-precision output head on a GPU return float32; returns whether the head now does so.

    No runtime part changes the output head's class, so the class can safely be changed here. The weights stay
    unchanged, whether or not they are tied to the embeddings.
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
    except RuntimeError as error:  # NotImplementedError is a RuntimeError
        if multiplies:
            head.wide = False
        else:
            head.__class__ = nn.Linear
        logger.info("logits stay in %s: %s", head.weight.dtype, str(error).splitlines()[0])
        return False
    finally:
        head.into = None
    return True
