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
    Qwen3VLConfig,
    SiglipVisionConfig,
)

from tests.runtime.models import VOCAB_SIZE, Run, random_prompts
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loader import prepare_model
from wingbeat.runtime.vision.families import family_of

NUM_TOKENS = 30
PLACEHOLDER = 90
WINDOW = 8
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_PATCHES = {"image_size": 16, "patch_size": 4}
_GRID = {"depth": 3, "num_heads": 4, "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_GRID_TEXT = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {"rope_parameters": _ROPE}
_MARKS = {"image_token_id": PLACEHOLDER, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}

CONFIGS = {
    "llava": lambda: LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION, **_PATCHES, projection_dim=16),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=PLACEHOLDER,
        vision_feature_layer=-2,
    ),
    "gemma3": lambda: Gemma3Config(
        vision_config=SiglipVisionConfig(**_VISION, **_PATCHES),
        text_config=Gemma3TextConfig(
            **_TEXT,
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        mm_tokens_per_image=16,
        image_token_index=PLACEHOLDER,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        vision_config=_GRID
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 8}
        | {"fullatt_block_indexes": [2]},
        text_config=_GRID_TEXT,
        **_MARKS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        vision_config=_GRID
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
        | {"deepstack_visual_indexes": [0, 1]},
        text_config=_TEXT | {"rope_parameters": _ROPE},
        **_MARKS,
    ),
}


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


def random_model(name: str) -> PreTrainedModel:
    """A model with random weights, none of which is next to nothing."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif float(parameter.std()) < 0.1:
                parameter.copy_(0.2 * noise)
    return model


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
    pairs = [
        with_images(model, text, places) for text, places in zip(random_prompts(_LENS), _PLACES, strict=True)
    ]
    prompts, images = [list(part) for part in zip(*pairs, strict=True)]
    texts, gaps = zip(*[written(model, *pair, NUM_TOKENS) for pair in pairs], strict=True)
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
    return Shown(name, prepare_model(model, name), prompts, images, list(texts), min(gaps))


def written(
    model: PreTrainedModel, prompt: list[int], images: tuple[ImageInput, ...], num_tokens: int
) -> tuple[list[int], float]:
    """What generate() writes by transformers' own attention, and the smallest gap between its two best logits."""
    family, given = family_of(model.config), {}
    model.set_attn_implementation("eager")
    token_ids = torch.tensor([prompt])
    if images:
        given = {
            name: torch.from_numpy(np.concatenate([image.arrays[name] for image in images])) for name in family.inputs
        }
        if family.marks is not None:
            given[family.marks] = (token_ids == PLACEHOLDER).long()
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
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


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
