"""EAGLE's published mathematics in float64, token by token, over plainly named weights. Calls nothing of the runtime.

EAGLE-1: arXiv 2401.15077, section 3.1. EAGLE-3: arXiv 2503.01840, section 3. Llama 3.1's frequencies: its model card.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """What a head computes, beside its weights."""

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

    @property
    def taps_size(self) -> int:
        """Width of the taps of one position."""
        return self.num_taps * self.target_hidden


@dataclass
class Formula:
    """One sequence's head: `known` takes a true pair, `drafted` a drafted one; both extend what attention sees."""

    recipe: Recipe
    weights: dict[str, Tensor]
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of the pairs so far."""

    def known(self, token: int, taps: Tensor) -> Tensor:
        """The hidden state of a token that follows a position with these taps."""
        return self._step(token, self._features(taps.double()))

    def drafted(self, token: int, hidden: Tensor) -> Tensor:
        """The hidden state of a drafted token, continuing that of the token before."""
        return self._step(token, self.feedback(hidden))

    def feedback(self, hidden: Tensor) -> Tensor:
        """What is fed back of a hidden state."""
        return self._norm(hidden, "norm") if self.recipe.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary."""
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
        h = residual + self._attention(x)
        inner = self._norm(h, "post_norm")
        gate = self._linear(inner, "gate")
        return h + self._linear(gate / (1 + torch.exp(-gate)) * self._linear(inner, "up"), "down")

    def _attention(self, x: Tensor) -> Tensor:
        recipe, position = self.recipe, len(self.pairs)
        query = self._linear(x, "q").view(recipe.heads, recipe.head_dim)
        key = self._linear(x, "k").view(recipe.kv_heads, recipe.head_dim)
        value = self._linear(x, "v").view(recipe.kv_heads, recipe.head_dim)
        if recipe.qk_norm:
            query = torch.stack([self._norm(row, "q_norm") for row in query])
            key = torch.stack([self._norm(row, "k_norm") for row in key])
        self.pairs.append((self._turn(key, position), value))
        query, mixed = self._turn(query, position), []
        for head in range(recipe.heads):
            shared = head // (recipe.heads // recipe.kv_heads)
            scores = torch.stack([key[shared] @ query[head] for key, _ in self.pairs]) / math.sqrt(recipe.head_dim)
            mixed.append(scores.softmax(0) @ torch.stack([value[shared] for _, value in self.pairs]))
        return self._linear(torch.cat(mixed), "o")

    def _turn(self, heads: Tensor, position: int) -> Tensor:
        half = self.recipe.head_dim // 2
        angles = torch.tensor([position * self._frequency(i) for i in range(half)], dtype=torch.float64)
        a, b = heads[:, :half], heads[:, half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)

    def _frequency(self, i: int) -> float:
        frequency = self.recipe.theta ** (-2 * i / self.recipe.head_dim)
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


def random_weights(recipe: Recipe, vocab: int, draft_vocab: int, seed: int = 11) -> dict[str, Tensor]:
    """Weights in float32 by the names that `Formula` knows; norms away from one, so that none can be left out."""
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
