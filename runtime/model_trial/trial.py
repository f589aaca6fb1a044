"""Compares a prepared model, run in an engine's batches, with transformers' eager attention.

Two sequences of different lengths go through the engine's batches and paged cache: prompts in uneven chunks (one of
them in a round in which the other sequence decodes), plain steps, then trees with siblings at two depths. Every row of
logits is compared with the reference (`wingbeat.runtime.model_trial.reference`).
"""

from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.model_trial.reference import (
    DEPTHS,
    NUM_STEPS,
    PARENTS,
    Reference,
    TrialText,
    distance,
)
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel, features_of
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import UnsupportedModelError

_ACCEPTED, _BEHIND = (0, 1), 3
"""Accepted path of the test of recurrent states, and the tree node that follows that path. The next plain step, from
this node, must reproduce the node's logits."""
_CHUNKS = (7, 1)
"""Numbers of tokens of the long prompt's first two chunks; the remaining tokens are the third chunk."""
_IN_TREE = "at depth"
FULL_PRECISION_TOLERANCE, LARGEST_TOLERANCE = 2e-3, 0.02
"""Largest distances of float32 logits rows from transformers' rows, relative to the logits' spread. The first tolerance
holds for all rows except the farthest row. The second tolerance holds for the farthest row, because with sharp
attention rounding alone may move a single row farther than the other rows.
"""
OUTLIER_FACTOR = 300
"""Maximum distance of a text's farthest row, as a multiple of the median distance; `LARGEST_TOLERANCE` applies in
addition."""
ROUNDING_FACTOR, ROUNDING_SLACK = 3, 0.02
"""In half precision, the median distance from float32 may be at most transformers' median distance times this factor,
plus the slack. The slack matters for models with almost no rounding."""


class Apart(NamedTuple):
    """Distances of one row of logits from its reference."""

    place: str
    own: float
    """Distance of the served row."""
    theirs: float | None
    """Distance of transformers' half-precision row; None in float32, where the reference is transformers' row."""

    @property
    def in_tree(self) -> bool:
        return self.place.startswith(_IN_TREE)


@torch.inference_mode()
def try_model(loaded: LoadedModel, references: list[Reference]) -> None:
    """Compares the logits of a prepared model with those of transformers.

    Args:
        references: transformers' logits, one `Reference` per text, for two or four texts; the model runs the texts two
            at a time.

    Raises:
        UnsupportedModelError: the logits differ; the message gives the position in the text at which they differ, but
            not the model's name.
    """
    apart: list[Apart] = []
    for first in range(0, len(references), 2):
        pair = references[first : first + 2]
        ours = Trial(loaded, [reference.text for reference in pair]).run()
        for reference, rows in zip(pair, ours, strict=True):
            apart += _compare(reference, rows)
    for in_tree in (False, True):
        check([row for row in apart if row.in_tree is in_tree])


def _compare(reference: Reference, rows: Tensor) -> list[Apart]:
    """Returns the distances of a text's rows.

    Raises:
        UnsupportedModelError: a float32 row differs too much, or transformers' own row is not finite.
    """
    count = len(reference.rows)
    node = count - len(PARENTS) + _BEHIND
    behind = slice(node, node + len(rows) - count)
    theirs = [*reference.rounding, *reference.rounding[behind]] or [None] * len(rows)
    all_expected, found = [*reference.rows, *reference.rows[behind]], []
    distances = [distance(row.float(), expected) for row, expected in zip(rows, all_expected, strict=True)]
    farthest = distances.index(max(distances))
    largest = min(max(FULL_PRECISION_TOLERANCE, OUTLIER_FACTOR * median(distances)), LARGEST_TOLERANCE)
    for index, expected in enumerate(all_expected):
        row = Apart(_place(index, count), distances[index], theirs[index])
        tolerance = largest if index == farthest else FULL_PRECISION_TOLERANCE
        if not expected.isfinite().all():
            raise UnsupportedModelError(f"transformers' own logits are not finite {row.place}")
        if row.theirs is None:
            best, second = expected.topk(2).values.tolist()
            clear = best - second > 4 * tolerance * float(expected.std())
            if not row.own <= tolerance or (clear and int(rows[index].argmax()) != int(expected.argmax())):
                raise _differs(row.place, row.own, tolerance)
        found.append(row)
    return found


def check(rows: list[Apart]) -> None:
    """Raises UnsupportedModelError if rounding does not explain the median distance of the rows.

    The rows are all in trees, or all outside trees.

    Single half-precision rows are not judged, because in either implementation another choice of experts or a single
    unexpected token can move a row by as much as the spread of its logits.
    """
    own = median(row.own for row in rows)
    in_half = [row.theirs for row in rows if row.theirs is not None]
    where = "in token trees" if rows[0].in_tree else "in plain decoding"
    if not in_half:
        if not own <= FULL_PRECISION_TOLERANCE:
            raise _differs(where, own, FULL_PRECISION_TOLERANCE)
        return
    theirs = median(in_half)
    if not own <= ROUNDING_FACTOR * theirs + ROUNDING_SLACK:
        raise UnsupportedModelError(
            f"its logits {where} differ from the model's own in float32 by {own:.1e} of their spread, where "
            f"transformers' in the same dtype differ by {theirs:.1e}: its text would be wrong"
        )


def _differs(where: str, apart: float, tolerance: float) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"its logits {where} differ from transformers' own decoding by {apart:.1e} of their spread, where rounding is "
        f"{tolerance:.0e}: its text would be wrong"
    )


def _place(index: int, num_rows: int) -> str:
    first_node = num_rows - len(PARENTS)
    if index == num_rows:
        return "behind an accepted path"
    if index == 0:
        return "after a prompt in chunks"
    return "in plain decoding" if index < first_node else f"{_IN_TREE} {DEPTHS[index - first_node]} of a token tree"


class Trial:
    """Runs two sequences through an engine's batches without a scheduler."""

    def __init__(self, loaded: LoadedModel, texts: list[TrialText]) -> None:
        self.texts = texts
        self.seqs = [Sequence(Request("", tuple(text.prompt), SamplingParams(), spans=text.spans)) for text in texts]
        config = EngineConfig(
            max_num_seqs=len(texts),
            max_model_len=max(text.paths().shape[1] for text in texts),
            enable_prefix_caching=False,
            speculation=SpeculationConfig(draft_steps=max(DEPTHS), draft_top_k=2, verify_tree_size=len(PARENTS)),
        )
        width = config.max_blocks_per_seq
        config = replace(config, num_kv_blocks=1 + len(texts) * width)
        for slot, seq in enumerate(self.seqs):
            # Block numbers descend and alternate between the sequences, so that physical order differs from logical
            # order.
            seq.slot, seq.blocks = slot, list(range(len(texts) * width - slot, 0, -len(texts)))
        self.slots = SlotState(config, loaded.vocab_size, loaded.device)
        cache = loaded.make_cache(config)
        self.keeps_states = loaded.keeps_states
        features = features_of(loaded, self.slots, config, loaded.manage_blocks(config, cache), cache)
        last, on_host = loaded.max_position_embeddings - 1, loaded.device.type == "cpu"
        for seq in self.seqs:
            for feature in features:
                feature.admit(seq)
        self.builder = BatchBuilder(cache, self.slots, config, last, on_host, features=features)
        self.model = VerifierModel(loaded)

    def run(self) -> list[Tensor]:
        """Returns logits of each text in the order of `Reference.rows`, in the model's dtype."""
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
        for _ in range(1, NUM_STEPS - 1):
            both = self._step([long, short])
            rows[0].append(both[:1])
            rows[1].append(both[1:])
        rows[0].append(self._step([long]))
        trees = self._trees()
        behind = [] if not self.keeps_states else [row[None] for row in self._step_behind_path()]
        return [
            torch.cat([*own, tree, *behind[seq : seq + 1]])
            for seq, (own, tree) in enumerate(zip(rows, trees, strict=True))
        ]

    def behind_prompt(self) -> Tensor:
        """Runs the first text's whole prompt alone; returns logits [vocab_size] after the prompt."""
        seq = self.seqs[0]
        return self._round([], [Chunk(seq, 0, seq.num_prompt_tokens, samples=True)])[0]

    def _step(self, seqs: list[Sequence], chunks: list[Chunk] | None = None) -> Tensor:
        """Runs a plain decode step of these sequences, together with chunks."""
        for seq in seqs:
            self._take(seq)
        return self._round(seqs, chunks or [])

    def _trees(self) -> list[Tensor]:
        """Verifies the trees of the two texts in one pass, and returns the logits of each tree's nodes."""
        for seq in self.seqs:
            self._take(seq)
        device = self.slots.device
        token_ids = torch.tensor([text.tree for text in self.texts], device=device)
        parents, depths = (torch.tensor(row, device=device).expand_as(token_ids) for row in (PARENTS, DEPTHS))
        num_valid = torch.full((len(self.texts),), len(PARENTS), device=device)
        tree = TokenTree(token_ids, parents, depths, torch.zeros(token_ids.shape, device=device), num_valid)
        logits = self._round(self.seqs, [], tree)
        return list(logits.unflatten(0, tuple(token_ids.shape)))

    def _step_behind_path(self) -> Tensor:
        """Runs a plain step of both sequences whose root is the tree node `_BEHIND`.

        The path to that node was accepted before.
        """
        for seq in self.seqs:
            for node in _ACCEPTED[1:]:
                self._take(seq, self.texts[seq.slot].tree[node])
            self._take(seq, self.texts[seq.slot].tree[_BEHIND])
        return self._round(self.seqs, [])

    def _take(self, seq: Sequence, token_id: int | None = None) -> None:
        """Appends a token to a sequence, as a round that emitted the token would.

        The default is the token of the next plain step.
        """
        own = self.texts[seq.slot].steps[seq.num_output_tokens] if token_id is None else token_id
        seq.token_ids.append(own)
        self.slots.committed_lens[seq.slot] = len(seq.token_ids)
        self.slots.last_token_ids[seq.slot] = seq.token_ids[-1]

    def _round(self, decodes: list[Sequence], chunks: list[Chunk], tree: TokenTree | None = None) -> Tensor:
        """Returns logits of the decodes' rows, then of the chunks that sample."""
        plan = SchedulerOutput(decodes, chunks, [], 0)
        slots = self.slots.load(plan).slots
        own = self.builder.decodes(slots, tree) if decodes else None
        logits = self.model(self.builder.flatten(plan, own)).logits
        if own is not None:
            self.builder.took(_accepted(own))
        return logits


def _accepted(decodes: Decodes) -> AcceptedPaths:
    """Returns the paths that a test round accepts, with the fields that features read."""
    path = (0,) if decodes.tree is None else _ACCEPTED
    nodes = torch.tensor(path, device=decodes.slots.device).expand(len(decodes.slots), -1)
    num_tokens, parents = torch.full_like(decodes.slots, len(path)), decodes.tree and decodes.tree.parents
    return AcceptedPaths(
        decodes.slots, decodes.roots, nodes, num_tokens, num_tokens, nodes, taps=None, tree_parents=parents
    )
