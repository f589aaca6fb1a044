"""The three steps of a draft engine against its head run over whole paths without any KV."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.draft_world import VOCAB
from tests.runtime.feature_kinds import of_features
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.tensorrt.draft_runner import DraftedTree, DraftOutput, DraftRunner, KnownPairs
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig, EngineEncoder
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession

LENS = (29, 3, 17, 41)
COUNTS = (1, 3, 2, 4)
DELTAS = (2, 5, 0, 7)
"""By how much more tokens behind images are rotated."""
GRIDS = EngineEncoder(shape=(4,), num_axes=3, merge=2)
"""A vision encoder whose images have rows and columns."""
TREES = {"tree": (-1, -1, 0, 0, 2, 3), "chain": (-1, 0, 1, 2, 3, 4)}
"""Parents of drafted nodes; -1 is the root."""

SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"target_hidden_size": 32, "vocab_size": VOCAB},
}
_LATENT = {
    **{"num_key_value_heads": 4, "head_dim": 12, "query_rank": 10, "kv_rank": 14},
    **{"rope_dim": 4, "value_dim": 8},
}
HEADS = {
    "eagle3": {},
    "eagle3.1": {"norm_output": True, "fc_norm": True},
    "before-residual": {"norm_before_residual": True, "norm_before_fc": True},
    "biased": {"fc_bias": True, "attention_bias": True, "qk_norm": True},
    "partial": {"rotary_dim": 4, "rope_interleaved": True},
    "deep": {"num_layers": 3, "rotary_dim": 6, "qk_norm": True, "norm_output": True},
    "latent": _LATENT,
    "latent-grids": _LATENT | {"mrope_section": (1, 0, 1)},
    "grids": {"mrope_section": (2, 1, 1), "mrope_interleaved": True},
    "eagle1": None,
}


def latent_config(**fields: Any) -> EagleHeadConfig:
    """Config of a head of compressed attention, an optional feature."""
    return of_features("CONFIGS")["latent"](**fields)


def head_of(kind: str, std: float = 0.3) -> DecoderHead:
    """A random head of HEADS."""
    torch.manual_seed(4)
    if HEADS[kind] is None:
        head = Eagle1Head(Eagle1HeadConfig(**SHAPE, tap_layers=(4,), draft_vocab_size=VOCAB, fc_bias=True))
    else:
        config = latent_config if kind.startswith("latent") else EagleHeadConfig
        head = config(**SHAPE | HEADS[kind], tap_layers=(1, 2, 3), draft_vocab_size=60).new_head()
        head.draft_token_ids.copy_(torch.arange(60) + 20)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=std)
    return head.eval().requires_grad_(False)


def run_densely(head: DecoderHead, tokens: Tensor, features: Tensor, axes: Tensor | None = None) -> Tensor:
    """The head's output behind all of a path, [H], every layer over everything.

    Args:
        tokens: ids [1, T], or their embeddings, as `features` [1, T, ...].
        axes: int64 [3, T]: by what pairs are rotated; None is their positions.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        options = {"is_causal": True, "enable_gqa": True, "scale": head.scaling}
        return functional.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)

    positions = torch.arange(tokens.shape[1])[None]
    rotary = head.rotary(positions) if axes is None else head.rotary_in_grids(axes[:, None])
    return head.run_layers(tokens, features, rotary, [attend] * head.num_layers)[0, -1]


@torch.inference_mode()
def draft_differences(
    session: EngineSession, config: DraftEngineConfig, head: DecoderHead, batch: int, relative: bool = False
) -> dict[str, float]:
    """Largest difference of logits and hidden states by step, over uneven lengths.

    Prompts contain images if the graphs take images.

    Args:
        relative: whether differences are relative to the largest number, where that is above 1.
    """
    kv = LinearKV(config.layers, batch + 1, config.limits.capacity, config.torch_dtype, session.device)
    runner, generator = DraftRunner(session, config, kv), torch.Generator().manual_seed(8)
    rows, lens, counts = list(range(1, batch + 1)), list(LENS[:batch]), list(COUNTS[:batch])
    longest = max(lens) + max(counts)
    ids = torch.randint(0, head.config.vocab_size, (batch, longest), generator=generator)
    taps = torch.randn(batch, longest, head.taps_size, generator=generator)
    told = _told(head, batch, longest, generator) if config.media_width else None

    def dense(row: int, num_known: int, path_ids: Tensor, path_hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens, axes = torch.cat((ids[row, :num_known], path_ids))[None], None
        features = torch.cat((head.fuse(taps[row, :num_known]), head.feedback(path_hidden)))[None]
        if told is not None:
            tokens, axes = head.embed(tokens), told.axes[row, :, : tokens.shape[1]]
            own = tokens[0, :num_known]
            own[told.stands[row, :num_known]] = told.embeddings[row, :num_known][told.stands[row, :num_known]]
        hidden = run_densely(head, tokens, features, axes)
        return head.logits(hidden), hidden

    def known_gap(output: DraftOutput, known: list[int]) -> float:
        nothing = ids[0, :0], torch.zeros(0, head.hidden_size)
        return max(_gap(output, row, dense(row, length, *nothing), relative) for row, length in enumerate(known))

    most, starts = max(lens), [0] * batch
    prompts = KnownPairs(rows, starts, lens, ids[:, :most].contiguous(), taps[:, :most].contiguous())
    if told is not None:
        shown = told.stands[:, :most].contiguous(), told.embeddings[:, :most].contiguous()
        prompts = prompts._replace(rotated=told.axes[:, :, :most], shown=shown)
    output = runner.prefill(prompts)
    found = {"prefill": known_gap(output, lens)}
    later = torch.tensor(lens)[:, None] + torch.arange(max(counts))
    accepted = ids.gather(1, later), torch.stack([part[at] for part, at in zip(taps, later, strict=True)])
    deltas = None if told is None else torch.tensor(DELTAS[:batch])
    rotated = None if deltas is None else later + deltas[:, None]
    output = runner.accept(KnownPairs(rows, lens, counts, *accepted, rotated))
    ends = [length + count for length, count in zip(lens, counts, strict=True)]
    found["accept"] = known_gap(output, ends)
    for name, parents in TREES.items():
        visible = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            visible[node] |= visible[parent] if parent >= 0 else False
        nodes = torch.randint(0, head.config.vocab_size, (batch, len(parents)), generator=generator)
        hidden = torch.randn(batch, len(parents), head.hidden_size, generator=generator)
        tree = DraftedTree(rows, ends, nodes, hidden, visible.sum(1) - 1, visible.repeat(batch, 1, 1), deltas)
        selected = torch.tensor([4, 5]).repeat(batch, 1)
        output = runner.proposal(tree, selected)
        found[name] = max(
            _gap(
                output,
                (row, place),
                dense(row, ends[row], nodes[row, visible[node]], hidden[row, visible[node]]),
                relative,
            )
            for row in range(batch)
            for place, node in enumerate((4, 5))
        )
    return found


class _Told(NamedTuple):
    """Positions and embeddings of images in the prompts."""

    axes: Tensor
    """int64 [batch, 3, T], of the prompts and whatever follows them."""
    stands: Tensor
    """bool [batch, longest]"""
    embeddings: Tensor
    """[batch, longest, hidden_size]"""


def _told(head: DecoderHead, batch: int, longest: int, generator: torch.Generator) -> _Told:
    num_rows = longest + max(map(len, TREES.values()))
    axes = torch.arange(num_rows).repeat(batch, 3, 1) + torch.tensor(DELTAS[:batch])[:, None, None]
    stands = torch.rand(batch, longest, generator=generator) < 0.4
    for row, length in enumerate(LENS[:batch]):
        axes[row, :, :length] = torch.randint(0, 50, (3, length), generator=generator)
        stands[row, length:] = False
    return _Told(axes, stands, torch.randn(batch, longest, head.hidden_size, generator=generator))


def _gap(output: DraftOutput, at: int | tuple[int, int], expected: tuple[Tensor, Tensor], relative: bool) -> float:
    pairs = zip((output.logits[at], output.hidden[at]), expected, strict=True)
    return max(
        (ours - theirs).abs().max().item() / (theirs.abs().max().clamp_min(1).item() if relative else 1.0)
        for ours, theirs in pairs
    )
