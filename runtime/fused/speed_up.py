"""Bit-exact speed-ups of norms and rotary embeddings for the few rows of a decode round.

The time of a small batch is proportional to its number of operations. Each replacement is first compared with the
module's own code, and is not used if a bit of the result differs.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.runtime.verifier.layers.trial import drawn_rows

FUNCTION_NAME = "apply_rotary_pos_emb"
"""Name of the rotation function (q, k, cos, sin) -> (q, k), which is a global of transformers' modeling files."""
_ARGUMENTS = ["q", "k", "cos", "sin"]
_EPS_NAMES = ("variance_epsilon", "eps")


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Makes root-mean-square norms run as one torch operation instead of five; returns the number of norms replaced."""
    num_fused = 0
    for module in model.modules():
        kind, weight = type(module), getattr(module, "weight", None)
        eps_name = next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
        if not kind.__name__.endswith("RMSNorm") or kind is nn.RMSNorm or eps_name is None:
            continue
        if isinstance(weight, nn.Parameter) and weight.ndim == 1 and _same_norm(module, getattr(module, eps_name)):
            module.__class__ = _fused_norm(kind, eps_name)
            num_fused += 1
    return num_fused


def _same_norm(module: nn.Module, eps: float) -> bool:
    weight = module.weight
    # A cast at another point of the computation shows in large rows.
    rows = drawn_rows(len(weight), weight, (-4, 3))
    return torch.equal(module(rows), functional.rms_norm(rows, weight.shape, weight, eps))


@cache
def _fused_norm(kind: type[nn.Module], eps_name: str) -> type[nn.Module]:
    """Returns a subclass of `kind` with another forward. Weights and parameter names stay unchanged."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # attribute access to a parameter is slow
        return torch.rms_norm(hidden_states, weight.shape, weight, self.__dict__[eps_name])

    return type(kind.__name__, (kind,), {"forward": forward})


class Rope:
    """Replacement for one model's `apply_rotary_pos_emb` (arXiv 2104.09864; rotate-half as in GPT-NeoX).

    Rotates queries and keys at once. The negation of one half is moved into the sines, which are computed once for all
    layers.

    Args:
        original: the model's own function, which is called for arguments that this class does not support.
    """

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys [1, heads, num_tokens, dim] by cos and sin [1, num_tokens, dim]."""
        num_heads, dim = q.shape[1], q.shape[3]
        if args or kwargs or sin.shape[-1] != dim or sin.dtype != q.dtype or torch.compiler.is_compiling():
            return self.original(q, k, cos, sin, *args, **kwargs)
        prepared = self._prepared
        # All layers of a pass receive the same tensor objects.
        if prepared is None or prepared[0] is not sin:
            low, high = sin.chunk(2, dim=-1)
            self._prepared = prepared = (sin, cos[:, None], torch.cat((-low, high), dim=-1)[:, None])
        _, cos, sin = prepared
        heads = torch.cat((q, k), dim=1)
        rotated = heads.roll(dim // 2, -1).mul_(sin).add_(heads.mul_(cos))
        return rotated[:, :num_heads], rotated[:, num_heads:]


@torch.inference_mode()
def fuse_rope(model: nn.Module) -> int:
    """Makes attention modules rotate with `Rope`, which needs 7 operations per layer instead of 16.

    Returns the number of modules.
    """
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())
    fused: dict[type[nn.Module], type[nn.Module] | None] = {}
    num_fused = 0
    for module in model.modules():
        kind = type(module)
        if kind not in fused:
            fused[kind] = _with_rope(kind, dtype)
        if fused[kind] is not None:
            module.__class__ = fused[kind]
            num_fused += 1
    return num_fused


def _with_rope(kind: type[nn.Module], dtype: torch.dtype) -> type[nn.Module] | None:
    """Returns a subclass of `kind` that rotates with `Rope`; None if `kind` has no rotation that `Rope` supports."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or FUNCTION_NAME not in forward.__code__.co_names:
        return None
    rope = Rope(forward.__globals__[FUNCTION_NAME])
    if isinstance(rope.original, Rope) or not _same_rope(rope, dtype):
        return None
    # The new forward runs transformers' own code, in which the global name `FUNCTION_NAME` refers to another function.
    names = {**forward.__globals__, FUNCTION_NAME: rope}
    # The module's name is not copied, because torch.compile would then look the function up in the original module.
    del names["__name__"]
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": copy})


def _same_rope(rope: Rope, dtype: torch.dtype) -> bool:
    names = [
        name
        for name, parameter in inspect.signature(rope.original).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    if names != _ARGUMENTS:
        return False
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    # The comparison uses the model's dtype: an original that computes in a higher precision differs from `Rope` only in
    # lower dtypes.
    q, k = (draw(1, 5, heads, 8).transpose(1, 2).to(dtype) for heads in (4, 2))
    cos, sin = (draw(1, 5, 4).repeat(1, 1, 2).to(dtype) for _ in range(2))
    try:
        expected = rope.original(q, k, cos, sin)
    except RuntimeError:  # the original function expects angles of another shape
        return False
    return all(torch.equal(ours, theirs) for ours, theirs in zip(rope(q, k, cos, sin), expected, strict=True))
