"""Reference logits from transformers for the test texts, with eager attention and an unmodified model.

In float32 the reference is transformers' own cached decoding. In half precision the reference is the model's output
computed in float32, together with the distance of transformers' half-precision rows from that output.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from wingbeat.runtime.model_trial.exact import HALVES, in_float32
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.verifier.layers.loaded_model import num_words
from wingbeat.runtime.verifier.layers.probe import ProbedAttention
from wingbeat.runtime.verifier_errors import UnsupportedModelError

PARENTS = (-1, 0, 0, 1, 1, 2)
"""Parent of each node of the test tree: the root has two children; the first child has two children, and the second
child has a single child."""
DEPTHS = (0, 1, 1, 2, 2, 2)
PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5))
"""Nodes from the root to each leaf."""
NUM_STEPS = 3
"""Number of plain decode steps after the prompt; the last step's token is the tree's root."""
_NUM_BEHIND = NUM_STEPS + len(PARENTS) - 1
"""Number of tokens after the prompt: plain steps, and tree nodes other than the root."""
_LONGEST, _SHORTER_BY = 29, 12
WIDEST_TRIED_WINDOW = 64
WRITTEN = """The lighthouse keeper climbed the stairs every evening to light the lamp. In the winter of 1884 a storm \
broke two of the windows, and for three nights no ship could see the coast. "Why did nobody come to help?" she asked.

def area(width: float, height: float) -> float:
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return width * height
"""
"""Natural text to test on: random tokens are unlike training data, so rounding changes the logits of random tokens
more.
"""


class TrialText(NamedTuple):
    """A test sequence: a prompt, the tokens of plain decode steps, and a tree after these tokens."""

    prompt: list[int]
    steps: list[int]
    tree: list[int]
    """Tokens of the tree's nodes; the root is the last step's token."""
    spans: tuple[PromptSpan, ...] = ()
    """Media spans of the prompt."""

    def paths(self) -> Tensor:
        """Returns prompt, steps and then the nodes of a path, for each path of the tree: int64 [num_paths, length]."""
        before = [*self.prompt, *self.steps[:-1]]
        return torch.tensor([before + [self.tree[node] for node in path] for path in PATHS])


class Reference(NamedTuple):
    """Logits of transformers for one text."""

    text: TrialText
    rows: Tensor
    """Logits, float32 [num_steps + num_nodes, vocab_size]: after the prompt, after each step except the last, and at
    each tree node."""
    rounding: tuple[float, ...] = ()
    """Distance of transformers' half-precision row from each of `rows`; empty for float32 models."""


def _no_inputs(text: TrialText, token_ids: Tensor) -> dict[str, Tensor]:
    return {}


class _Told(LogitsProcessor):
    """Logits processor that makes generate() emit given tokens."""

    def __init__(self, token_ids: Tensor, num_prompt_tokens: int) -> None:
        self.token_ids, self.start = token_ids, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores [num_paths, vocab_size] that allow one token per row."""
        place = min(input_ids.shape[1], self.token_ids.shape[1] - 1)
        told = torch.full_like(scores, -torch.inf)
        return told.scatter_(1, self.token_ids[:, place : place + 1], 0.0)


@torch.inference_mode()
def reference_logits(
    model: PreTrainedModel,
    texts: list[TrialText],
    inputs: Callable[[TrialText, Tensor], dict[str, Tensor]] = _no_inputs,
) -> list[Reference]:
    """Returns transformers' logits for these texts, with which a prepared model's logits are compared.

    Args:
        inputs: function of a text and of the token ids [num_paths, length] of its paths; returns further arguments of
            generate().

    Raises:
        UnsupportedModelError: transformers' half-precision logits are not finite; the message does not contain the
            model's name.
    """
    model.set_attn_implementation("eager")
    if model.dtype not in HALVES:
        return [Reference(text, decoded_rows(model, text, inputs)) for text in texts]
    rounded = [_rows_at_once(model, text, inputs) for text in texts]
    with in_float32(model):
        exact = [_rows_at_once(model, text, inputs) for text in texts]
    return [_compared(model, *one) for one in zip(texts, exact, rounded, strict=True)]


def _compared(model: PreTrainedModel, text: TrialText, exact: Tensor, rounded: Tensor) -> Reference:
    if exact.isfinite().all() and not rounded.isfinite().all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"its activations do not fit {dtype}: transformers' own logits are not finite there, and are in float32: "
            "start with dtype bfloat16 or float32"
        )
    return Reference(text, exact, tuple(map(distance, rounded, exact)))


def texts_for(model: PreTrainedModel, probed: ProbedAttention) -> list[TrialText]:
    """Returns two texts of different lengths that exceed the model's short sliding windows.

    Wide windows need no text, because they are derived from masks.
    """
    windows = {layer.sliding_window for layer in probed.layers if layer.sliding_window}
    vocab_size = min(map(num_words, (model.get_input_embeddings(), model.get_output_embeddings())))
    return trial_texts(windows, probed.max_positions, vocab_size, _special_tokens(model))


def trial_texts(
    windows: Collection[int], max_positions: int, vocab_size: int, avoided: frozenset[int] = frozenset()
) -> list[TrialText]:
    """Returns two texts of random tokens; the first text is longer."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in _lengths(windows, max_positions):
        count = length + _NUM_BEHIND
        drawn = torch.randint(vocab_size, (2 * count + 64,), generator=generator).tolist()
        # `avoided` holds special tokens, such as placeholders of media spans, which are not text.
        texts.append(_text([token for token in drawn if token not in avoided][:count], length))
    return texts


def written_texts(texts: list[TrialText], tokens: Sequence[int]) -> list[TrialText]:
    """Returns texts with the lengths of `texts`, cut from `tokens` at evenly spaced offsets."""
    found = []
    for index, text in enumerate(texts):
        length = len(text.prompt)
        start = index * len(tokens) // len(texts)
        repeated = [tokens[(start + place) % len(tokens)] for place in range(length + _NUM_BEHIND)]
        found.append(_text(repeated, length))
    return found


def _lengths(windows: Collection[int], max_positions: int) -> tuple[int, int]:
    """Returns the prompt lengths of the two texts."""
    tried = [window for window in windows if window <= WIDEST_TRIED_WINDOW]
    most = max_positions - NUM_STEPS - max(DEPTHS)
    longest = min(max(_LONGEST, *(window + window // 2 for window in tried), 0), most)
    return longest, max(longest - _SHORTER_BY, min(longest, 3))


def _text(tokens: list[int], length: int) -> TrialText:
    """Splits tokens into a prompt of `length` tokens, the tokens of the steps, and the tokens of the tree."""
    steps = tokens[length : length + NUM_STEPS]
    return TrialText(tokens[:length], steps, [steps[-1], *tokens[length + NUM_STEPS :]])


def _special_tokens(model: PreTrainedModel) -> frozenset[int]:
    configs = (model.config, model.config.get_text_config())
    names = ("_token_id", "_token_index")
    values = [value for config in configs for name, value in vars(config).items() if name.endswith(names)]
    return frozenset(value for value in values if isinstance(value, int))


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which generate() ignores the checkpoint's generation config."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@torch.inference_mode()
def decoded_rows(
    model: PreTrainedModel, text: TrialText, inputs: Callable[[TrialText, Tensor], dict[str, Tensor]] = _no_inputs
) -> Tensor:
    """Returns `Reference.rows` of a text from generate() in the model's dtype; attention must already be eager."""
    device = next(model.parameters()).device
    paths, start = text.paths().to(device), len(text.prompt)
    with _plain_generation(model):
        out = model.generate(
            paths[:, :start],
            attention_mask=torch.ones_like(paths[:, :start]),
            max_new_tokens=paths.shape[1] - start + 1,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            logits_processor=[_Told(paths, start)],
            output_logits=True,
            return_dict_in_generate=True,
            **inputs(text, paths[:, :start]),
        )
    return _rows(torch.stack(out.logits, dim=1))


def _rows_at_once(
    model: PreTrainedModel, text: TrialText, inputs: Callable[[TrialText, Tensor], dict[str, Tensor]]
) -> Tensor:
    """Returns `Reference.rows` of a text from one pass over whole paths."""
    paths = text.paths().to(next(model.parameters()).device)
    given = inputs(text, paths)
    if not text.spans:
        # As in generate(); without positions, RoBERTa's begin behind its padding token's.
        given["position_ids"] = torch.arange(paths.shape[1], device=paths.device).expand_as(paths)
    return _rows(model(input_ids=paths, use_cache=False, **given).logits[:, len(text.prompt) - 1 :])


def _rows(logits: Tensor) -> Tensor:
    """Selects `Reference.rows` from logits [num_paths, length, vocab_size] of whole paths, as float32."""
    logits = logits.float()
    before_tree = logits[0, : logits.shape[1] - 1 - max(DEPTHS)]
    where = {node: (row, len(before_tree) + depth) for row, path in enumerate(PATHS) for depth, node in enumerate(path)}
    nodes = torch.stack([logits[where[node]] for node in range(len(PARENTS))])
    return torch.cat([before_tree, nodes])


def distance(row: Tensor, expected: Tensor) -> float:
    """Returns the distance of two rows of logits, relative to the second row's spread.

    The distance is infinite if a row is not finite.
    """
    spread = (expected - expected.mean()).norm().clamp_min(1e-12)
    found = float((row - expected).norm() / spread)
    return float("inf") if math.isnan(found) else found
