"""Decoder layers of the Llama and Gemma kinds on CPUs. Consecutive layers run in one call of the C++ kernels."""

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
from wingbeat.runtime.fused.attention import norm_of
from wingbeat.runtime.fused.layers import SwappedLayer
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows

GEMMA_LAYERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in {"gemma2": "Gemma2", "gemma3": "Gemma3"}.items()
)
"""Class names of layers that also normalise the outputs of attention and MLP, and whose norms multiply by 1 +
weight.
"""
LLAMA_NORMS = {"input": "input_layernorm", "output": "post_attention_layernorm"}
GEMMA_NORMS = {
    "input": "input_layernorm",
    "attended": "post_attention_layernorm",
    "output": "pre_feedforward_layernorm",
    "left": "post_feedforward_layernorm",
}
"""Names of a layer's norm modules, by the kernels' names of the norms."""
GATES = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1}
"""Numbers of the gates' activation functions in the kernels, by class name of the activation."""
_UNROTATED = "unrotated"
MOST_AHEAD = 1 << 20
"""Maximum number of elements of all outputs that are computed before their layers are called."""


class _Ahead(NamedTuple):
    """Outputs of layers that were computed before these layers are called."""

    index: int
    """Index of the layer that is called next."""
    entering: Tensor
    """Expected input of the layer `index`. If this layer is called with another tensor object, the stored outputs are
    not used.
    """
    outputs: list[Tensor]
    """Outputs of the layer `index` and of the layers after it."""
    position_embeddings: tuple[Tensor, Tensor]
    rows: Rows


class Additions(NamedTuple):
    """Functions by which a runtime part (LoRA) adds to the results of matrix products in layers."""

    fits: Callable[[Rows], bool]
    """Function (rows) -> whether the kernels can compute the addition for these rows."""
    of_rows: Callable[[Rows], Addition | None]
    """Function (rows) -> the addition for these rows; None if nothing is added."""


class LayerStack:
    """The layers of a model, of the Llama or Gemma kind, that run on the C++ kernels.

    The call of a layer also computes the outputs of the layers after that layer, and stores them. When a later layer is
    called, it returns its stored output. Each layer's output thus still passes through the model's own code and hooks.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.additions: Additions | None = None
        self._layers: dict[int, Layer] = {}
        self._held: dict[int, list[object]] = {}
        self._kinds: dict[int, str | None] = {}
        """Maps a layer's index to the layer's type if layers of different types may have different rotary embeddings
        (Gemma), to `_UNROTATED` if the layer has none (SmolLM3), else to None.
        """
        self._attention: dict[int, LayerAttention] = {}
        self._added: dict[int, tuple[tuple[ctypes.Structure, ...], list[object]]] = {}
        self._at: tuple[Any, ctypes.Array] | None = None
        self._ahead: _Ahead | None = None

    def add(self, layer: nn.Module, attention: LayerAttention) -> None:
        """Adds a layer in its current state and packs its weights.

        Raises:
            ValueError: a layer is not a plain frozen linear layer on the CPU.
        """
        attn, mlp = layer.self_attn, layer.mlp
        # `held` receives the objects that own the memory to which the structs point. They must live as long as the
        # stack.
        held: list[object] = []

        projections = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        # The gate and up projections are computed as one matrix product, so both must be stored in the same dtype.
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
            raise ValueError("the gate and up projections have weights of different dtypes")
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
        kind = getattr(attn, "layer_type", None) if _is_gemma(layer) else None
        self._kinds[attn.layer_idx] = kind if getattr(attn, "use_rope", True) else _UNROTATED
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
        """Reads the addresses of a layer's weights again after the weights were written, because a write may reallocate
        them.
        """
        index, gated = layer.self_attn.layer_idx, (layer.mlp.gate_proj, layer.mlp.up_proj)
        # `add` requires the same dtype for gate and up projections
        if len({linear.panels.storage.dtype for linear in gated}) > 1:
            for linear in gated:
                linear.unpack()
                linear.pack(self.kernels, held=linear.weight.dtype)
        self.add(layer, self._attention[index])
        if index in self._added:
            self.add_to(index, *self._added[index])

    def add_to(self, index: int, products: tuple[ctypes.Structure, ...], held: list[object]) -> None:
        """Registers `additions` for a layer's four matrix products: q, k and v projections; output projection; gate and
        up projections; down projection.

        Args:
            products: for each matrix product, the struct that `Add` receives.
            held: objects that own the memory of these structs.
        """
        layer = self._layers[index]
        layer.added_qkv, layer.added_output, layer.added_gate_up, layer.added_down = map(ctypes.addressof, products)
        self._added[index] = products, held
        self._at = None

    def fits(self, rows: Rows) -> bool:
        """Whether the kernels can run these rows."""
        return rows.packed is not None and (self.additions is None or self.additions.fits(rows))

    def remove(self, index: int) -> None:
        """Removes a layer from the stack."""
        for held in (self._layers, self._kinds, self._held, self._attention, self._added):
            held.pop(index, None)
        self._at = None

    def run(self, index: int, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """Returns the layer's output for hidden states [1, num_tokens, hidden_size]."""
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
        """Returns the output of the layer, and the outputs of the following layers that run in the same call; see
        `run`.
        """
        array = self._array(rows.caches)
        count, most, own = 1, MOST_AHEAD // hidden.numel(), rows.of_layer(index)
        while index + count in self._layers and count < most and self._kinds[index] == self._kinds[index + count]:
            if rows.of_layer(index + count) is not own:
                break
            count += 1
        captured = rows.captured or {}
        for layer in range(index, index + count):
            array[layer].captured = None
            if layer in captured:
                width = sum(cache.shape[2] * cache.shape[3] for cache in rows.caches[layer])
                captured[layer] = hidden.new_empty(hidden.shape[1], width)
                array[layer].captured = captured[layer].data_ptr()
        cos, sin = (part.float().contiguous() for part in position_embeddings)
        if self._kinds[index] == _UNROTATED:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        block_size = rows.caches[index][0].shape[1]
        addition = None if self.additions is None else self.additions.of_rows(rows)
        batch = batch_of(cos, sin, own.slot_mapping, own.packed, block_size, addition)
        x, out = hidden.contiguous(), hidden.new_empty(count, 1, *hidden.shape[1:])
        self.kernels.run_layers(array, index, count, batch, x, out)
        return list(out.unbind(0))

    def _array(self, caches: Any) -> ctypes.Array:
        """Returns the layer structs with the addresses of a KV pool. The array for the latest pool is cached."""
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
    """Base class that a swapped layer has in front of its own class. The forward method runs the layer on the kernels.

    Weights, parameter names and submodules stay as they are.
    """

    _stack: LayerStack | None

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs the layer in its stack. Runs transformers' code if the call does not come from Wingbeat's engine, or if
        the kernels cannot run the rows.
        """
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        stack = None if torch.compiler.is_compiling() else self.__dict__.get("_stack")
        if stack is None or rows is None or not stack.fits(rows):
            return super().forward(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        return stack.run(self.self_attn.layer_idx, hidden_states, position_embeddings, rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CpuLayer":
        # `fn` may move the weights to another device or change their dtype, so the layer leaves the stack.
        self.leave_stack()
        return super()._apply(fn, recurse)

    @property
    def stack(self) -> LayerStack | None:
        """The layer's stack; None after the layer has left it."""
        return self.__dict__.get("_stack")

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        if self.stack is not None:
            self.stack.take_written(self)

    def leave_stack(self) -> None:
        """Makes the layer run transformers' code from now on."""
        stack = self.__dict__.pop("_stack", None)
        if stack is not None:
            stack.remove(self.self_attn.layer_idx)
        for module in self.modules():
            if isinstance(module, InputMajorLinear):
                module.unpack()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a layer is in no stack, because the copy has weights of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_stack"}


def _is_gemma(layer: nn.Module) -> bool:
    return hasattr(layer, GEMMA_NORMS["left"])


def _norms(layer: nn.Module, held: list[object]) -> dict[str, Any]:
    """Returns addresses and epsilons of a layer's norms, by the kernels' names of the norms. `held` receives the
    tensors that own the memory.
    """
    places = GEMMA_NORMS if _is_gemma(layer) else LLAMA_NORMS
    attn, modules = layer.self_attn, {name: getattr(layer, place) for name, place in places.items()}
    if hasattr(attn, "q_norm"):
        modules |= {"query": attn.q_norm, "key": attn.k_norm}
    fields: dict[str, Any] = {}
    for name, module in modules.items():
        weight, eps = norm_of(module)
        held.append(weight.data.float())
        fields[f"{name}_norm"] = held[-1].data_ptr()
        if name != "key":  # the kernels use the query norm's epsilon for both norms
            fields[f"{name}_eps"] = eps
    return fields


@cache
def cpu_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of a layer class that runs in a stack."""
    return type(kind.__name__, (CpuLayer, kind), {})
