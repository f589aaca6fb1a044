"""A head in every published format drafts as the published formula says, from known and from drafted pairs."""

from contextlib import nullcontext

import pytest
import torch

from tests.runtime.by_torch import without_cpu
from tests.runtime.draft_world import World, channel_spec
from tests.runtime.eagle_formula import Formula, random_weights
from tests.runtime.head_formats import FORMATS, NUM_LAYERS, VOCAB
from tests.runtime.heads.head_folder import target_of
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.load import head_conventions, load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription

pytestmark = pytest.mark.few(3)

STEPS = 5
CHAIN = SpeculationConfig(STEPS, 1)
SAME_WEIGHTS = ("safeailab", "specforge", "speculators-plain", "modelopt-plain", "angelslim")


def weights_of(name):
    chosen = FORMATS[name]
    return random_weights(chosen.recipe, VOCAB, chosen.draft_vocab)


def load(name, folder, **changes):
    chosen, weights = FORMATS[name], weights_of(name)
    chosen.write(folder, weights)
    # Only tensors that a format leaves out may be requested from the target.
    left_out = {name: weights[name] for name in chosen.leaves_out}
    target = target_of(
        chosen.recipe.target_hidden,
        NUM_LAYERS,
        VOCAB,
        embedding=left_out.get("embed"),
        lm_head=left_out.get("lm_head"),
    )
    vars(target).update(changes)
    return load_eagle_head(folder, target)


class Recorder:
    """Logits and feedback that a head computes while a drafter grows a chain."""

    def __init__(self, head):
        self.logits, self.fed_back = [], []
        compute_logits, compute_feedback = head.logits, head.feedback

        def logits(hidden):
            self.logits.append(compute_logits(hidden))
            return self.logits[-1]

        def feedback(hidden):
            self.fed_back.append(compute_feedback(hidden))
            return self.fed_back[-1]

        head.logits, head.feedback = logits, feedback


def compare_chain(tree, recorder, formula, hidden, root):
    """Compare a drafted chain with the formula, which continues from `hidden`, its state at the last known pair.

    Args:
        recorder: None where kernels draft, whose intermediate results are not visible.
    """
    fed_back, pairs = hidden, list(formula.pairs)
    tokens, scores = tree.token_ids[0].tolist(), tree.scores[0].tolist()
    assert tokens[0] == root
    assert recorder is None or (len(recorder.logits), len(recorder.fed_back)) == (STEPS, STEPS - 1)
    for level in range(STEPS):
        expected = formula.logits(fed_back)
        if recorder is not None:
            torch.testing.assert_close(recorder.logits[level][0, 0].double(), expected, rtol=1e-4, atol=1e-4)
        assert tokens[1 + level] == formula.target_ids()[expected.argmax()]
        log_prob = expected.log_softmax(0).max().item()
        assert scores[1 + level] - scores[level] == pytest.approx(log_prob, abs=1e-4)
        if level + 1 < STEPS:
            if recorder is not None:
                fed = recorder.fed_back[level][0, 0].double()
                torch.testing.assert_close(fed, formula.feedback(fed_back), rtol=1e-4, atol=1e-4)
            fed_back = formula.drafted(tokens[1 + level], fed_back)
    # Drafted pairs are dropped: pairs of accepted tokens are recomputed from the target's taps.
    formula.pairs[:] = pairs


@pytest.fixture(params=["kernels", "torch", "fixed shapes"])
def way(request):
    """Implementation by which a head drafts."""
    with without_cpu() if request.param == "torch" else nullcontext():
        yield request.param


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_a_head_of_every_format_drafts_by_the_formula(name, way, tmp_path):
    """Cases: a prompt of 20 tokens, five drafted tokens, three accepted pairs, five more drafted tokens."""
    head, recipe = load(name, tmp_path), FORMATS[name].recipe
    assert head.tap_layers == FORMATS[name].taps
    assert head.taps_size == recipe.taps_size
    drafter = EagleDrafter(head, CHAIN)
    drafter.fixed_shapes = way == "fixed shapes"
    world = World(CHAIN, recipe.taps_size, (20,))
    spec = channel_spec(CHAIN, recipe.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    formula = Formula(recipe, {k: v if k == "d2t" else v.double() for k, v in weights_of(name).items()})
    slot = world.slots[0]
    tokens, taps = world.tokens[slot], world.taps[slot]
    recorder = Recorder(head) if drafter.passes is None else None
    done = 0
    for length, how in ((20, "chunks"), (23, "decodes")):
        world.lens[slot] = length
        pairs = range(done, length - 1)
        for position in pairs:
            hidden = formula.known(int(tokens[position + 1]), taps[position])
        if recorder is not None:
            recorder.logits.clear()
            recorder.fed_back.clear()
        batch = world.batch(**{how: [(slot, done, len(pairs))]}, proposals=[slot])
        tree = drafter.draft(batch)
        compare_chain(tree, recorder, formula, hidden, int(tokens[length - 1]))
        done = length - 1


@torch.inference_mode()
def test_the_same_weights_draft_the_same_in_every_format(tmp_path):
    drafts = {}
    for name in SAME_WEIGHTS:
        drafter = EagleDrafter(load(name, tmp_path / name), SpeculationConfig())
        taps_size = FORMATS[name].recipe.taps_size
        world = World(drafter.speculation, taps_size, (9, 17, 40))
        spec = channel_spec(drafter.speculation, taps_size)
        drafter.resize(spec, spec.num_slots, spec.num_blocks)
        world.feed(drafter)
        drafts[name] = drafter.draft(world.batch(proposals=world.slots))
    for name in SAME_WEIGHTS[1:]:
        for one, other in zip(drafts["safeailab"], drafts[name], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_that_is_there_is_asked_of_the_target(name, tmp_path):
    """Tensors in the file are not read again from the verifier, whose embedding may be gigabytes."""
    asked = []
    chosen, weights = FORMATS[name], weights_of(name)
    lent = {
        "embedding": lambda: asked.append("embed") or weights["embed"],
        "lm_head": lambda: asked.append("lm_head") or weights["lm_head"],
    }
    load(name, tmp_path, **lent)
    assert sorted(asked) == sorted(chosen.leaves_out)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_ambiguous_has_several_readings_and_nothing_else_does(name, tmp_path):
    FORMATS[name].write(tmp_path, weights_of(name))
    target = TargetDescription(tmp_path, FORMATS[name].recipe.target_hidden, NUM_LAYERS, VOCAB)
    readings = head_conventions(tmp_path, target)
    assert readings[0].tap_layers == FORMATS[name].taps
    assert len(set(readings)) == len(readings)
    expected = {
        # Configs without ids: the usual layers, or one layer lower or higher.
        "safeailab": {(2, 4, 5), (1, 3, 4), (3, 5, 6)},
        "angelslim": {(2, 4, 5), (1, 3, 4), (3, 5, 6)},
        "angelslim-theta": {(2, 4, 5), (1, 3, 4), (3, 5, 6)},
        "angelslim-mrope": {(2, 4, 5), (1, 3, 4), (3, 5, 6)},
        "specforge-3.1": {(2, 4, 5), (1, 3, 4), (3, 5, 6)},
        # Ids that could count layers from 0 or from 1.
        "specforge-wide": {(1, 3, 7), (0, 2, 6)},
        "speculators-qwen3-3.1": {(1, 3, 6), (2, 4, 7)},
    }.get(name, {FORMATS[name].taps})
    assert {reading.tap_layers for reading in readings} == expected
    assert {reading.norm_output for reading in readings} == (
        {True, False} if name == "specforge-3.1" else {FORMATS[name].recipe.norm_output}
    )
    bases = {reading.rope_theta for reading in readings}
    assert bases == ({10000.0, None} if name in ("angelslim-theta", "latent") else {None})
