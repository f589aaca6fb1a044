"""A model tried the way it will be used, against transformers' own cached decoding with eager attention.

Two sequences of different lengths go through the engine's batches and paged cache: prompts in uneven chunks, one of
them beside the other's decode, plain steps, then trees with siblings at two depths. `Reference` is what transformers
says to the same tokens, one path of a tree after the other; it is taken before anything of the model is switched.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.kv.saved_states import SavedStates
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.media import MediaInput, position_delta
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.state.keeper import StateKeeper
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel, features_of, num_words
from wingbeat.runtime.verifier.layers.probe import ProbedAttention
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import UnsupportedModelError

PARENTS = (-1, 0, 0, 1, 1, 2)
"""Of the tree's nodes: two children of the root; two of the first of them, one of the second."""
_DEPTHS = (0, 1, 1, 2, 2, 2)
PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5))
"""From the root to each leaf."""
_ACCEPTED, _BEHIND = (0, 1), 3
"""Where layers keep states: the path that is accepted, and its node behind it, whose logits the next step must have."""
_NUM_STEPS = 3
"""Tokens behind the prompt: plain steps, and the root of the tree."""
_LONGEST, _SHORTER_BY = 29, 12
_CHUNKS = (7, 1)
"""Tokens of the long prompt's first chunks; the rest is the third."""
WIDEST_TRIED_WINDOW = 64
FULL_PRECISION_TOLERANCE = 2e-3
"""Of a row's logits, by their spread; other dtypes round by more, and how much is measured."""
_TOLERANCE = dict.fromkeys((torch.float32, torch.float64), FULL_PRECISION_TOLERANCE)
LOW_PRECISION_TOLERANCE, LARGEST_TOLERANCE, NOISE_FACTOR = 0.1, 0.25, 4
"""Kernels keep sums in float32 where torch rounds them: no noise of transformers' own tells how far that leads."""


class TrialText(NamedTuple):
    """One sequence: a prompt, the tokens of its plain steps, and the tree behind them."""

    prompt: list[int]
    steps: list[int]
    tree: list[int]
    """Tokens of the nodes; the root is the last step's."""
    media: tuple[MediaInput, ...] = ()
    """Of the prompt."""

    def paths(self) -> Tensor:
        """Each path of the tree behind all before it: int64 [num_paths, length]."""
        before = [*self.prompt, *self.steps[:-1]]
        return torch.tensor([before + [self.tree[node] for node in path] for path in PATHS])


class Reference(NamedTuple):
    """What transformers says to a text."""

    text: TrialText
    rows: Tensor
    """float32 [num_steps + num_nodes, vocab_size]: the prompt's end, all steps but the last, and the tree's nodes."""
    noise: float
    """By how much transformers' own ways to compute it differ, as `distance`."""


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
    """What a model says to texts, by generate() and eager attention.

    Args:
        inputs: (text, token ids [num_paths, length] of its paths) -> what generate() takes beside the token ids.
    """
    model.set_attn_implementation("eager")
    with _plain_generation(model):
        return [_reference(model, text, partial(inputs, text)) for text in texts]


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
    num_after = _NUM_STEPS + max(_DEPTHS)
    tried = [window for window in windows if window <= WIDEST_TRIED_WINDOW]
    longest = min(max(_LONGEST, *(window + window // 2 for window in tried), 0), max_positions - num_after)
    texts = []
    for length in (longest, max(longest - _SHORTER_BY, min(longest, 3))):
        count = length + _NUM_STEPS + len(PARENTS) - 1
        drawn = torch.randint(vocab_size, (2 * count + 64,), generator=generator).tolist()
        # Placeholders of images and the like are not read as text.
        tokens = [token for token in drawn if token not in avoided][:count]
        steps = tokens[length : length + _NUM_STEPS]
        texts.append(TrialText(tokens[:length], steps, [steps[-1], *tokens[length + _NUM_STEPS :]]))
    return texts


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


def _reference(model: PreTrainedModel, text: TrialText, inputs: Callable[[Tensor], dict[str, Tensor]]) -> Reference:
    device = next(model.parameters()).device
    paths, start = text.paths().to(device), len(text.prompt)
    num_new = paths.shape[1] - start + 1
    out = model.generate(
        paths[:, :start],
        attention_mask=torch.ones_like(paths[:, :start]),
        max_new_tokens=num_new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        logits_processor=[_Told(paths, start)],
        output_logits=True,
        return_dict_in_generate=True,
        **inputs(paths[:, :start]),
    )
    logits = torch.stack(out.logits, dim=1).float()  # [num_paths, num_new, vocab_size]
    noise = 0.0
    if logits.isfinite().all() and next(model.parameters()).dtype not in _TOLERANCE:
        at_once = model(input_ids=paths, use_cache=False, **inputs(paths)).logits[:, start - 1 :].float()
        noise = max(map(distance, at_once.flatten(0, 1), logits.flatten(0, 1)))
    before_tree = logits[0, : num_new - 1 - max(_DEPTHS)]
    where = {node: (row, len(before_tree) + depth) for row, path in enumerate(PATHS) for depth, node in enumerate(path)}
    nodes = torch.stack([logits[where[node]] for node in range(len(PARENTS))])
    return Reference(text, torch.cat([before_tree, nodes]), noise)


@torch.inference_mode()
def try_model(loaded: LoadedModel, references: list[Reference]) -> None:
    """Hold a prepared model against what transformers says.

    Raises:
        UnsupportedModelError: they differ; says where, without the model's name.
    """
    trial = Trial(loaded, [reference.text for reference in references])
    ours = trial.run()
    tolerance = _TOLERANCE.get(loaded.dtype)
    if tolerance is None:
        noise = max(reference.noise for reference in references)
        tolerance = min(max(LOW_PRECISION_TOLERANCE, NOISE_FACTOR * noise), LARGEST_TOLERANCE)
    for reference, rows in zip(references, ours, strict=True):
        count = len(reference.rows)
        behind = reference.rows[count - len(PARENTS) + _BEHIND :][: len(rows) - count]
        for index, (row, expected) in enumerate(zip(rows, [*reference.rows, *behind], strict=True)):
            _check(row.float(), expected, tolerance, _place(index, count))


def _check(row: Tensor, expected: Tensor, tolerance: float, place: str) -> None:
    if not expected.isfinite().all():
        raise UnsupportedModelError(f"transformers' own logits are not finite {place}")
    apart = distance(row, expected)
    best, second = expected.topk(2).values.tolist()
    clear = best - second > 4 * tolerance * float(expected.std())
    if not apart <= tolerance or (clear and int(row.argmax()) != int(expected.argmax())):
        raise UnsupportedModelError(
            f"its logits {place} differ from transformers' own decoding by {apart:.1e} of their spread, where "
            f"rounding is {tolerance:.0e}: its text would be wrong"
        )


def _place(index: int, num_rows: int) -> str:
    first_node = num_rows - len(PARENTS)
    if index == num_rows:
        return "behind an accepted path"
    if index == 0:
        return "after a prompt in chunks"
    return "in plain decoding" if index < first_node else f"at depth {_DEPTHS[index - first_node]} of a token tree"


def distance(row: Tensor, expected: Tensor) -> float:
    """Of two rows of logits, in the second one's own spread; infinite where either is not finite."""
    spread = (expected - expected.mean()).norm().clamp_min(1e-12)
    found = float((row - expected).norm() / spread)
    return float("inf") if math.isnan(found) else found


class Trial:
    """Two sequences in an engine's own batches, with nobody to schedule them."""

    def __init__(self, loaded: LoadedModel, texts: list[TrialText]) -> None:
        self.texts = texts
        self.seqs = [Sequence(Request("", tuple(text.prompt), SamplingParams(), media=text.media)) for text in texts]
        config = EngineConfig(
            max_num_seqs=len(texts),
            max_model_len=max(text.paths().shape[1] for text in texts),
            speculation=SpeculationConfig(draft_steps=max(_DEPTHS), draft_top_k=2, verify_tree_size=len(PARENTS)),
        )
        width = config.max_blocks_per_seq
        config = replace(config, num_kv_blocks=1 + len(texts) * width)
        for slot, seq in enumerate(self.seqs):
            # Every other block, the last one first: where keys lie says nothing about where they stand.
            seq.slot, seq.blocks = slot, list(range(len(texts) * width - slot, 0, -len(texts)))
        self.slots = SlotState(config, loaded.vocab_size, loaded.device)
        for slot, text in enumerate(texts):
            self.slots.position_deltas[slot] = position_delta(text.media)
        cache = KVCache(loaded.layers, config, loaded.dtype, loaded.device)
        self.states: StateKeeper | None = None
        if loaded.mixers:
            saved = SavedStates(1, config.block_size, config.block_size, enabled=False)
            blocks = BlockManager(cache.num_blocks, config.block_size, states=saved)
            self.states = StateKeeper(loaded.mixers, config, blocks, loaded.device)
        features = features_of(loaded, self.slots, self.states)
        last, on_host = loaded.max_position_embeddings - 1, loaded.device.type == "cpu"
        self.builder = BatchBuilder(cache, self.slots, config, last, on_host, features=features)
        self.model = VerifierModel(loaded)

    def run(self) -> list[Tensor]:
        """Logits of each text, as `Reference` has them, in the model's dtype."""
        long, short = self.seqs
        size = long.num_prompt_tokens
        ends = sorted({min(sum(_CHUNKS[:count]), size - 1) for count in range(1, len(_CHUNKS) + 1)})
        starts = [0, *ends]
        chunks = [Chunk(long, start, end - start) for start, end in zip(starts, ends, strict=False)]
        for chunk in chunks:
            self._round([], [chunk])
        rows: list[list[Tensor]] = [[], []]
        rows[1].append(self._round([], [Chunk(short, 0, short.num_prompt_tokens, samples=True)]))
        beside = self._step([short], [Chunk(long, ends[-1], size - ends[-1], samples=True)])
        rows[1].append(beside[:1])
        rows[0].append(beside[1:])
        for _ in range(1, _NUM_STEPS - 1):
            both = self._step([long, short])
            rows[0].append(both[:1])
            rows[1].append(both[1:])
        rows[0].append(self._step([long]))
        trees = self._trees()
        behind = [] if self.states is None else [row[None] for row in self._step_behind_path()]
        return [
            torch.cat([*own, tree, *behind[seq : seq + 1]])
            for seq, (own, tree) in enumerate(zip(rows, trees, strict=True))
        ]

    def behind_prompt(self) -> Tensor:
        """Logits [vocab_size] behind the first text's whole prompt, alone."""
        seq = self.seqs[0]
        return self._round([], [Chunk(seq, 0, seq.num_prompt_tokens, samples=True)])[0]

    def _step(self, seqs: list[Sequence], chunks: list[Chunk] | None = None) -> Tensor:
        """Plain steps, each of its sequence's next token, beside chunks."""
        for seq in seqs:
            self._take(seq)
        return self._round(seqs, chunks or [])

    def _trees(self) -> list[Tensor]:
        """Both trees at once: logits of each one's nodes."""
        for seq in self.seqs:
            self._take(seq)
        device = self.slots.device
        token_ids = torch.tensor([text.tree for text in self.texts], device=device)
        parents, depths = (torch.tensor(row, device=device).expand_as(token_ids) for row in (PARENTS, _DEPTHS))
        num_valid = torch.full((len(self.texts),), len(PARENTS), device=device)
        tree = TokenTree(token_ids, parents, depths, torch.zeros(token_ids.shape, device=device), num_valid)
        logits = self._round(self.seqs, [], tree)
        return list(logits.unflatten(0, tuple(token_ids.shape)))

    def _step_behind_path(self) -> Tensor:
        """A plain step of both, whose root is the tree's `_BEHIND` once the path to it is accepted."""
        for seq in self.seqs:
            for node in _ACCEPTED[1:]:
                self._take(seq, self.texts[seq.slot].tree[node])
            self._take(seq, self.texts[seq.slot].tree[_BEHIND])
        return self._round(self.seqs, [])

    def _take(self, seq: Sequence, token_id: int | None = None) -> None:
        """Let a sequence grow by a token, else by the next one of its steps, as a round that emitted it does."""
        own = self.texts[seq.slot].steps[seq.num_output_tokens] if token_id is None else token_id
        seq.token_ids.append(own)
        self.slots.committed_lens[seq.slot] = len(seq.token_ids)
        self.slots.last_token_ids[seq.slot] = seq.token_ids[-1]

    def _round(self, decodes: list[Sequence], chunks: list[Chunk], tree: TokenTree | None = None) -> Tensor:
        """Logits of the decodes' rows, then of the chunks that sample."""
        plan = SchedulerOutput(decodes, chunks, [], 0)
        slots = self.slots.load(plan).slots
        batch = self.builder.flatten(plan, self.builder.decodes(slots, tree) if decodes else None)
        logits = self.model(batch).logits
        if self.states is not None:
            self.states.accept(decodes, [[0] if tree is None else list(_ACCEPTED) for _ in decodes])
        return logits
