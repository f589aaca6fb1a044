"""Logits of transformers for the texts of a trial, by eager attention and before anything of a model is switched.

In float32 the reference is transformers' own cached decoding. In half precision the reference is the model's answer in
float32, and beside each row stands how far transformers' own row in half precision is from that.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.verifier.layers.loaded_model import num_words
from wingbeat.runtime.verifier.layers.probe import ProbedAttention
from wingbeat.runtime.verifier.loading.exact import HALVES, in_float32
from wingbeat.runtime.verifier_errors import UnsupportedModelError

PARENTS = (-1, 0, 0, 1, 1, 2)
"""Parents of the tree's nodes: two children of the root; two of the first of them, one of the second."""
DEPTHS = (0, 1, 1, 2, 2, 2)
PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5))
"""Nodes from the root to each leaf."""
NUM_STEPS = 3
"""Tokens behind the prompt: plain steps, and the root of the tree."""
_NUM_BEHIND = NUM_STEPS + len(PARENTS) - 1
"""Tokens behind the prompt."""
_LONGEST, _SHORTER_BY = 29, 12
WIDEST_TRIED_WINDOW = 64
WRITTEN = """The lighthouse keeper climbed the stairs every evening to light the lamp. In the winter of 1884 a storm \
broke two of the windows, and for three nights no ship could see the coast. "Why did nobody come to help?" she asked.

def area(width: float, height: float) -> float:
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return width * height
"""
"""A text such as models are trained on: random tokens are far from all that they know, and rounding moves them more."""


class TrialText(NamedTuple):
    """Sequence of a trial: a prompt, the tokens of its plain steps, and the tree behind them."""

    prompt: list[int]
    steps: list[int]
    tree: list[int]
    """Tokens of the nodes; the root is the last step's."""
    spans: tuple[PromptSpan, ...] = ()
    """Spans of the prompt."""

    def paths(self) -> Tensor:
        """Each path of the tree behind all before it: int64 [num_paths, length]."""
        before = [*self.prompt, *self.steps[:-1]]
        return torch.tensor([before + [self.tree[node] for node in path] for path in PATHS])


class Reference(NamedTuple):
    """Logits of transformers for one text."""

    text: TrialText
    rows: Tensor
    """float32 [num_steps + num_nodes, vocab_size]: the prompt's end, all steps but the last, and the tree's nodes."""
    rounding: tuple[float, ...] = ()
    """Distance of transformers' own row in half precision from each of `rows`; empty for models in float32."""


def _no_inputs(text: TrialText, token_ids: Tensor) -> dict[str, Tensor]:
    return {}


class _Told(LogitsProcessor):
    """Lets generate() write given tokens."""

    def __init__(self, token_ids: Tensor, num_prompt_tokens: int) -> None:
        self.token_ids, self.start = token_ids, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[num_paths, vocab_size], all but one token per row impossible."""
        place = min(input_ids.shape[1], self.token_ids.shape[1] - 1)
        told = torch.full_like(scores, -torch.inf)
        return told.scatter_(1, self.token_ids[:, place : place + 1], 0.0)


@torch.inference_mode()
def reference_logits(
    model: PreTrainedModel,
    texts: list[TrialText],
    inputs: Callable[[TrialText, Tensor], dict[str, Tensor]] = _no_inputs,
) -> list[Reference]:
    """Logits that texts are tried against.

    Args:
        inputs: (text, token ids [num_paths, length] of its paths) -> what generate() takes beside the token ids.

    Raises:
        UnsupportedModelError: the model's own logits in half precision are not finite; without the model's name.
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
    """Two texts of different lengths, which leave windows that are short; what wider ones hide is known from their
    masks."""
    windows = {layer.sliding_window for layer in probed.layers if layer.sliding_window}
    vocab_size = min(map(num_words, (model.get_input_embeddings(), model.get_output_embeddings())))
    return trial_texts(windows, probed.max_positions, vocab_size, _special_tokens(model))


def trial_texts(
    windows: Collection[int], max_positions: int, vocab_size: int, avoided: frozenset[int] = frozenset()
) -> list[TrialText]:
    """Two texts of random tokens, the first one longer."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in _lengths(windows, max_positions):
        count = length + _NUM_BEHIND
        drawn = torch.randint(vocab_size, (2 * count + 64,), generator=generator).tolist()
        # Placeholders of spans are not read as text.
        texts.append(_text([token for token in drawn if token not in avoided][:count], length))
    return texts


def written_texts(texts: list[TrialText], tokens: Sequence[int]) -> list[TrialText]:
    """Texts as long as these are, of the tokens of `WRITTEN`, from its start and from its middle."""
    found = []
    for index, text in enumerate(texts):
        length = len(text.prompt)
        start = index * len(tokens) // len(texts)
        repeated = [tokens[(start + place) % len(tokens)] for place in range(length + _NUM_BEHIND)]
        found.append(_text(repeated, length))
    return found


def _lengths(windows: Collection[int], max_positions: int) -> tuple[int, int]:
    """Tokens of both prompts."""
    tried = [window for window in windows if window <= WIDEST_TRIED_WINDOW]
    most = max_positions - NUM_STEPS - max(DEPTHS)
    longest = min(max(_LONGEST, *(window + window // 2 for window in tried), 0), most)
    return longest, max(longest - _SHORTER_BY, min(longest, 3))


def _text(tokens: list[int], length: int) -> TrialText:
    """A text of a prompt of so many tokens, and those of its steps and its tree behind the prompt."""
    steps = tokens[length : length + NUM_STEPS]
    return TrialText(tokens[:length], steps, [steps[-1], *tokens[length + NUM_STEPS :]])


def _special_tokens(model: PreTrainedModel) -> frozenset[int]:
    configs = (model.config, model.config.get_text_config())
    names = ("_token_id", "_token_index")
    values = [value for config in configs for name, value in vars(config).items() if name.endswith(names)]
    return frozenset(value for value in values if isinstance(value, int))


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """generate() without what a checkpoint's own settings would add."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@torch.inference_mode()
def decoded_rows(
    model: PreTrainedModel, text: TrialText, inputs: Callable[[TrialText, Tensor], dict[str, Tensor]] = _no_inputs
) -> Tensor:
    """`Reference.rows` of a text by generate(), in the model's own dtype; attention is eager already."""
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
    """`Reference.rows` of a text by one pass over whole paths."""
    paths = text.paths().to(next(model.parameters()).device)
    return _rows(model(input_ids=paths, use_cache=False, **inputs(text, paths)).logits[:, len(text.prompt) - 1 :])


def _rows(logits: Tensor) -> Tensor:
    """Logits [num_paths, length, vocab_size] behind the prompt and each later token of all paths -> float32 rows."""
    logits = logits.float()
    before_tree = logits[0, : logits.shape[1] - 1 - max(DEPTHS)]
    where = {node: (row, len(before_tree) + depth) for row, path in enumerate(PATHS) for depth, node in enumerate(path)}
    nodes = torch.stack([logits[where[node]] for node in range(len(PARENTS))])
    return torch.cat([before_tree, nodes])


def distance(row: Tensor, expected: Tensor) -> float:
    """Distance of two rows of logits, by the spread of the second row; infinite where a row is not finite."""
    spread = (expected - expected.mean()).norm().clamp_min(1e-12)
    found = float((row - expected).norm() / spread)
    return float("inf") if math.isnan(found) else found
