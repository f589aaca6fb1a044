"""Tiny random vision-language verifiers, prompts with images, and what transformers says they write."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)

from tests.runtime.models import SHAPE, VOCAB_SIZE, Run, add_noise, random_prompts
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.vision.families import VisionFamily, family_of

NUM_TOKENS = 30
PLACEHOLDER = 90
WINDOW = 8
SEEDS = {"gemma3": 1, "qwen2_5_vl": 2, "qwen3_vl": 1}
"""Of the weights, 0 where not given: others write one token over and over, or the placeholder."""
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_PATCHES = {"image_size": 16, "patch_size": 4}
_GRID = {"depth": 3, "num_heads": 4, "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2}
_GRID |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
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
    "llava_siglip": lambda size, mark: LlavaConfig(
        vision_config=SiglipVisionConfig(**_VISION, **_PATCHES),
        text_config=LlamaConfig(**_text(size)),
        image_token_index=mark,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
}
"""Relatives of them, which share their code here."""


@dataclass
class Shown:
    """A verifier, prompts with images, and what generate() writes behind each."""

    name: str
    loaded: LoadedModel
    prompts: list[list[int]]
    images: list[tuple[ImageInput, ...]]
    continuations: list[list[int]]
    smallest_gap: float

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with their continuations."""
        return [prompt + more for prompt, more in zip(self.prompts, self.continuations, strict=True)]


def random_model(name: str, vocab_size: int = VOCAB_SIZE, mark: int = PLACEHOLDER) -> PreTrainedModel:
    """A model with random weights, none of which is next to nothing."""
    torch.manual_seed(SEEDS.get(name, 0))
    config = (CONFIGS | MORE)[name](vocab_size, mark)
    return add_noise(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())


def image(model: PreTrainedModel, seed: int, start: int, grid: tuple[int, int] = (2, 3)) -> ImageInput:
    """An image of noise at a place of a prompt."""
    config, family = model.config, family_of(model.config)
    arrays = family.example(config, *grid)
    random = np.random.default_rng(seed)
    arrays["pixel_values"] = random.standard_normal(arrays["pixel_values"].shape, dtype=np.float32)
    return ImageInput.of(start, family.num_tokens(config, arrays), arrays, family.grid(config, arrays))


def with_images(
    model: PreTrainedModel, text: list[int], places: dict[int, tuple[int, tuple[int, int]]]
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """A prompt with images in it.

    Args:
        places: seed and grid of an image, by its place in the text.
    """
    prompt, images = [token % PLACEHOLDER for token in text], []
    for place in sorted(places, reverse=True):
        seed, grid = places[place]
        size = image(model, seed, 0, grid).length
        prompt[place:place] = [PLACEHOLDER] * size
    shift = 0
    for place in sorted(places):
        images.append(image(model, places[place][0], place + shift, places[place][1]))
        shift += images[-1].length
    return prompt, tuple(images)


_PLACES = (
    {4: (1, (2, 3))},
    {0: (2, (4, 2)), 9: (1, (2, 3))},
    {},
    {20: (3, (3, 3)), 21: (4, (2, 2)), 30: (2, (4, 2))},
)
_LENS = (6, 27, 12, 33)


@cache
def shown(name: str) -> Shown:
    """A model of CONFIGS with prompts that have one image, two, none, and three."""
    model = random_model(name)
    pairs = [with_images(model, text, places) for text, places in zip(random_prompts(_LENS), _PLACES, strict=True)]
    prompts, images = [list(part) for part in zip(*pairs, strict=True)]
    texts, gaps = zip(*[written(model, *pair, NUM_TOKENS) for pair in pairs], strict=True)
    return Shown(name, prepare_model(model, name), prompts, images, list(texts), min(gaps))


def written(
    model: PreTrainedModel, prompt: list[int], images: tuple[ImageInput, ...], num_tokens: int
) -> tuple[list[int], float]:
    """What generate() writes by transformers' own attention, and the smallest gap between its two best logits."""
    model.set_attn_implementation("eager")
    token_ids = torch.tensor([prompt])
    given = inputs(family_of(model.config), images, token_ids, len(prompt))
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
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


def inputs(
    family: VisionFamily, images: tuple[ImageInput, ...], token_ids: torch.Tensor, num_prompt_tokens: int
) -> dict[str, torch.Tensor]:
    """What transformers' forward takes of the images beside the token ids."""
    if not images:
        return {}
    given = {name: torch.from_numpy(np.concatenate([image.arrays[name] for image in images])) for name in family.inputs}
    if family.marks is not None:
        # An answer may have the token too, which is a word like any other there.
        in_prompt = torch.arange(token_ids.shape[1]) < num_prompt_tokens
        given[family.marks] = ((token_ids == PLACEHOLDER) & in_prompt).long()
    return given


def forget_positions(model: PreTrainedModel) -> None:
    """Those of the last sequence, which transformers keeps in the model."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class ShownRun(Run):
    """Requests with images through an engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        images: list[tuple[ImageInput, ...]],
        params: SamplingParams | list[SamplingParams],
    ) -> None:
        super().__init__(engine, [], [])
        many = params if isinstance(params, list) else [params] * len(prompts)
        for index, (prompt, held, param) in enumerate(zip(prompts, images, many, strict=True)):
            engine.add_request(Request(str(index), tuple(prompt), param, images=held))
        self.tokens = [[] for _ in prompts]


def dense_taps(ref: Shown, layers: tuple[int, ...]) -> list[torch.Tensor]:
    """By reference sequence: what enters those layers, [num_tokens, taps_size], by transformers' own forward pass."""
    model, taps = ref.loaded.model, []
    family = family_of(model.config)
    model.set_attn_implementation("eager")
    for sequence, images in zip(ref.sequences, ref.images, strict=True):
        token_ids, entered = torch.tensor([sequence]), []
        hooks = [
            ref.loaded.decoder_layers[layer].register_forward_pre_hook(
                lambda module, args, kwargs, to=entered: to.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in layers
        ]
        with torch.no_grad():
            model(token_ids, use_cache=False, **inputs(family, images, token_ids, len(ref.prompts[len(taps)])))
        for hook in hooks:
            hook.remove()
        forget_positions(model)
        taps.append(torch.cat(entered, dim=-1)[0])
    model.set_attn_implementation(ATTENTION_NAME)
    return taps
