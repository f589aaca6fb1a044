"""Configs of published one-pass heads, written anew from what is known of them: names and sizes as published."""

from dataclasses import dataclass, field
from typing import Any

from wingbeat.runtime.one_pass.config import LayerMask, MarkovConfig, MarkovKind, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily

DFLASH, DFLASH2, DSPARK, JETSPEC, PEAGLE = (
    getattr(OnePassFamily, name) for name in ("DFLASH", "DFLASH2", "DSPARK", "JETSPEC", "PEAGLE")
)
MASK = 151669


FIVE = [1, 9, 17, 25, 33]


def qwen3(**fields) -> dict[str, Any]:
    """The layers of a head for Qwen3-8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "num_hidden_layers": 5, "vocab_size": 151936, "max_position_embeddings": 40960}
    return {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, **sizes, **fields}


def of(architecture: str, **fields) -> dict[str, Any]:
    return qwen3(architectures=[architecture], **fields)


@dataclass(frozen=True)
class Published:
    """A head's config, its verifier's layers and width, and what must come of them."""

    raw: dict[str, Any]
    family: OnePassFamily
    taps: tuple[int, ...]
    """Layers whose inputs are tapped."""
    num_layers: int = 36
    target_hidden: int = 4096
    slots: Slots = Slots.FILL_IN
    block: int = 16
    mask: int | None = MASK
    masks: set[LayerMask] = field(default_factory=lambda: {LayerMask()})
    markov: MarkovConfig | None = None
    theta: float = 1e6
    tensors: tuple[str, ...] = ()
    draft_vocab: int = 151936


INPUTS = tuple(layer + 1 for layer in FIVE)


VANILLA = MarkovConfig(256, MarkovKind.VANILLA, True, True)


SHIFT7 = {"slots": Slots.SHIFT, "block": 7}


PUBLISHED = {
    "z-lab/Qwen3-8B-DFlash-b16": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            num_target_layers=36,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": FIVE},
        ),
        DFLASH,
        INPUTS,
    ),
    "z-lab/Qwen3-4B-DFlash-b16, of the first, without ids": Published(
        of("DFlashDraftModel", block_size=16, num_target_layers=36, dflash_config={"mask_token_id": MASK}),
        DFLASH,
        INPUTS,
    ),
    "one layer, without ids": Published(
        of("DFlashDraftModel", num_hidden_layers=1, block_size=10, mask_token_id=MASK), DFLASH, (19,), block=10
    ),
    "z-lab/gpt-oss-20b-DFlash, whose layers slide": Published(
        of(
            "DFlashDraftModel",
            block_size=8,
            sliding_window=128,
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 6, 11, 16, 21]},
        ),
        DFLASH,
        (2, 7, 12, 17, 22),
        num_layers=24,
        block=8,
        masks={LayerMask(True, 128), LayerMask()},
    ),
    "meta-models/Muse-Glimmer-30B-assistant": Published(
        of("MuseGlimmerAssistantModel", block_size=8, dflash_config={"mask_token_id": 7, "target_layer_ids": FIVE}),
        DFLASH,
        INPUTS,
        block=8,
        mask=7,
        tensors=("encoder.fc.weight", "encoder.output_norm_enc.weight"),
    ),
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash, with a window of its own": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            dflash_config={"target_layer_ids": FIVE, "mask_token_id": MASK, "use_swa": True, "swa_window_size": 1024},
        ),
        DFLASH,
        INPUTS,
        masks={LayerMask(False, 1024)},
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": Published(
        {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "block_size": 8,
            "mask_token_id": MASK,
            "draft_vocab_size": 32000,
            "transformer_layer_config": qwen3(rope_parameters={"rope_type": "default", "rope_theta": 1000000}),
        },
        DFLASH,
        (2, 18, 33),
        block=8,
        draft_vocab=32000,
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": Published(
        of(
            "Qwen3DSparkModel",
            block_size=7,
            target_layer_ids=FIVE,
            mask_token_id=MASK,
            markov_rank=256,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        DSPARK,
        INPUTS,
        markov=VANILLA,
        **SHIFT7,
    ),
    "deepseek-ai/dflash_qwen3_8b_block7, which is DSpark without its sequential part": Published(
        of("Qwen3DSparkModel", block_size=7, target_layer_ids=[-1, *FIVE[1:]], mask_token_id=MASK, markov_rank=0),
        DSPARK,
        (0, *INPUTS[1:]),
        markov=MarkovConfig(0, MarkovKind.VANILLA, False, False),
        **SHIFT7,
    ),
    "RedHatAI/Qwen3-8B-speculator.dspark": Published(
        {
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "block_size": 8,
            "mask_token_id": MASK,
            "markov_rank": 256,
            "transformer_layer_config": qwen3(),
        },
        DSPARK,
        (2, 18, 33),
        block=8,
        markov=MarkovConfig(256, MarkovKind.VANILLA, False, True),
    ),
    "a speculators' DSpark that drafts from the anchor": Published(
        {
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "sample_from_anchor": True,
            "block_size": 7,
            "mask_token_id": MASK,
            "markov_rank": 64,
            "markov_head_type": "rnn",
            "transformer_layer_config": qwen3(),
        },
        DSPARK,
        (2, 18, 33),
        markov=MarkovConfig(64, MarkovKind.RNN, False, True),
        **SHIFT7,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": Published(
        of(
            "DFlash2DraftModel",
            hidden_size=5120,
            num_attention_heads=32,
            vocab_size=248320,
            block_size=8,
            rope_theta=10000000,
            sliding_window=2048,
            layer_types=["sliding_attention"] * 5,
            is_causal=False,
            dflash_config={
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        ),
        DFLASH2,
        (6, 20, 34, 48, 62),
        num_layers=64,
        target_hidden=5120,
        block=8,
        mask=248070,
        masks={LayerMask(False, 2048)},
        theta=1e7,
        draft_vocab=248320,
    ),
    "JetSpec/jetspec-qwen3-8b": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": FIVE, "causal_head": True},
        ),
        JETSPEC,
        INPUTS,
        masks={LayerMask(True)},
    ),
}
