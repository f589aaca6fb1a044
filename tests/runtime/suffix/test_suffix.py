"""The suffix drafter: what it continues, from whose text, how deep, and that it stays bounded."""

from math import exp

import pytest
import torch

from tests.runtime.draft_world import NUM_SLOTS, World, channel_spec
from tests.runtime.models import Run, engine_config, greedy_params, new_engine, reference
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.suffix.suffix_drafter import SuffixDrafter
from wingbeat.runtime.suffix.suffix_texts import TAIL_TOKENS

CHAIN = SpeculationConfig(draft_steps=5, draft_top_k=1)
TREE = SpeculationConfig(draft_steps=4, draft_top_k=3, verify_tree_size=9)
OPENING = [50, 51, 52, 53]


class Slots:
    """A drafter over sequences written by hand."""

    def __init__(self, speculation=CHAIN, **limits):
        self.world = World(speculation, 0, (1,))
        self.drafter = SuffixDrafter(speculation, **limits)
        spec = channel_spec(speculation, 0)
        self.drafter.resize(spec, NUM_SLOTS, spec.num_blocks)
        self.epochs = torch.ones(NUM_SLOTS, dtype=torch.int64)

    def write(self, slot, history, *, begin=False):
        """Set a slot's history; `begin` says that it is another sequence's."""
        self.epochs[slot] += begin
        self.world.tokens[slot, : len(history)] = torch.tensor(history)
        self.world.lens[slot] = len(history)

    def tree(self, *slots, max_levels=None, decodes=()):
        batch = self.world.batch(proposals=slots, max_levels=max_levels, decodes=decodes)
        return self.drafter.draft(batch._replace(epochs=self.epochs.clone()))

    def drafted(self, slot, history, *, begin=False, **kwargs):
        """Tokens of the chain drafted after a history."""
        self.write(slot, history, begin=begin)
        tree = self.tree(slot, **kwargs)
        count = int(tree.num_valid[0])
        assert tree.token_ids[0, 0] == history[-1]
        assert tree.parents[0, :count].tolist() == list(range(-1, count - 1))
        assert tree.depths[0, :count].tolist() == list(range(count))
        return tree.token_ids[0, 1:count].tolist()


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5, 6, 7]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2], [3, 8, 1, 2]),
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 6, 1, 2, 4, 5, 1, 2], [3, 9, 6, 1, 2]),
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
    ids=["copy", "most-frequent", "longest-context", "loop", "nothing", "one"],
)
def test_the_longest_known_context_is_continued_by_what_followed_most(history, expected):
    drafted = Slots().drafted(0, history)
    assert drafted[: len(expected)] == expected
    assert bool(drafted) == bool(expected)


def test_tokens_may_come_in_any_pieces():
    history = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    slots = Slots()
    for end in (1, 2, 9, 10, 30, 31, 60):
        drafted = slots.drafted(4, history[:end])
        # Its own output is among the shared texts too, where the same context is no longer.
        assert drafted == Slots().drafted(4, history[:end])


def test_a_short_context_is_continued_less_far():
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    speculation = SpeculationConfig(draft_steps=8, draft_top_k=1)
    assert len(Slots(speculation).drafted(0, [*repeated, 70, 1])) <= 4
    assert len(Slots(speculation).drafted(0, [*repeated, 70, 1, 2, 3])) == 8


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_no_more_levels_than_asked_for(levels):
    assert len(Slots().drafted(0, [7] * 20, max_levels=levels)) == levels


def test_scores_are_the_logarithms_of_path_probabilities():
    slots = Slots()
    slots.write(0, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2])
    scores = slots.tree(0).scores[0]
    # After (1, 2): 3, twice of twice. After (1, 2, 3): 8 and 9, once each; the later one comes first.
    assert exp(scores[1]) == pytest.approx(2 / (2 + 1 / 2))
    assert exp(scores[2] - scores[1]) == pytest.approx(1 / (2 + 2 / 3))
    assert scores[0] == 0


def test_a_tree_holds_the_likeliest_paths_with_parents_first():
    slots = Slots(TREE)
    slots.write(0, [1, 2, 3, 9, 1, 2, 4, 8, 5, 1, 2, 3, 7, 1, 2])
    tree = slots.tree(0)
    count = int(tree.num_valid[0])
    assert tree.token_ids.shape == (1, TREE.num_nodes)
    parents, depths = tree.parents[0, :count], tree.depths[0, :count]
    assert (parents[1:] < torch.arange(1, count)).all()
    assert (depths[1:] == depths[parents[1:]] + 1).all()
    assert depths.max() <= TREE.draft_steps
    scores = tree.scores[0, :count].tolist()
    assert scores == sorted(scores, reverse=True)
    siblings = [
        token for token, parent in zip(tree.token_ids[0].tolist(), parents.tolist(), strict=False) if not parent
    ]
    assert siblings == [3, 4]


def test_requests_draft_from_the_outputs_of_others():
    slots = Slots()
    written = [*OPENING, 60, 61, 62, 63, 64]
    slots.drafted(0, [1, 2, *OPENING])
    slots.drafted(0, [1, 2, *written])
    assert slots.drafted(1, [3, *OPENING], begin=True) == [60, 61, 62, 63, 64]
    # After the writer has gone, too.
    slots.drafted(0, [9], begin=True)
    assert slots.drafted(2, [*OPENING, 60], begin=True) == [61, 62, 63, 64]


def test_requests_can_be_kept_apart():
    slots = Slots(max_shared_tokens=0)
    slots.drafted(0, OPENING)
    assert slots.drafted(0, [*OPENING, 60, 61, *OPENING]) == [60, 61, *OPENING[:3]]
    assert slots.drafted(1, OPENING) == []
    assert slots.drafter._texts._shared.younger.num_tokens == 0


def test_prompts_of_others_are_not_drafted_from():
    slots = Slots()
    prompt = [*OPENING, 60, 61, *range(10, 30)]
    slots.drafted(0, prompt)
    assert slots.drafted(1, [3, *OPENING]) == []
    # Its own prompt is.
    assert slots.drafted(0, [*prompt, *OPENING]) == [60, 61, 10, 11, 12]


def test_the_last_tokens_of_a_request_are_kept_though_it_asks_for_nothing_more():
    slots = Slots()
    slots.drafted(0, OPENING)
    slots.write(0, [*OPENING, 60, 61])
    assert slots.tree(decodes=[(0, 3, 2)]) is None
    slots.write(0, [9], begin=True)
    assert slots.drafted(1, OPENING) == [60, 61]


def test_a_slot_with_another_sequence_starts_anew():
    slots = Slots()
    first = [*range(20), 30, 31, 32]
    slots.drafted(0, first)
    assert slots.drafted(0, [5, 4, 3, *first[:3]], begin=True) == []
    # Another verifier's slot may have an equal epoch: the text reveals the change.
    assert slots.drafted(0, [8, 9, 8, 9, 8, 9, 8]) == [9, 8, 9, 8, 9]
    assert slots.drafted(0, [4, 4, 4]) == [4, 4, 4, 4, 4]


def test_a_long_prompt_is_taken_in_over_several_passes():
    slots = Slots(max_tokens_per_pass=8)
    slots.write(0, [1, 2, 3] * 6)
    slots.write(1, [7] * 6)
    assert slots.tree(1, 0).num_valid.tolist() == [6, 1]
    assert slots.tree(1, 0).num_valid.tolist() == [6, 1]
    assert slots.tree(1, 0).num_valid.tolist() == [6, 6]


def test_old_outputs_are_forgotten():
    slots = Slots(max_shared_tokens=64)
    texts = [list(range(number * 9, number * 9 + 9)) for number in range(10)]
    for number, text in enumerate(texts):
        slots.drafted(0, text[:3], begin=True)
        slots.drafted(0, text)
        assert slots.drafted(1, text[:4], begin=True)[:2] == text[4:6]
        if number >= 8:
            assert slots.drafted(2, texts[number - 8][:4], begin=True) == []
        shared = slots.drafter._texts._shared
        assert shared.younger.num_tokens + shared.older.num_tokens <= 64 + 2 * TAIL_TOKENS


def test_a_running_request_stays_matched_when_the_shared_texts_move_on():
    slots = Slots(max_shared_tokens=24)
    told = [*OPENING, *range(60, 66)]
    slots.drafted(0, told[:1])
    slots.drafted(0, told)
    slots.drafted(1, OPENING[:3])
    slots.drafted(2, [70])
    slots.drafted(2, [70, 71, 72, 73, 74, 75])
    assert slots.drafter._texts._shared.generation == 1
    assert slots.drafted(1, OPENING[:3]) == [53, 60, 61, 62, 63]
    assert slots.drafted(1, OPENING) == [60, 61, 62, 63, 64]


def acceptance_when_asked_twice(drafter):
    """Acceptance lengths of the first and of the second run of the same requests through one engine."""
    ref = reference("llama")
    engine = new_engine(ref.loaded, engine_config(CHAIN), drafter)
    lengths = []
    for _ in range(2):
        run = Run(engine, ref.prompts, greedy_params(40))
        assert run.finish() == [tokens[:40] for tokens in ref.continuations]
        metrics = [run.last[index].metrics for index in range(8)]
        accepted, drafts = (sum(getattr(m, name) for m in metrics) for name in ("num_accepted_tokens", "num_drafts"))
        lengths.append(1 + accepted / drafts)
    engine.model.remove_taps()
    return lengths


@pytest.mark.slow
def test_what_was_written_before_is_drafted_right():
    first, second = acceptance_when_asked_twice(SuffixDrafter(CHAIN))
    assert second > 4.5 > first
    apart = acceptance_when_asked_twice(SuffixDrafter(CHAIN, max_shared_tokens=0))
    assert max(apart) < second
