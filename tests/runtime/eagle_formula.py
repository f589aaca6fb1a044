"""EAGLE's published mathematics in float64, token by token, over plainly named weights. Calls nothing of the runtime.

EAGLE-1: arXiv 2401.15077, section 3.1. EAGLE-3: arXiv 2503.01840, section 3. Llama 3.1's frequencies: its model card.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Latent:
    """Attention of compressed keys and values: arXiv 2405.04434, section 2.1."""

    query_rank: int = 10
    kv_rank: int = 12
    still: int = 6
    turning: int = 4
    value: int = 5


@dataclass(frozen=True)
class Recipe:
    """Computation of a head, apart from its weights."""

    family: int = 3
    hidden: int = 24
    target_hidden: int = 24
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 20
    num_taps: int = 3
    eps: float = 1e-5
    theta: float = 10000.0
    llama3: dict | None = None
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    rotary_dim: int = 0
    """Elements that turn; 0 stands for all."""
    interleaved: bool = False
    """Neighbouring elements turn together."""
    num_layers: int = 1
    latent: "Latent | None" = None

    @property
    def taps_size(self) -> int:
        """Width of the taps of one position."""
        return self.num_taps * self.target_hidden


@dataclass
class Formula:
    """A sequence's head: `known` takes a true pair, `drafted` a drafted one; both extend what attention sees."""

    recipe: Recipe
    weights: dict[str, Tensor]
    pairs: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """Keys and values of the pairs so far, by layer."""

    def known(self, token: int, taps: Tensor) -> Tensor:
        """Hidden state of a token behind a position with these taps."""
        return self._step(token, self._features(taps.double()))

    def drafted(self, token: int, hidden: Tensor) -> Tensor:
        """Hidden state of a drafted token, from the hidden state of the token before."""
        return self._step(token, self.feedback(hidden))

    def feedback(self, hidden: Tensor) -> Tensor:
        """Hidden state as the next level reads it."""
        return self._norm(hidden, "norm") if self.recipe.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        return self.weights["lm_head"] @ (hidden if self.recipe.family == 1 else self._norm(hidden, "norm"))

    def target_ids(self) -> Tensor:
        """The target's id of each draft id."""
        offsets = self.weights.get("d2t")
        size = len(self.weights["lm_head"])
        return torch.arange(size) if offsets is None else torch.arange(size) + offsets.long()

    def _features(self, taps: Tensor) -> Tensor:
        recipe = self.recipe
        if recipe.family == 1:
            return taps
        if recipe.fc_norm:
            parts = taps.split(recipe.target_hidden)
            taps = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        if recipe.norm_before_fc:
            taps = self._norm(taps, "input_norm")
        return self._linear(taps, "fc")

    def _step(self, token: int, g: Tensor) -> Tensor:
        embedding, recipe = self.weights["embed"][token], self.recipe
        if recipe.family == 1:
            x = residual = self._linear(torch.cat([embedding, g]), "fc")
        else:
            normed = self._norm(g, "hidden_norm")
            x = torch.cat([self._norm(embedding, "input_norm_of_layer"), normed])
            residual = normed if recipe.norm_before_residual else g
        self.pairs.append([])
        stream = self._layer(x, residual, "")
        for index in range(1, recipe.num_layers):
            stream = self._layer(self._norm(stream, f"{index}.input_norm_of_layer"), stream, f"{index}.")
        return stream

    def _layer(self, x: Tensor, residual: Tensor, prefix: str) -> Tensor:
        h = residual + (self._attention(x, prefix) if self.recipe.latent is None else self._latent(x))
        inner = self._norm(h, f"{prefix}post_norm")
        gate = self._linear(inner, f"{prefix}gate")
        return h + self._linear(gate / (1 + torch.exp(-gate)) * self._linear(inner, f"{prefix}up"), f"{prefix}down")

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        recipe, position = self.recipe, len(self.pairs) - 1
        query = self._linear(x, f"{prefix}q").view(recipe.heads, recipe.head_dim)
        key = self._linear(x, f"{prefix}k").view(recipe.kv_heads, recipe.head_dim)
        value = self._linear(x, f"{prefix}v").view(recipe.kv_heads, recipe.head_dim)
        if recipe.qk_norm:
            query = torch.stack([self._norm(row, f"{prefix}q_norm") for row in query])
            key = torch.stack([self._norm(row, f"{prefix}k_norm") for row in key])
        mixed = self._mixed(self._turn(query, position), self._turn(key, position), value)
        return self._linear(mixed, f"{prefix}o")

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.pairs[-1].append((key, value))
        layer, mixed = len(self.pairs[-1]) - 1, []
        seen = [pair[layer] for pair in self.pairs]
        for head in range(len(query)):
            shared = head // (len(query) // len(key))
            scores = torch.stack([key[shared] @ query[head] for key, _ in seen]) / math.sqrt(query.shape[1])
            mixed.append(scores.softmax(0) @ torch.stack([value[shared] for _, value in seen]))
        return torch.cat(mixed)

    def _latent(self, x: Tensor) -> Tensor:
        recipe, latent, position = self.recipe, self.recipe.latent, len(self.pairs) - 1
        query = self._linear(self._norm(self._linear(x, "q_a"), "q_a_norm"), "q_b").view(recipe.heads, -1)
        compressed, turning = self._linear(x, "kv_a").split([latent.kv_rank, latent.turning])
        both = self._linear(self._norm(compressed, "kv_a_norm"), "kv_b").view(recipe.heads, -1)
        still, value = both.split([latent.still, latent.value], dim=1)
        turned = self._turn(turning[None], position).expand(recipe.heads, -1)
        query = torch.cat([query[:, : latent.still], self._turn(query[:, latent.still :], position)], dim=1)
        return self._linear(self._mixed(query, torch.cat([still, turned], dim=1), value), "o")

    def _turn(self, heads: Tensor, position: int) -> Tensor:
        width = self.recipe.rotary_dim or heads.shape[1]
        part, rest = heads[:, :width], heads[:, width:]
        angles = torch.tensor([position * self._frequency(i, width) for i in range(width // 2)], dtype=torch.float64)
        halves = (part[:, ::2], part[:, 1::2]) if self.recipe.interleaved else part.chunk(2, dim=1)
        a, b = halves
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        turned = torch.stack(turned, dim=2).flatten(1) if self.recipe.interleaved else torch.cat(turned, dim=1)
        return torch.cat([turned, rest], dim=1)

    def _frequency(self, i: int, width: int) -> float:
        frequency = self.recipe.theta ** (-2 * i / width)
        scaling = self.recipe.llama3
        if scaling is None:
            return frequency
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return frequency * ((1 - smooth) / scaling["factor"] + smooth)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = self.weights[name] @ x
        bias = self.weights.get(f"{name}_bias")
        return out if bias is None else out + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.recipe.eps) * self.weights[name]


def _latent_weights(recipe: Recipe, latent: Latent, wide: int, matrix, scale) -> dict[str, Tensor]:
    return {
        "q_a": matrix(latent.query_rank, wide),
        "q_a_norm": scale(latent.query_rank),
        "q_b": matrix(recipe.heads * (latent.still + latent.turning), latent.query_rank),
        "kv_a": matrix(latent.kv_rank + latent.turning, wide),
        "kv_a_norm": scale(latent.kv_rank),
        "kv_b": matrix(recipe.heads * (latent.still + latent.value), latent.kv_rank),
        "o": matrix(recipe.hidden, recipe.heads * latent.value),
    }


def random_weights(recipe: Recipe, vocab: int, draft_vocab: int, seed: int = 11) -> dict[str, Tensor]:
    """Random float32 weights by the names that `Formula` uses; no norm is near 1, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def scale(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    hidden, queries, keys = recipe.hidden, recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    wide = hidden if recipe.family == 1 else 2 * hidden
    weights = {
        "embed": torch.randn(vocab, hidden, generator=generator),
        "fc": matrix(hidden, 2 * hidden if recipe.family == 1 else recipe.taps_size),
        "q": matrix(queries, wide),
        "k": matrix(keys, wide),
        "v": matrix(keys, wide),
        "o": matrix(hidden, queries),
        "gate": matrix(recipe.intermediate, hidden),
        "up": matrix(recipe.intermediate, hidden),
        "down": matrix(hidden, recipe.intermediate),
        "post_norm": scale(hidden),
        "lm_head": 3 * matrix(draft_vocab, hidden),
    }
    for index in range(1, recipe.num_layers):
        own = {name: matrix(len(weights[name]), hidden) for name in "qkv"}
        own |= {name: matrix(*weights[name].shape) for name in ("o", "gate", "up", "down")}
        own |= {"input_norm_of_layer": scale(hidden), "post_norm": scale(hidden)}
        weights |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    if recipe.latent is not None:
        weights |= _latent_weights(recipe, recipe.latent, wide, matrix, scale)
        for name in "qkv":
            del weights[name]
    if recipe.family == 3:
        weights |= {name: scale(hidden) for name in ("hidden_norm", "input_norm_of_layer", "norm")}
    if recipe.fc_bias:
        weights["fc_bias"] = matrix(1, hidden)[0]
    if recipe.qkv_bias:
        weights |= {f"{n}_bias": matrix(1, len(weights[n]))[0] for n in "qkv"}
    if recipe.o_bias:
        weights["o_bias"] = matrix(1, hidden)[0]
    if recipe.qk_norm:
        weights |= {"q_norm": scale(recipe.head_dim), "k_norm": scale(recipe.head_dim)}
    if recipe.fc_norm:
        weights |= {f"fc_norm.{i}": scale(recipe.target_hidden) for i in range(recipe.num_taps)}
    if recipe.norm_before_fc:
        weights["input_norm"] = scale(recipe.taps_size)
    if draft_vocab < vocab:
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(draft_vocab)
    return weights
