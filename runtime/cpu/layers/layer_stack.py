"""Decoder layers of the Llama kind on CPUs: all that follow one another are one call of our kernels."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.ops import Addition, CpuKernels, batch_of
from wingbeat.kernels.cpu.panels import fits_bfloat16
from wingbeat.kernels.cpu.structs import KINDS, Heads, Layer, layer_of
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear, matrices_of, pack_linear
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.layers.fused import SwappedLayer
from wingbeat.runtime.verifier.layers.fused_attention import norm_of

GEMMA_LAYERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in {"gemma2": "Gemma2", "gemma3": "Gemma3"}.items()
)
"""Layers that norm what attention and MLP make, by one more than their norms' weights."""
LLAMA_NORMS = {"input": "input_layernorm", "output": "post_attention_layernorm"}
GEMMA_NORMS = {
    "input": "input_layernorm",
    "attended": "post_attention_layernorm",
    "output": "pre_feedforward_layernorm",
    "left": "post_feedforward_layernorm",
}
"""Modules of a layer's norms, by the names of the kernels' fields."""
GATES = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1}
"""Functions of gates as the kernels have them, by the names of their classes."""
MOST_AHEAD = 1 << 20
"""Numbers that layers may leave before they are asked for."""


class _Ahead(NamedTuple):
    """Outputs of layers that ran before they were called."""

    index: int
    """Of the layer that is called next."""
    entering: Tensor
    """What it must be called with."""
    outputs: list[Tensor]
    """Of it and those behind it."""
    position_embeddings: tuple[Tensor, Tensor]
    rows: Rows


class Additions(NamedTuple):
    """Addition of a part of the runtime to products of layers."""

    fits: Callable[[Rows], bool]
    """Whether it can be added by our kernels to products of these rows."""
    of_rows: Callable[[Rows], Addition | None]
    """Addition to these rows; None where nothing is added."""


class LayerStack:
    """The layers of a model that run by our kernels, of the Llama or the Gemma kind.

    A layer's call runs those behind it too, and their calls give what is there already; each one's output passes
    through the model's own code, and its hooks.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.additions: Additions | None = None
        self._layers: dict[int, Layer] = {}
        self._held: dict[int, list[object]] = {}
        self._kinds: dict[int, str | None] = {}
        """Kinds of layers that may have rotations of their own."""
        self._attention: dict[int, LayerAttention] = {}
        self._added: dict[int, tuple[tuple[ctypes.Structure, ...], list[object]]] = {}
        self._at: tuple[Any, ctypes.Array] | None = None
        self._ahead: _Ahead | None = None

    def add(self, layer: nn.Module, attention: LayerAttention) -> None:
        """Take a layer as it now is, and pack its weights.

        Raises:
            ValueError: its weights are not plain ones on the CPU.
        """
        attn, mlp = layer.self_attn, layer.mlp
        # What the pointers point to must not be freed while the stack lives.
        held: list[object] = []

        projections = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        # Gate and up are multiplied together, so that they must be of one kind.
        gated = (mlp.gate_proj, mlp.up_proj)
        unpacked = [linear.weight for linear in gated if getattr(linear, "panels", None) is None]
        halved = all(map(fits_bfloat16, unpacked))
        held_as = dict.fromkeys(gated, torch.bfloat16 if halved else mlp.gate_proj.weight.dtype)
        for linear in projections:
            if not pack_linear(linear, self.kernels, held=held_as.get(linear)):
                raise ValueError(f"{type(linear).__name__} of {linear.weight.dtype} is no plain linear layer")
            held.append(linear.panels)
        matrices = [matrix for linear in projections for matrix in matrices_of(linear)]
        if matrices[4].kind != matrices[5].kind:
            raise ValueError("gate and up hold numbers of unlike kinds")
        hidden = layer.input_layernorm.weight
        heads = Heads(
            attention.num_heads,
            attention.num_kv_heads,
            attention.key_dim,
            attention.value_dim,
            attn.scaling,
            getattr(attn, "attn_logit_softcapping", None) or 0.0,
            attention.sliding_window or 0,
            None,
        )
        self._kinds[attn.layer_idx] = getattr(attn, "layer_type", None) if _is_gemma(layer) else None
        self._layers[attn.layer_idx] = layer_of(
            heads,
            len(hidden),
            matrices[4].columns,
            query_key_value=matrices[:3],
            output=matrices[3],
            gate=matrices[4],
            up=matrices[5],
            down=matrices[6],
            kind=KINDS[hidden.dtype],
            gate_kind=GATES[type(mlp.act_fn).__name__],
            **_norms(layer, held),
        )
        self._held[attn.layer_idx] = held
        self._attention[attn.layer_idx] = attention
        self._at = None

    def take_written(self, layer: nn.Module) -> None:
        """Take a layer's weights that were written in place, which may have got other memory."""
        index, gated = layer.self_attn.layer_idx, (layer.mlp.gate_proj, layer.mlp.up_proj)
        if len({linear.panels.storage.dtype for linear in gated}) > 1:  # as `add` packs them
            for linear in gated:
                linear.unpack()
                linear.pack(self.kernels, held=linear.weight.dtype)
        self.add(layer, self._attention[index])
        if index in self._added:
            self.add_to(index, *self._added[index])

    def add_to(self, index: int, products: tuple[ctypes.Structure, ...], held: list[object]) -> None:
        """Let `additions` act on a layer's products: q, k and v; the output; gate and up; down.

        Args:
            products: what an `Add` is given for each.
            held: what these point to.
        """
        layer = self._layers[index]
        layer.added_qkv, layer.added_output, layer.added_gate_up, layer.added_down = map(ctypes.addressof, products)
        self._added[index] = products, held
        self._at = None

    def fits(self, rows: Rows) -> bool:
        """Whether rows are such as our kernels read."""
        return rows.packed is not None and (self.additions is None or self.additions.fits(rows))

    def remove(self, index: int) -> None:
        """Forget a layer."""
        for held in (self._layers, self._kinds, self._held, self._attention, self._added):
            held.pop(index, None)
        self._at = None

    def run(self, index: int, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """Output of the layer for hidden states [1, num_tokens, hidden_size]."""
        ahead = self._ahead
        if (
            ahead is None
            or ahead.index != index
            or ahead.entering is not hidden
            or ahead.position_embeddings is not position_embeddings
            or ahead.rows is not rows
        ):
            outputs = self.run_on(index, hidden, position_embeddings, rows)
        else:
            outputs = ahead.outputs
        rest = outputs[1:]
        self._ahead = _Ahead(index + 1, outputs[0], rest, position_embeddings, rows) if rest else None
        return outputs[0]

    def run_on(
        self, index: int, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows
    ) -> list[Tensor]:
        """Outputs of the layer and of as many behind it as run with it; see `run`."""
        array = self._array(rows.caches)
        count, most = 1, MOST_AHEAD // hidden.numel()
        while index + count in self._layers and count < most and self._kinds[index] == self._kinds[index + count]:
            count += 1
        captured = rows.captured or {}
        for layer in range(index, index + count):
            array[layer].captured = None
            if layer in captured:
                width = sum(cache.shape[2] * cache.shape[3] for cache in rows.caches[layer])
                captured[layer] = hidden.new_empty(hidden.shape[1], width)
                array[layer].captured = captured[layer].data_ptr()
        cos, sin = (part.float().contiguous() for part in position_embeddings)
        block_size = rows.caches[index][0].shape[1]
        addition = None if self.additions is None else self.additions.of_rows(rows)
        batch = batch_of(cos, sin, rows.slot_mapping, rows.packed, block_size, addition)
        x, out = hidden.contiguous(), hidden.new_empty(count, 1, *hidden.shape[1:])
        self.kernels.run_layers(array, index, count, batch, x, out)
        return list(out.unbind(0))

    def _array(self, caches: Any) -> ctypes.Array:
        """The layers with the addresses of a pool; those of the last one are kept."""
        # Read once: engines of one process may share a model, each in its own thread and with its own pool.
        at = self._at
        if at is None or at[0] is not caches:
            array = (Layer * (1 + max(self._layers)))()
            for index, layer in self._layers.items():
                if isinstance(caches, dict) and index not in caches:
                    continue
                key_cache, value_cache = caches[index]
                array[index] = layer
                array[index].key_cache, array[index].value_cache = key_cache.data_ptr(), value_cache.data_ptr()
            self._at = at = (caches, array)
        return at[1]


class CpuLayer(SwappedLayer):
    """A forward that a layer of a stack has before its own class's. Weights, names and submodules stay."""

    _stack: LayerStack | None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As the layer's own class, whose code runs where the batch is not ours."""
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        stack = None if torch.compiler.is_compiling() else self.__dict__.get("_stack")
        if stack is None or rows is None or not stack.fits(rows):
            return super().forward(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return stack.run(self.self_attn.layer_idx, hidden_states, position_embeddings, rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CpuLayer":
        # The weights may go elsewhere, or become of another type.
        self.leave_stack()
        return super()._apply(fn, recurse)

    @property
    def stack(self) -> LayerStack | None:
        """The layer's; None where it has left it."""
        return self.__dict__.get("_stack")

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        if self.stack is not None:
            self.stack.take_written(self)

    def leave_stack(self) -> None:
        """Run as the layer's own class from now on."""
        stack = self.__dict__.pop("_stack", None)
        if stack is not None:
            stack.remove(self.self_attn.layer_idx)
        for module in self.modules():
            if isinstance(module, InputMajorLinear):
                module.unpack()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_stack"}


def _is_gemma(layer: nn.Module) -> bool:
    return hasattr(layer, GEMMA_NORMS["left"])


def _norms(layer: nn.Module, held: list[object]) -> dict[str, Any]:
    """Weights and epsilons of a layer's norms by the kernels' fields; `held` gets what they point to."""
    places = GEMMA_NORMS if _is_gemma(layer) else LLAMA_NORMS
    attn, modules = layer.self_attn, {name: getattr(layer, place) for name, place in places.items()}
    if hasattr(attn, "q_norm"):
        modules |= {"query": attn.q_norm, "key": attn.k_norm}
    fields: dict[str, Any] = {}
    for name, module in modules.items():
        weight, eps = norm_of(module)
        held.append(weight.data.float())
        fields[f"{name}_norm"] = held[-1].data_ptr()
        if name != "key":  # whose epsilon is the query's
            fields[f"{name}_eps"] = eps
    return fields


@cache
def cpu_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of layers as those of a stack."""
    return type(kind.__name__, (CpuLayer, kind), {})
