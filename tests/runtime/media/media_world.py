"""Tiny random verifiers that take images or audio, prompts with some, and what transformers says they write."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from transformers import (
    AudioFlamingo3Config,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GlmAsrConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)

from tests.runtime.hybrids import SHAPES
from tests.runtime.models import SHAPE, VOCAB_SIZE, Run, add_noise, random_prompts, settled
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.media.families import FAMILIES, MediaFamily, family_of
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import auto_class
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

NUM_TOKENS = 30
PLACEHOLDER = 90
WINDOW = 8
SEEDS = {"gemma3": 1, "qwen2_5_vl": 2, "qwen3_vl": 1, "audioflamingo3": 1, "qwen3_5": 2}
"""Seeds of the weights, 0 by default: with other seeds a model repeats one token or writes the placeholder."""
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_PATCHES = {"image_size": 16, "patch_size": 4}
_GRID = {"depth": 3, "num_heads": 4, "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2}
_GRID |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_PART_ROPE = {"rope_parameters": _ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_LAYER_TYPES = ["sliding_attention", "full_attention"] * 2


def _text(vocab_size: int) -> dict:
    return SHAPE | {"vocab_size": vocab_size}


def _marks(mark: int) -> dict:
    return {
        "image_token_id": mark,
        "vision_start_token_id": mark + 1,
        "vision_end_token_id": mark + 2,
        "video_token_id": mark + 3,
    }


CONFIGS = {
    "llava": lambda size, mark: LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION, **_PATCHES, projection_dim=16),
        text_config=LlamaConfig(**_text(size)),
        image_token_index=mark,
        vision_feature_layer=-2,
    ),
    "gemma3": lambda size, mark: Gemma3Config(
        vision_config=SiglipVisionConfig(**_VISION, **_PATCHES),
        text_config=Gemma3TextConfig(
            **_text(size), sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_LAYER_TYPES
        ),
        mm_tokens_per_image=16,
        image_token_index=mark,
        boi_token_index=mark + 1,
        eoi_token_index=mark + 2,
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": lambda size, mark: Qwen2_5_VLConfig(
        vision_config=_GRID | {"window_size": 8, "fullatt_block_indexes": [2]},
        text_config={name: value for name, value in _text(size).items() if name != "head_dim"} | _ROPE,
        **_marks(mark),
    ),
    "qwen3_vl": lambda size, mark: Qwen3VLConfig(
        vision_config=_GRID | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        text_config=_text(size) | _ROPE,
        **_marks(mark),
    ),
}
"""(vocabulary, token that stands for an image) -> a configuration: causal with plain positions, in both directions
within an image, rotated in grids, and that with features for deeper layers."""
_LAYERS = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32}
_HEARS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "hidden_size": 32}
_MEL = {"num_mel_bins": 16}
AUDIO_CONFIGS = {
    "qwen2_audio": lambda size, mark: Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "max_source_positions": 20} | _LAYERS | _MEL,
        text_config=_text(size) | {"model_type": "qwen2"},
        audio_token_index=mark,
    ),
    "audioflamingo3": lambda size, mark: AudioFlamingo3Config(
        audio_config={"model_type": "audioflamingo3_encoder", "max_source_positions": 12} | _HEARS | _MEL,
        text_config=_text(size) | {"model_type": "qwen2"},
        audio_token_id=mark,
    ),
}
"""Configurations of models with audio: a sound is one window, or several of 6 tokens; a token is made of 4 frames."""


MORE = {
    "qwen2_vl": lambda size, mark: Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 2},
        text_config={name: value for name, value in _text(size).items() if name != "head_dim"} | _ROPE,
        **_marks(mark),
    ),
    "qwen3_vl_moe": lambda size, mark: Qwen3VLMoeConfig(
        vision_config=_GRID | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        text_config=_text(size) | _ROPE | _EXPERTS,
        **_marks(mark),
    ),
    "glmasr": lambda size, mark: GlmAsrConfig(
        audio_config={"model_type": "glmasr_encoder", "max_position_embeddings": 24}
        | _HEARS
        | _MEL
        | {"intermediate_size": 128},
        text_config=_text(size) | {"model_type": "llama"},
        audio_token_id=mark,
        tie_word_embeddings=False,
    ),
    "llava_siglip": lambda size, mark: LlavaConfig(
        vision_config=SiglipVisionConfig(**_VISION, **_PATCHES),
        text_config=LlamaConfig(**_text(size)),
        image_token_index=mark,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
}
"""Relatives of them, which share their code here."""
HYBRIDS = {
    "qwen3_5": lambda size, mark: Qwen3_5Config(
        vision_config=_GRID | {"num_position_embeddings": 64},
        text_config=SHAPES["qwen3_5"] | {"vocab_size": size} | _PART_ROPE,
        **_marks(mark),
    ),
}
"""Configurations of models whose layers also keep recurrent states."""


@dataclass
class Shown:
    """A verifier, prompts with media, and what generate() writes behind each."""

    name: str
    loaded: LoadedModel
    prompts: list[list[int]]
    media: list[tuple[MediaInput, ...]]
    continuations: list[list[int]]
    smallest_gap: float

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with their continuations."""
        return [prompt + more for prompt, more in zip(self.prompts, self.continuations, strict=True)]


def random_model(name: str, vocab_size: int = VOCAB_SIZE, mark: int = PLACEHOLDER) -> PreTrainedModel:
    """A model with random weights, none of which is next to nothing."""
    torch.manual_seed(SEEDS.get(name, 0))
    config = (CONFIGS | AUDIO_CONFIGS | MORE | HYBRIDS)[name](vocab_size, mark)
    return add_noise(auto_class(config.model_type).from_config(config, dtype=torch.float32).eval())


def family(model: PreTrainedModel) -> MediaFamily:
    """Media family of a model of this module."""
    return family_of(model.config, FAMILIES[model.config.model_type].kind)


def medium(model: PreTrainedModel, seed: int, start: int, grid: tuple[int, int] = (2, 3)) -> MediaInput:
    """An image or a sound of noise at a place of a prompt."""
    config, of = model.config, family(model)
    arrays = of.example(config, *grid)
    shown, random = of.inputs[0], np.random.default_rng(seed)
    arrays[shown] = random.standard_normal(arrays[shown].shape, dtype=np.float32)
    return of.medium(config, start, arrays)


def with_media(
    model: PreTrainedModel, text: list[int], places: dict[int, tuple[int, tuple[int, int]]]
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """A prompt with media in it.

    Args:
        places: seed and grid of a medium, by its place in the text.
    """
    prompt, media = [token % PLACEHOLDER for token in text], []
    for place in sorted(places, reverse=True):
        seed, grid = places[place]
        size = medium(model, seed, 0, grid).length
        prompt[place:place] = [PLACEHOLDER] * size
    shift = 0
    for place in sorted(places):
        media.append(medium(model, places[place][0], place + shift, places[place][1]))
        shift += media[-1].length
    return prompt, tuple(media)


_PLACES = (
    {4: (1, (2, 3))},
    {0: (2, (4, 2)), 9: (1, (2, 3))},
    {},
    {20: (3, (3, 3)), 21: (4, (2, 2)), 30: (2, (4, 2))},
)
_LENS = (6, 27, 12, 33)


@cache
def shown(name: str) -> Shown:
    """A model of these configurations with prompts that have one image or sound, two, none, and three."""
    model = random_model(name)
    pairs = [with_media(model, text, places) for text, places in zip(random_prompts(_LENS), _PLACES, strict=True)]
    prompts, media = [list(part) for part in zip(*pairs, strict=True)]
    texts, gaps = zip(*[written(model, *pair, NUM_TOKENS) for pair in pairs], strict=True)
    return Shown(name, prepare_model(model, name), prompts, media, list(texts), min(gaps))


def written(
    model: PreTrainedModel, prompt: list[int], media: tuple[MediaInput, ...], num_tokens: int
) -> tuple[list[int], float]:
    """Tokens of `generate()` with transformers' own attention, and the smallest gap between its two best logits."""
    model.set_attn_implementation("eager")
    token_ids = torch.tensor([prompt])
    given = inputs(family(model), media, token_ids, len(prompt))
    out = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
    )
    forget_positions(model)
    return out.sequences[0, len(prompt) :].tolist(), settled(out.logits)


def inputs(
    of: MediaFamily, media: tuple[MediaInput, ...], token_ids: torch.Tensor, num_prompt_tokens: int
) -> dict[str, torch.Tensor]:
    """Inputs of transformers' forward for the media, in addition to the token ids."""
    if not media:
        return {}
    given = {name: torch.from_numpy(np.concatenate([one.arrays[name] for one in media])) for name in of.inputs}
    if of.marks is not None:
        # An answer may have the token too, which is a word like any other there.
        in_prompt = torch.arange(token_ids.shape[1]) < num_prompt_tokens
        given[of.marks] = ((token_ids == PLACEHOLDER) & in_prompt).long()
    return given


def forget_positions(model: PreTrainedModel) -> None:
    """Drop the position offsets of the last sequence, which transformers keeps in the model."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class ShownRun(Run):
    """Requests with media through an engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        media: list[tuple[MediaInput, ...]],
        params: SamplingParams | list[SamplingParams],
    ) -> None:
        super().__init__(engine, [], [])
        many = params if isinstance(params, list) else [params] * len(prompts)
        for index, (prompt, held, param) in enumerate(zip(prompts, media, many, strict=True)):
            engine.add_request(Request(str(index), tuple(prompt), param, spans=held))
        self.tokens = [[] for _ in prompts]


def dense_taps(ref: Shown, layers: tuple[int, ...]) -> list[torch.Tensor]:
    """By reference sequence: what enters those layers, [num_tokens, taps_size], by transformers' own forward pass."""
    model, taps = ref.loaded.model, []
    of = family(model)
    model.set_attn_implementation("eager")
    for sequence, media in zip(ref.sequences, ref.media, strict=True):
        token_ids, entered = torch.tensor([sequence]), []
        hooks = [
            ref.loaded.decoder_layers[layer].register_forward_pre_hook(
                lambda module, args, kwargs, to=entered: to.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in layers
        ]
        with torch.no_grad():
            model(token_ids, use_cache=False, **inputs(of, media, token_ids, len(ref.prompts[len(taps)])))
        for hook in hooks:
            hook.remove()
        forget_positions(model)
        taps.append(torch.cat(entered, dim=-1)[0])
    model.set_attn_implementation(ATTENTION_NAME)
    return taps
