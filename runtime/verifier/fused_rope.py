"""Rotary embedding of a loaded model in half as many operations, where that gives the same bits.

transformers' modules rotate queries and keys one after the other and negate half of each. Here both are rotated at
once, and the negated half is the sine's, which all layers share: seven operations a layer in place of sixteen. Nothing
is assumed about a module: its own function is held against this one first.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, nn

FUNCTION_NAME = "apply_rotary_pos_emb"
"""What transformers' modeling files call it: (q, k, cos, sin) -> (q, k), found among the module's globals."""

_ARGUMENTS = ["q", "k", "cos", "sin"]


class Rope:
    """`apply_rotary_pos_emb` of one model (RoFormer, arXiv 2104.09864; halves rotated as in GPT-NeoX).

    Args:
        original: the model's own function, for what this one does not cover.
    """

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, [1, heads, num_tokens, dim] each, by cos and sin [1, num_tokens, dim]."""
        num_heads, dim = q.shape[1], q.shape[3]
        if args or kwargs or sin.shape[-1] != dim or sin.dtype != q.dtype or torch.compiler.is_compiling():
            return self.original(q, k, cos, sin, *args, **kwargs)
        prepared = self._prepared
        # Every layer of a pass gets the very same tensors.
        if prepared is None or prepared[0] is not sin:
            low, high = sin.chunk(2, dim=-1)
            self._prepared = prepared = (sin, cos[:, None], torch.cat((-low, high), dim=-1)[:, None])
        _, cos, sin = prepared
        heads = torch.cat((q, k), dim=1)
        rotated = heads.roll(dim // 2, -1).mul_(sin).add_(heads.mul_(cos))
        return rotated[:, :num_heads], rotated[:, num_heads:]


@torch.inference_mode()
def fuse_rope(model: nn.Module) -> int:
    """Let the attention modules of a model rotate by `Rope` where nothing changes; returns how many do."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())
    fused: dict[type[nn.Module], type[nn.Module] | None] = {}
    num_fused = 0
    for module in model.modules():
        kind = type(module)
        if kind not in fused:
            fused[kind] = _fused(kind, dtype)
        if fused[kind] is not None:
            module.__class__ = fused[kind]
            num_fused += 1
    return num_fused


def _fused(kind: type[nn.Module], dtype: torch.dtype) -> type[nn.Module] | None:
    """The same module with another rotation; None where it has none that `Rope` covers."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or FUNCTION_NAME not in forward.__code__.co_names:
        return None
    rope = Rope(forward.__globals__[FUNCTION_NAME])
    if isinstance(rope.original, Rope) or not _same(rope, dtype):
        return None
    # The forward is transformers' own code: it only finds another function under the name.
    names = {**forward.__globals__, FUNCTION_NAME: rope}
    # Under the module's name torch.compile would look the function up there.
    del names["__name__"]
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": copy})


def _same(rope: Rope, dtype: torch.dtype) -> bool:
    names = [
        name
        for name, parameter in inspect.signature(rope.original).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    if names != _ARGUMENTS:
        return False
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    # In the model's own precision: a function that computes in a higher one gives other bits only there.
    q, k = (draw(1, 5, heads, 8).transpose(1, 2).to(dtype) for heads in (4, 2))
    cos, sin = (draw(1, 5, 4).repeat(1, 1, 2).to(dtype) for _ in range(2))
    try:
        expected = rope.original(q, k, cos, sin)
    except RuntimeError:  # takes angles of another shape
        return False
    return all(torch.equal(ours, theirs) for ours, theirs in zip(rope(q, k, cos, sin), expected, strict=True))
