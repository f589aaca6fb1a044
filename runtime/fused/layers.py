"""Replaces decoder layers by fused steps for their device, if results stay within a tolerance.

`OPS` lists the device types with fused steps. A layer is swapped if its class is known and if, in a comparison at load
time, the fused layer returns the same numbers within `TOLERANCE`. All other layers run as transformers wrote them.
Projections of the same input become one matrix product: the weights of the q, k and v projections are joined, and so
are the weights of the gate and up projections. The model's own tensors become views of the joined weight.
"""

import inspect
import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.layer.reference import Turn
from wingbeat.runtime.fused import speed_up
from wingbeat.runtime.fused.attention import (
    ATTENTIONS,
    HALVES,
    KNOWN_ATTENTIONS,
    Add,
    AttentionHalf,
    FusedAttention,
    Joined,
    LayerOps,
    joined,
    norm_of,
)
from wingbeat.runtime.fused.halves import KNOWN_HALVES, HalvesLayer, fits, join_halves, without_experts
from wingbeat.runtime.fused.halves import take_back as take_back_halves
from wingbeat.runtime.fused.products import Product, choose_products, multiply
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.parts import first_result, merged
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows, Segment
from wingbeat.runtime.verifier.layers.division import Division
from wingbeat.runtime.verifier.layers.linears import PackableLinear
from wingbeat.runtime.verifier.layers.same_code import known_as, name_of
from wingbeat.runtime.verifier.layers.trial import NUM_ROWS, TOLERANCE, alike, drawn_rows

logger = logging.getLogger(__name__)


OPS: dict[str, LayerOps] = {"cuda": LayerOps()}
"""Layer steps by device type. Layers on other devices are left to runtime parts (hook `swap_layers` of
`runtime.parts`)."""

KNOWN_LAYERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.items()
)
"""Class names of the decoder layers that have pre-norm, rotate-half RoPE and a SiLU-gated MLP, and nothing between a
norm and the matrix product that follows the norm.
"""

_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_FIRST_NORMS = ("input_layernorm", "attention_layernorm", "operator_norm", "norm", "post_attention_layernorm")
_QUERIES = ("qkv_proj", "q_proj", "q_a_proj")
_BLOCK_SIZE = 16


class Swap(ABC):
    """Replaces layers on one kind of device by fused layers, by changing the class of the layer object."""

    ops: LayerOps
    """Steps used for the norms outside swapped layers."""
    known = KNOWN_LAYERS
    swaps_attention = False
    """Whether attention modules are swapped where the rest of their layer is not."""
    gates = frozenset({"SiLU", "SiLUActivation"})
    """Supported activation functions of MLPs, by class name."""

    def knows(self, layer: nn.Module) -> bool:
        """Whether the layer may be swapped as a whole."""
        name = known_as(type(layer), self.known)
        if name is None or name == name_of(type(layer)):
            return name is not None
        attn, mlp = attention_of(layer), getattr(layer, "mlp", None)
        return _attention_name(attn) in KNOWN_ATTENTIONS and all(hasattr(mlp, part) for part in (*_GATED_MLP, "act_fn"))

    @abstractmethod
    def swap(self, layer: nn.Module, attention: LayerAttention, is_whole: bool = True) -> None:
        """Replaces the class of a layer, or of its attention alone.

        Raises ValueError and leaves the layer unchanged if the layer is not supported.
        """

    def take_back(self, layer: nn.Module, kind: type[nn.Module], attention: type[nn.Module]) -> None:
        """Restores the classes of a swapped layer and its attention."""
        layer.__class__, attention_of(layer).__class__ = kind, attention


class OpsSwap(Swap):
    """Swaps layers for the fused `LayerOps` steps of their device."""

    def __init__(self, ops: LayerOps, division: Division | None) -> None:
        self.ops, self._division = ops, division
        # In a divided model, an attention module is not swapped without its layer, because the output projection needs
        # a sum across processes, which only the projection's own module computes.
        self.swaps_attention = division is None

    def swap(self, layer: nn.Module, attention: LayerAttention, is_whole: bool = True) -> None:
        """See `Swap.swap`."""
        attn = attention_of(layer)
        half = _half_of(attn)(attn, self.ops, attention, _turn_of(attn))
        if is_whole:
            layer.__class__ = _fused_class(type(layer), FusedLayer)
            layer.__dict__.update(_ops=self.ops, _half=half, _division=self._division)
            layer.join()
        else:
            attn.__class__ = _fused_class(type(attn), FusedAttention)
            attn.__dict__["_half"] = half
            half.join()
        # Joining weights frees memory blocks that are too small for the next layer's joined weight. Unless the blocks
        # are released, torch's allocator would end up holding a second copy of all layers while the drafter loads on
        # the same GPU.
        torch.cuda.empty_cache()


def fuse_layers(
    model: nn.Module,
    layers: nn.ModuleList,
    attention: list[LayerAttention],
    deterministic: bool,
    division: Division | None,
) -> None:
    """See the hook in `runtime.parts`."""
    speed_up.fuse_norms(model)
    speed_up.fuse_rope(model)
    fuse(model, layers, attention, deterministic=deterministic, division=division)


@torch.inference_mode()
def fuse(
    model: nn.Module,
    layers: nn.ModuleList,
    attention: list[LayerAttention],
    ops: LayerOps | None = None,
    deterministic: bool = False,
    division: Division | None = None,
) -> int:
    """Swaps a model's layers and the norms outside layers, if the swap changes only the speed, not the results.

    Returns the number of swapped layers.

    Args:
        attention: attention parameters of each layer, as probed.
        ops: steps to use instead of the device's own.
        deterministic: whether layers of any dtype and size are swapped on CPUs.
        division: group of processes that must fuse the same layers; None for a whole model.
    """
    swap = _swap_of(next(model.parameters()), ops, deterministic, division)
    if swap is None:
        return 0
    left: dict[str, int] = {}
    for layer, kind in zip(layers, attention, strict=True):
        reason = _fuse_layer(layer, kind, swap, division)
        if reason is not None:
            left[reason] = left.get(reason, 0) + 1
    for module in model.modules():
        if "_ops" not in vars(module):
            _fuse_norm(module, swap.ops)
            if isinstance(swap, OpsSwap):
                _fuse_layer_norm(module)
                _fuse_gelu(module, next(model.parameters()))
                _fuse_rotary(module, swap.ops)
    if isinstance(swap, OpsSwap) and division is None:
        halves = [_fuse_halves(layer, kind, swap) for layer, kind in zip(layers, attention, strict=True)]
        if any(halves):
            logger.info("sums and norms of %d decoder layers of other kinds are fused", sum(halves))
    if isinstance(swap, OpsSwap) and not deterministic and division is None:
        made = [layer.products() for layer in layers if isinstance(layer, FusedLayer)]
        names = made[0] if made else {}
        choose_products({name: [each[name] for each in made if name in each] for name in names})
    num_fused = len(layers) - sum(left.values())
    reasons = "; ".join(f"{count} are not: {reason}" for reason, count in left.items())
    logger.info("%d of %d decoder layers are fused%s", num_fused, len(layers), f"; {reasons}" if reasons else "")
    return num_fused


def _swap_of(parameter: Tensor, ops: LayerOps | None, deterministic: bool, division: Division | None) -> Swap | None:
    """Returns the swap for layers of this parameter's device and dtype; None if layers are left unchanged."""
    ops = ops or OPS.get(parameter.device.type)
    if ops is not None:
        return OpsSwap(ops, division) if parameter.dtype in TOLERANCE else None
    # Runtime parts run a layer as a single call, into which sums across processes cannot be inserted.
    return None if division is not None else first_result("swap_layers", parameter, deterministic)


def _fuse_layer(layer: nn.Module, attention: LayerAttention, swap: Swap, division: Division | None) -> str | None:
    """Swaps one layer. Returns the reason if the layer, or a part of the layer, stays unchanged; else None."""
    attn = attention_of(layer)
    known, kind = swap.knows(layer), type(layer).__qualname__
    if not known and not (swap.swaps_attention and _attention_name(attn)):
        return f"{kind} is not supported"
    if not _half_of(attn).fits(attn, attention):
        return f"its heads ({attention.key_dim} and {attention.value_dim} elements) or their norms are not supported"
    if not any(hasattr(layer, name) for name in _FIRST_NORMS):
        return f"{kind} has no norm of a known name"
    reason = _swap_tried(layer, attention, swap, division) if known else f"{kind} is not supported"
    if reason is None or not (swap.swaps_attention and _attention_name(attn)):
        return reason
    problem = _swap_tried(layer, attention, swap, division, is_whole=False)
    return problem or f"only attention is fused, because {reason}"


def _swap_tried(
    layer: nn.Module, attention: LayerAttention, swap: Swap, division: Division | None, is_whole: bool = True
) -> str | None:
    """Swaps a layer or its attention, if a trial gives the same numbers; else returns the reason."""
    kind, attention_kind = type(layer), type(attention_of(layer))
    gate = type(layer.mlp.act_fn).__name__ if is_whole else None
    if is_whole and gate not in swap.gates:
        return f"{gate} in an MLP is not supported"
    expected = run_trial(layer, attention, is_whole)
    try:
        swap.swap(layer, attention, is_whole)
    except ValueError as error:
        return str(error)
    found = run_trial(layer, attention, is_whole)
    is_same = all(alike(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    problem = None if is_same else "a trial gives other numbers"
    if division is not None:
        problem = division.agree(problem)
    if problem is not None:
        swap.take_back(layer, kind, attention_kind)
    return problem


def _fuse_halves(layer: nn.Module, attention: LayerAttention, swap: Swap) -> bool:
    """Fuses the sums and norms of a layer that is not swapped as a whole, if a trial gives the same numbers."""
    kind, name = type(layer), known_as(type(layer), KNOWN_HALVES)
    halves = None if name is None else KNOWN_HALVES[name]
    if halves is None or not fits(layer, halves, FusedNorm):
        return False
    attn = attention_of(layer)
    if attention.key_dim != attention.value_dim and not _half_of(attn).fits(attn, attention):
        return False
    with without_experts(layer, halves):
        try:
            theirs, expected = _run(layer, attention)
        except TypeError:  # a package's kernels for mixers may not take the keyword of the rows
            return False
        of_tuple = len(theirs) if isinstance(theirs, tuple) else None
        join_halves(layer, halves, swap.ops, _fused_class(kind, HalvesLayer), of_tuple, swap.gates)
        ours, found = _run(layer, attention)
    if not all(alike(*pair) for pair in zip((_rows_of(ours), *found), (_rows_of(theirs), *expected), strict=True)):
        take_back_halves(layer, kind)
    return type(layer) is not kind


def attention_of(layer: nn.Module) -> Any:
    """Returns a layer's attention module, or the mixer in its place; None if the layer has neither."""
    return getattr(layer, "self_attn", None) or getattr(layer, "mixer", None)


def _attention_kind(attn: nn.Module | None) -> type:
    """Returns transformers' class, of which the module's own class may be a subclass; NoneType if it is not known."""
    return next((kind for kind in type(attn).__mro__ if known_as(kind, _attentions())), type(None))


def _attention_name(attn: nn.Module | None) -> str | None:
    """Returns the name in `_attentions` of an attention module's class; None if it is not known."""
    return known_as(_attention_kind(attn), _attentions())


def _half_of(attn: nn.Module | None) -> type[AttentionHalf]:
    """Returns the class that computes an attention module."""
    return _attentions().get(_attention_name(attn) or "", AttentionHalf)


@cache
def _attentions() -> dict[str, type[AttentionHalf]]:
    """Supported attention modules by class name, and the class that computes each."""
    return dict.fromkeys(KNOWN_ATTENTIONS, AttentionHalf) | ATTENTIONS | merged("attentions")


def _turn_of(attn: nn.Module | None) -> Turn:
    """Returns what the RoPE of an attention module rotates together."""
    return KNOWN_ATTENTIONS.get(_attention_name(attn) or "", HALVES)


def is_packed(linear: nn.Linear) -> bool:
    """Whether a linear layer holds its weight in packed form."""
    return isinstance(linear, PackableLinear) and linear.packed is not None


class SwappedLayer(nn.Module):
    """First base class of a swapped layer: replaces `forward`, and joins projections of the same input.

    The layer's original class is the second base class. Weights, parameter names and submodules stay unchanged.
    """

    num_joined = 4
    """Number of matrix products with adapters of their own: q, k and v together; output; gate and up together; down."""


class FusedLayer(SwappedLayer, Joined):
    """A decoder layer that is computed with the functions of `LayerOps`."""

    _ops: LayerOps
    _half: AttentionHalf
    _few: dict[str, Product | None]
    """Products of the output and down projections, whose weights are not joined; None for a packed weight."""
    _division: Division | None = None

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs the fused layer.

        Calls without the runtime's `Rows`, and batches that capture this layer's KV, run transformers' code.
        """
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        attn, mlp = self.self_attn, self.mlp
        wanted = rows is not None and attn.layer_idx not in (rows.captured or ())
        if not wanted or torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        ops, before = self._ops, hidden_states[0]
        normed, _ = ops.add_rms_norm(before, None, *norm_of(self.input_layernorm))
        attended = self._half(normed, position_embeddings, rows)
        mixed = self._summed(self._added(multiply(attn.o_proj, self._few["o"], attended), attended, 1, rows))
        normed, total = ops.add_rms_norm(mixed, before, *norm_of(self.post_attention_layernorm))
        nothing_added = self._half.add is None or not rows.columns
        if nothing_added and isinstance(self._gate_up, Product) and self._gate_up.takes(len(normed)):
            active = self._gate_up.gated(normed)
        else:
            active = ops.silu_mul(self._added(self._gate_up(normed), normed, 2, rows))
        if self._division is not None and not self._division.first:
            out = functional.linear(active, mlp.down_proj.weight)
        else:
            out = multiply(mlp.down_proj, self._few["down"], active, total)
        return self._summed(self._added(out, active, 3, rows))[None]

    def _summed(self, out: Tensor) -> Tensor:
        """Returns the sum of all processes' addends; returns `out` if the layer is not divided."""
        return out if self._division is None else self._division.sum(out)

    def _added(self, out: Tensor, x: Tensor, product: int, rows: Rows) -> Tensor:
        """Adds a runtime part's term (such as LoRA) to a matrix product, in place."""
        add = self._half.add
        return out if add is None else add(out, x, product, rows)

    def add_by(self, add: Add) -> None:
        """Sets the function with which a runtime part adds terms (such as LoRA) to the layer's matrix products."""
        self._half.add = add

    def join(self) -> None:
        """See `Joined.join`."""
        self._half.join()
        self.__dict__["_gate_up"] = joined([self.mlp.gate_proj, self.mlp.up_proj], gated=True)
        self.__dict__["_few"] = {
            name: None if is_packed(linear) else Product(linear.weight.data, linear.bias, adds=name == "down")
            for name, linear in (("o", self.self_attn.o_proj), ("down", self.mlp.down_proj))
        }

    def products(self) -> dict[str, Product]:
        """Returns the layer's matrix products for which the runtime's few-rows kernel may be chosen."""
        found = {"qkv": self._half.qkv, "gate_up": self._gate_up, **self._few}
        return {name: one for name, one in found.items() if isinstance(one, Product)}

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        self._half.take_written()


class FusedNorm(Joined):
    """A norm outside fused layers that is computed with the functions of `LayerOps`.

    The class is assigned to existing module objects, so modules that are created later are not fused.
    """

    _ops: LayerOps | None = None
    _wide: tuple[Tensor, float] | None = None
    """Effective weight and epsilon, if the effective weight is not the module's parameter (Gemma's norms add 1); else
    None."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises the last dimension: [..., size] -> [..., size]."""
        if self._ops is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return super().forward(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self._ops.add_rms_norm(rows, None, *(self._wide or norm_of(self)))[0].view(hidden_states.shape)

    def join(self) -> None:
        """See `Joined.join`."""
        self.__dict__["_wide"] = None if hasattr(self, "variance_epsilon") else norm_of(self)

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        if self._wide is not None:
            self._wide[0].copy_(norm_of(self)[0])


def _fuse_norm(module: nn.Module, ops: LayerOps) -> None:
    weight, kind = getattr(module, "weight", None), type(module)
    if not kind.__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return
    if not hasattr(module, "variance_epsilon") and not hasattr(module, "eps"):
        return
    rows = drawn_rows(len(weight), weight)
    expected = module(rows)
    module.__class__ = _fused_class(kind, FusedNorm)
    module.__dict__["_ops"] = ops
    module.join()
    if not alike(module(rows), expected):
        module.__class__ = kind
        del module.__dict__["_ops"], module.__dict__["_wide"]


class OneLayerNorm(nn.Module):
    """Layer norm without a bias in one operation, in place of a chain of them."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Computes [..., size] -> [..., size]."""
        own: Any = self
        return functional.layer_norm(hidden_states, own.weight.shape, own.weight, None, own.variance_epsilon)


def _fuse_layer_norm(module: nn.Module) -> None:
    own, kind, weight = module, type(module), getattr(module, "weight", None)
    if not kind.__name__.endswith("LayerNorm") or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return
    if not hasattr(own, "variance_epsilon"):
        return
    rows = drawn_rows(len(weight), weight) + 1  # rows without a mean do not tell this norm from a root-mean-square norm
    expected = module(rows)
    module.__class__ = _fused_class(kind, OneLayerNorm)
    if getattr(own, "bias", None) is not None or not alike(module(rows), expected):
        module.__class__ = kind


class OneGelu(nn.Module):
    """GELU by its tanh formula in one operation, in place of a chain of them."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes [...] -> [...]."""
        return functional.gelu(input, approximate="tanh")


def _fuse_gelu(module: nn.Module, like: Tensor) -> None:
    kind = type(module)
    if kind.__name__ in ("NewGELUActivation", "FastGELUActivation"):
        rows = drawn_rows(64, like)
        if alike(functional.gelu(rows, approximate="tanh"), module(rows)):
            module.__class__ = _fused_class(kind, OneGelu)


_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose frequencies do not depend on the context length."""


class FusedRotary(nn.Module):
    """Rotary embedding that computes cosines and sines in one step.

    If the module's forward takes a layer type, the angles depend on that type. The class is assigned to existing module
    objects, so modules that are created later are not fused.
    """

    _ops: LayerOps | None = None

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Maps positions [1, num_tokens], or [3, 1, num_tokens] by axis, to cosines and sines [1, num_tokens, dim]."""
        if position_ids.dim() == 3 and not position_ids.stride(0):  # text alone: all axes are one expanded row
            position_ids = position_ids[0]
        if self._ops is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
            return super().forward(x, position_ids, *(() if layer_type is None else (layer_type,)))
        own = "" if layer_type is None else f"{layer_type}_"
        scale = getattr(self, f"{own}attention_scaling")
        return self._ops.rotations(position_ids, getattr(self, f"{own}inv_freq"), scale, x.dtype)


def _fuse_rotary(module: nn.Module, ops: LayerOps) -> None:
    kind, types = type(module), getattr(module, "rope_type", None)
    if not kind.__name__.endswith("RotaryEmbedding") or types is None:
        return
    by_layer = isinstance(types, dict)
    names = list(inspect.signature(kind.forward).parameters)[1:]
    if names != ["x", "position_ids", *(["layer_type"] if by_layer else [])]:
        return
    layers = [(name,) for name in types] if by_layer else [()]
    device = next(module.buffers()).device
    positions = torch.tensor([[0, 1, 77, 4095]], device=device)
    if not _STATIC_ROPE_TYPES.issuperset(types.values() if by_layer else [types]):
        return
    like = torch.zeros(1, device=device)
    expected = [part for layer in layers for part in module(like, positions, *layer)]
    module.__class__ = _fused_class(kind, FusedRotary)
    module.__dict__["_ops"] = ops
    found = [part for layer in layers for part in module(like, positions, *layer)]
    is_same = all(ours.shape == theirs.shape for ours, theirs in zip(found, expected, strict=True))
    if not is_same or not all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True)):
        module.__class__ = kind
        del module.__dict__["_ops"]


@cache
def _fused_class(kind: type[nn.Module], fused: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (fused, kind), {})


def run_trial(layer: nn.Module, attention: LayerAttention, is_whole: bool) -> tuple[Tensor, ...]:
    """Runs a layer, or its attention, on the first rows of one sequence; returns output and stored keys and values."""
    out, stored = _run(layer, attention, is_whole)
    return _rows_of(out), *stored


def _run(layer: Any, attention: LayerAttention, is_whole: bool = True) -> tuple[Any, list[Tensor]]:
    """As `run_trial`, with the output in the form that the layer gives it. A layer may have no attention."""
    attn, caches, turned = attention_of(layer) if attention.num_heads else None, {}, None
    norm = next(getattr(layer, name) for name in _FIRST_NORMS if hasattr(layer, name))
    weight = norm.weight
    if attn is not None:
        weight = next(one for name in _QUERIES if (one := getattr(attn, name, None)) is not None).weight
        heads = 2, _BLOCK_SIZE, attention.num_kv_heads
        stored = [torch.zeros(*heads, dim, dtype=weight.dtype, device=weight.device) for dim in attention.stored_dims]
        caches[attn.layer_idx] = attention.caches(tuple(stored))
    hidden, positions = drawn_rows(len(norm.weight), weight), torch.arange(NUM_ROWS, device=weight.device)
    if attn is not None:
        angles = positions[:, None] / torch.arange(1, _num_pairs(attn) + 1, device=weight.device)
        turned = _half_of(attn).position_embeddings(angles, _turn_of(attn), hidden.dtype)
    tables = torch.ones(1, 1, dtype=torch.int64, device=weight.device)
    segment = Segment.of(0, positions[None], torch.zeros_like(positions[:1]), None, tables)
    packed = first_result("pack_segments", [segment], hidden.dtype)
    rows = Rows(positions[None], positions[None], _BLOCK_SIZE + positions, [segment], caches, packed=packed)
    given = {"position_ids": positions[None], "position_embeddings": turned, ROWS_KEYWORD: rows}
    if is_whole:
        out = layer(hidden[None], **given)
    else:  # the MLP is left out, because rounding might change a router's choice of experts
        if "position_embeddings" not in inspect.signature(_attention_kind(attn).forward).parameters:
            del given["position_embeddings"]  # nothing is rotated
        out = attn(norm(hidden)[None], attention_mask=None, **given)
    return out, [part[1, :NUM_ROWS].flatten(1) for cache in caches.values() for part in cache]


def _rows_of(out: Any) -> Tensor:
    """Returns the hidden states [num_tokens, hidden_size] among the outputs of a layer or of attention."""
    return (out[0] if isinstance(out, tuple) else out)[0]


def _num_pairs(attn: Any) -> int:
    """Returns the number of pairs of a head's elements that the model rotates."""
    if hasattr(attn, "qk_rope_head_dim"):
        return attn.qk_rope_head_dim // 2
    rope = getattr(getattr(attn, "config", None), "rope_parameters", None) or {}
    by_layer = next((one for one in rope.values() if isinstance(one, dict)), rope)
    return int(attn.head_dim * (by_layer.get("partial_rotary_factor") or 1.0)) // 2
