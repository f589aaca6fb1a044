"""The same bits in less time: a loaded model's norms, rotations and linear layers for the few rows of a decode round.

A small batch takes as long as it has operations. Nothing is assumed about a class of transformers: each replacement is
held against the module's own code first, and left out where a bit differs.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.runtime.verifier.layers.linears import lay_out_linears

FUNCTION_NAME = "apply_rotary_pos_emb"
"""What transformers' modeling files call it: (q, k, cos, sin) -> (q, k), found among the module's globals."""
_ARGUMENTS = ["q", "k", "cos", "sin"]
_NUM_ROWS = 7
_EPS_NAMES = ("variance_epsilon", "eps")


def speed_up(model: nn.Module, deterministic: bool = False) -> None:
    """Replace norms and rotations where that changes no bit, and lay out linear layers (`lay_out_linears`)."""
    fuse_norms(model)
    fuse_rope(model)
    lay_out_linears(model, deterministic)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Let root-mean-square norms run as torch's one operation, not as five; returns how many do."""
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
    rows = torch.randn(_NUM_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    # From very small to large: an epsilon of another place shows at one end, a cast of another place at the other.
    rows = (rows * torch.logspace(-4, 3, _NUM_ROWS)[:, None]).to(weight.device, weight.dtype)
    return torch.equal(module(rows), functional.rms_norm(rows, weight.shape, weight, eps))


@cache
def _fused_norm(kind: type[nn.Module], eps_name: str) -> type[nn.Module]:
    """The same module with another forward: weights, names and copies of it stay what they are."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # looked up by name, a parameter is slow to find
        return torch.rms_norm(hidden_states, weight.shape, weight, self.__dict__[eps_name])

    return type(kind.__name__, (kind,), {"forward": forward})


class Rope:
    """`apply_rotary_pos_emb` of one model (RoFormer, arXiv 2104.09864; halves rotated as in GPT-NeoX).

    Queries and keys are rotated at once, and the negated half is the sine's, which all layers share.

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
    """Let attention modules rotate by `Rope`: seven operations a layer, not sixteen; returns how many do."""
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
    """The same module with another rotation; None where it has none that `Rope` covers."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or FUNCTION_NAME not in forward.__code__.co_names:
        return None
    rope = Rope(forward.__globals__[FUNCTION_NAME])
    if isinstance(rope.original, Rope) or not _same_rope(rope, dtype):
        return None
    # The forward is transformers' own code: it only finds another function under the name.
    names = {**forward.__globals__, FUNCTION_NAME: rope}
    # Under the module's name torch.compile would look the function up there.
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
    # In the model's own precision: a function that computes in a higher one gives other bits only there.
    q, k = (draw(1, 5, heads, 8).transpose(1, 2).to(dtype) for heads in (4, 2))
    cos, sin = (draw(1, 5, 4).repeat(1, 1, 2).to(dtype) for _ in range(2))
    try:
        expected = rope.original(q, k, cos, sin)
    except RuntimeError:  # takes angles of another shape
        return False
    return all(torch.equal(ours, theirs) for ours, theirs in zip(rope(q, k, cos, sin), expected, strict=True))
