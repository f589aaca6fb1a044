"""Prompts whose answer is read from a drawing of digits, or from the same digits in words; and a tiny model for both.

A prompt is a beginning of noise words, then a table of digits, drawn or written row by row, then a question; the answer
is the table row by row. A drawn digit is one token of the model, so what stands where is told by M-RoPE alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.scheduling.media import MediaInput

VOCAB_SIZE = 40
ROW, ROW_END, START, END, WRITTEN, ASK = range(10, 16)
PLACEHOLDER, DRAWN, DRAWN_END, VIDEO = range(16, 20)
FIRST_NOISE = 20
GRIDS = ((3, 3), (2, 4), (4, 2), (3, 4))
Model = Qwen3VLForConditionalGeneration
MOST_NOISE = 8
MOST_TOKENS = 96
"""Of a prompt and its answer."""
_PATCH, _MERGE = 4, 2
_CELL = _PATCH * _MERGE
_GLYPHS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71222", "75757", "75717")
"""Rows of pixels of the ten digits, top to bottom: three bits each."""


class Example(NamedTuple):
    """One prompt and what follows it."""

    prompt: list[int]
    answer: list[int]
    media: tuple[MediaInput, ...]

    @property
    def token_ids(self) -> list[int]:
        """All of it."""
        return self.prompt + self.answer


def written(table: np.ndarray) -> list[int]:
    """A table of digits in words."""
    return [token for row in table.tolist() for token in (ROW, *row, ROW_END)]


def drawn(table: np.ndarray, random: np.random.Generator) -> dict[str, np.ndarray]:
    """What Qwen3-VL's processor makes of a drawing: patches in the order of the tokens, and their grid."""
    rows, columns = table.shape
    picture = np.zeros((rows * _CELL, columns * _CELL), dtype=np.float32)
    for (row, column), digit in np.ndenumerate(table):
        top, left = row * _CELL + random.integers(4), column * _CELL + random.integers(6)
        picture[top : top + 5, left : left + 3] = _glyph(int(digit))
    picture = 2 * picture - 1 + random.normal(0, 0.1, picture.shape).astype(np.float32)
    cells = picture.reshape(rows, _MERGE, _PATCH, columns, _MERGE, _PATCH).transpose(0, 3, 1, 4, 2, 5)
    patches = cells.reshape(-1, 1, _PATCH * _PATCH)
    values = np.repeat(patches, 3 * 2, axis=1).reshape(len(patches), -1)
    return {"pixel_values": values, "image_grid_thw": np.array([[1, rows * _MERGE, columns * _MERGE]])}


def _glyph(digit: int) -> np.ndarray:
    return np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in _GLYPHS[digit]], dtype=np.float32)


def example(random: np.random.Generator, shown: bool, grid: tuple[int, int], noise: int) -> Example:
    """A table of that grid, drawn or written."""
    table = random.integers(10, size=grid)
    prompt = [START, *random.integers(FIRST_NOISE, VOCAB_SIZE, size=noise).tolist()]
    media = ()
    if shown:
        arrays = drawn(table, random)
        media = (MediaInput.of(len(prompt) + 1, table.size, arrays, grid),)
        prompt += [DRAWN, *[PLACEHOLDER] * table.size, DRAWN_END]
    else:
        prompt += [WRITTEN, *written(table)]
    return Example([*prompt, ASK], [*written(table), END], media)


class Batch(NamedTuple):
    """Examples of one shape, as the model is trained on them."""

    token_ids: Tensor
    """int64 [batch, length]"""
    axes: Tensor
    """int64 [3, batch, length]"""
    images: dict[str, Tensor]
    """Inputs of the encoder; empty for written tables."""
    num_prompt_tokens: int


def batch(random: np.random.Generator, size: int, shown: bool) -> Batch:
    """Random examples of one grid, drawn or written, with as much noise before each."""
    grid, noise = GRIDS[random.integers(len(GRIDS))], int(random.integers(MOST_NOISE + 1))
    return batch_of([example(random, shown, grid, noise) for _ in range(size)])


def batch_of(examples: list[Example]) -> Batch:
    """Of examples that are shaped alike."""
    token_ids = torch.tensor([one.token_ids for one in examples])
    axes = torch.from_numpy(np.stack([rotations(one.media, 0, token_ids.shape[1]) for one in examples], axis=1))
    media = [image.arrays for one in examples for image in one.media]
    images = {name: torch.from_numpy(np.concatenate([one[name] for one in media])) for name in (media or [{}])[0]}
    return Batch(token_ids, axes, images, len(examples[0].prompt))


class Read(NamedTuple):
    """A batch in the language model."""

    embeddings: Tensor
    """[batch, length, hidden_size]"""
    hidden: Tensor
    """[batch, length, hidden_size], behind the final norm."""
    taps: Tensor | None
    """[batch, length, taps_size]"""


def new_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL of under a million weights."""
    torch.manual_seed(seed)
    vision = {"depth": 2, "num_heads": 4, "in_channels": 3, "patch_size": _PATCH, "spatial_merge_size": _MERGE}
    vision |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128, "num_position_embeddings": 64}
    text = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_config=vision | {"temporal_patch_size": 2, "deepstack_visual_indexes": [0], "initializer_range": 0.06},
        text_config=text
        | {"rope_parameters": rope, "bos_token_id": START, "eos_token_id": END, "initializer_range": 0.06},
        image_token_id=PLACEHOLDER,
        vision_start_token_id=DRAWN,
        vision_end_token_id=DRAWN_END,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config)


def hidden_states(model: Qwen3VLForConditionalGeneration, given: Batch, tap_layers: tuple[int, ...] = ()) -> Read:
    """What the language model reads and makes of a batch.

    Args:
        tap_layers: layers whose input is tapped; their number stands for what the final norm makes.
    """
    embeddings, seen = model.get_input_embeddings()(given.token_ids), {}
    if given.images:
        shown, marks = model.get_image_features(**given.images), given.token_ids == PLACEHOLDER
        embeddings = embeddings.masked_scatter(marks[..., None], torch.cat(list(shown.pooler_output)))
        seen = {
            "visual_pos_masks": marks,
            "deepstack_visual_embeds": [torch.cat(layer) for layer in shown.deepstack_features],
        }
    taken: list[Tensor] = []
    layers = model.model.language_model.layers
    hooks = [
        layers[layer].register_forward_pre_hook(
            lambda module, args, kwargs: taken.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in tap_layers
        if layer < len(layers)
    ]
    out = model.model.language_model(inputs_embeds=embeddings, position_ids=given.axes, use_cache=False, **seen)
    for hook in hooks:
        hook.remove()
    if len(layers) in tap_layers:
        taken.append(out.last_hidden_state)
    return Read(embeddings, out.last_hidden_state, torch.cat(taken, dim=-1) if taken else None)
