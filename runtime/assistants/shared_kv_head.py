"""A head that computes no keys and values (Gemma 4's assistants): layers, output and checkpoint.

A step computes pre_projection(cat[embedding of the latest token, hidden state]), then runs the layers and a norm. The
norm's output is the input of the output matrix and of post_projection, whose output is the hidden state of the next
step. The embedding is that of the verifier, multiplied by the verifier's embedding scale. A layer attends to the keys
and values of one verifier layer: the last layer that has the same type (full or sliding) and computes keys and values.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.hugging_face import build_model
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Segment
from wingbeat.runtime.verifier.layers.attention import attend_segments

ATTENTION_NAME = "wingbeat_shared_kv"


class SharedMetadata(NamedTuple):
    """Inputs of the attention function in addition to the queries."""

    caches: dict[str, tuple[Tensor, Tensor]]
    """Key and value cache by layer type."""
    segment: Segment


def _shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of queries [num_tokens, num_heads, 1, dim], one token per batch entry, over the verifier's KV."""
    metadata: SharedMetadata = kwargs[ROWS_KEYWORD]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_segments(
        query[:, :, 0],
        *metadata.caches[module.layer_type],
        [metadata.segment],
        scaling,
        sliding_window=reach(sliding_window),
        softcap=softcap,
    )
    return out[:, None], None


AttentionInterface.register(ATTENTION_NAME, _shared_attention)


def reach(sliding_window: int | None) -> int:
    """A sliding layer's window in the form that `attend_segments` takes; 0 means no window.

    In transformers these heads see the keys that are at most sliding_window before the last position, whereas a window
    of `attend_segments` excludes its end. Therefore 1 is added.
    """
    return sliding_window + 1 if sliding_window else 0


class SharedKvHead(nn.Module):
    """An assistant's layers and projections, with the verifier's embedding.

    Args:
        config: config of the assistant's text model.
        backbone_hidden_size: hidden size of the verifier.
        num_clusters: number of token clusters, for assistants that compute logits only for the likeliest clusters; else
            0.
        num_chosen: number of clusters whose logits are computed.
    """

    embedding: Tensor
    embedding_scale: Tensor

    def __init__(
        self, config: PretrainedConfig, backbone_hidden_size: int, num_clusters: int = 0, num_chosen: int = 0
    ) -> None:
        super().__init__()
        self.types = tuple(dict.fromkeys(config.layer_types))
        model = _text_model(config)
        self.layers = nn.ModuleList(model.get_decoder().layers[len(self.types) :])
        self.norm = model.get_decoder().norm
        self.pre_projection = nn.Linear(2 * backbone_hidden_size, config.hidden_size, bias=False)
        self.post_projection = nn.Linear(config.hidden_size, backbone_hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.num_chosen = num_chosen
        self.centroids = nn.Linear(config.hidden_size, num_clusters, bias=False) if num_clusters else None
        if num_clusters:
            self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.int64))
        with torch.device("cpu"):
            self.rotary = type(model.get_decoder().rotary_emb)(model.config.get_text_config())

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, metadata: SharedMetadata
    ) -> tuple[Tensor, Tensor]:
        """Run a step over a flattened batch.

        Args:
            token_ids, positions: int64 [num_tokens].
            hidden: [num_tokens, backbone_hidden_size].
            metadata: caches and segment for the attention function.

        Returns:
            logits [num_tokens, vocab_size], and the hidden states for the next step.
        """
        embedded = F.embedding(token_ids, self.embedding) * self.embedding_scale
        out = self.pre_projection(torch.cat([embedded, hidden], dim=-1))[:, None]
        positions = positions[:, None]
        rotary = {kind: self.rotary(out, positions, kind) for kind in self.types}
        # The attention function reads the KV caches itself. These keys and values are passed only because the layers
        # require some.
        unused = dict.fromkeys(self.types, (out[:, None], out[:, None]))
        for layer in self.layers:
            out = layer(
                out,
                None,
                shared_kv_states=unused,
                position_embeddings=rotary[layer.self_attn.layer_type],
                attention_mask=None,
                position_ids=positions,
                **{ROWS_KEYWORD: metadata},
            )
        out = self.norm(out)[:, 0]
        return self._logits(out), self.post_projection(out)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.centroids is None:
            return self.lm_head(hidden)
        # Logits are computed for the tokens of the likeliest clusters. All other tokens get the minimum of these logits
        # minus 1.
        chosen = self.centroids(hidden).topk(self.num_chosen, dim=-1).indices
        token_ids = self.token_ordering.view(self.centroids.out_features, -1)[chosen].flatten(1)
        logits = (self.lm_head.weight[token_ids] @ hidden[..., None])[..., 0]
        rest = logits.amin(dim=-1, keepdim=True) - 1.0
        return rest.repeat(1, self.lm_head.out_features).scatter_(1, token_ids, logits)

    def load(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> "SharedKvHead":
        """Assign the tensors of an assistant's checkpoint.

        Raises:
            CheckpointError: a tensor is missing, unexpected or mis-shaped.
        """
        found = {_canonical(name): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        expected = {name: tensor.shape for name, tensor in self.state_dict().items()}
        for problem, names in (
            ("lacks tensors", expected.keys() - found.keys()),
            ("has unexpected tensors", found.keys() - expected.keys()),
        ):
            if names:
                raise CheckpointError(f"the head {problem}: {', '.join(sorted(names)[:3])} ({len(names)} in all)")
        for name, tensor in found.items():
            if tensor.shape != expected[name]:
                raise CheckpointError(f"{name} of the head is {list(tensor.shape)}, not {list(expected[name])}")
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in found.items()}
        self.load_state_dict(cast, assign=True)
        return self.to(device).eval().requires_grad_(False)

    def lend(self, embedding: Tensor, scale: float) -> None:
        """Use the verifier's embedding [vocab_size, backbone_hidden_size], which is already on the head's device."""
        self.embedding = embedding
        self.embedding_scale = torch.tensor(scale, dtype=embedding.dtype, device=embedding.device)


def _canonical(name: str) -> str:
    name = name.removeprefix("masked_embedding.")
    return "lm_head.weight" if name == "model.embed_tokens.weight" else name.removeprefix("model.")


def _text_model(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' text model of the head's layers, preceded by an added layer of each type, whose keys the head's
    layers share.

    The added layers are not used. They are needed because some versions of transformers cannot build a model in which
    all layers share keys.
    """
    fields = config.to_dict()
    types, count = fields["layer_types"], fields["num_hidden_layers"]
    own = list(dict.fromkeys(types))
    given = {int(index): value for index, value in (fields.get("per_layer_config") or {}).items()}
    per_layer = {index + len(own): value for index, value in given.items()}
    per_layer |= {index: given[types.index(kind)] for index, kind in enumerate(own) if types.index(kind) in given}
    fields |= {
        "num_hidden_layers": len(own) + count,
        "num_kv_shared_layers": count,
        "layer_types": own + list(types),
        "per_layer_config": per_layer,
    }
    model = build_model(type(config).from_dict(fields))
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def shared_attention_of(
    head: SharedKvHead, config: PretrainedConfig, target: PretrainedConfig, kv_layers: dict[str, int]
) -> list[LayerAttention]:
    """Shapes of the verifier's keys and values that a head reads, in the order of `kv_layers`.

    Raises:
        CheckpointError: the head's queries do not fit the verifier's keys and values.
    """
    with torch.device("meta"):
        theirs = build_model(target).get_decoder().layers
    layers = []
    for kind, index in kv_layers.items():
        attention = theirs[index].self_attn
        dim, num_kv_heads = attention.head_dim, attention.k_proj.out_features // attention.head_dim
        ours = next(layer.self_attn for layer in head.layers if layer.self_attn.layer_type == kind)
        num_heads = ours.q_proj.out_features // ours.head_dim
        if ours.head_dim != dim or num_heads % num_kv_heads:
            raise CheckpointError(
                f"the head's {kind} has {num_heads} heads of {ours.head_dim}: the verifier's layer {index} has "
                f"{num_kv_heads} of {dim}"
            )
        window = reach(config.sliding_window) if kind == "sliding_attention" else None
        layers.append(LayerAttention(num_heads, num_kv_heads, dim, dim, window))
    return layers


def shared_layers(config: PretrainedConfig, target: PretrainedConfig) -> dict[str, int]:
    """For each layer type of the head, the index of the verifier's last layer that has this type and computes keys;
    ascending.

    Raises:
        CheckpointError: a layer type of the head does not occur in the verifier.
    """
    own = target.layer_types[: target.num_hidden_layers - (target.num_kv_shared_layers or 0)]
    missing = sorted(set(config.layer_types) - set(own))
    if missing:
        raise CheckpointError(f"the head has layers of type {missing[0]!r}: the verifier has none to share keys of")
    last = {kind: index for index, kind in enumerate(own) if kind in config.layer_types}
    return dict(sorted(last.items(), key=lambda item: item[1]))
