"""A head drafts behind images and audio as in a dense pass over what the model embedded, rotated in its grids."""

import numpy as np
import pytest
import torch

from tests.near_ties import check_same_drafts, drafted_paths, likeliest_child
from tests.runtime.media.media_world import PLACEHOLDER, ShownRun, dense_taps, shown
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.watchers import FailingEnd, Rig
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.layer import frequency_axes
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.media import telling
from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.round.tree_check import TreeInbox

NUM_TOKENS = 12
GRIDS = {"qwen2_5_vl": False, "qwen3_vl": True}
"""Models that rotate in grids, and whether their heads' axes take turns."""
ALL = (*GRIDS, "llava", "qwen2_audio")
TAP_LAYERS = (1, 2, 3)


def head_for(name, seed=3, kind=EagleHead, **changes):
    """A head of random weights that reads what this model embeds; `kind` makes it of a configuration."""
    loaded = shown(name).loaded
    torch.manual_seed(seed)
    fields = {"mrope_section": (4, 2, 2), "mrope_interleaved": GRIDS[name]} if name in GRIDS else {}
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = EagleHeadConfig(
        **sizes,
        head_dim=16,
        target_hidden_size=loaded.hidden_size,
        tap_layers=TAP_LAYERS,
        vocab_size=loaded.vocab_size,
        draft_vocab_size=loaded.vocab_size,
        **(fields | changes),
    )
    head = kind(config)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.normal_(head.qkv_proj.weight, std=0.3)  # so that it matters what attention looks at
    return head.eval().requires_grad_(False)


class Dense:
    """Chains of a head by its own formula, every pair of a sequence in one pass."""

    def __init__(self, head, name):
        self.head, self.ref = head, shown(name)
        self.taps = dense_taps(self.ref, TAP_LAYERS)
        self.grids = name in GRIDS

    def embedded(self, index):
        """Embeddings of a sequence's tokens, with images and audio in place of the prompt's placeholders."""
        ref, tokens = self.ref, torch.tensor(self.ref.sequences[index])
        rows = self.head.embed_tokens(tokens)
        found = ref.loaded.reader.encoder.features(ref.media[index])
        for one in ref.media[index]:
            assert set(tokens[one.start : one.end].tolist()) == {PLACEHOLDER}
            rows[one.start : one.end] = found[one.digest].embeddings
        return rows

    def rotary(self, index, begin, end):
        """Rotary angles of the pairs of tokens `begin` to `end`."""
        if not self.grids:
            return self.head.rotary(torch.arange(begin - 1, end - 1))
        axes = rotations(self.ref.media[index], begin, end) - 1
        return self.head.rotary_in_grids(torch.from_numpy(axes))

    def chain(self, index, length, depth):
        """Nodes of the likeliest `depth` tokens behind the first `length`, one after the other; see `drafted_paths`."""
        head, keys, values = self.head, [], []

        def attend(query, key, value):
            keys.append(key)
            values.append(value)
            key, value = (torch.cat(part).repeat_interleave(2, dim=1) for part in (keys, values))
            scores = torch.einsum("thd,shd->hts", query, key) * head.scaling
            behind = torch.arange(len(key)) > torch.arange(len(key) - len(query), len(key))[:, None]
            return torch.einsum("hts,shd->thd", scores.masked_fill(behind, float("-inf")).softmax(-1), value)

        features = head.fuse(self.taps[index][: length - 1])
        hidden = head(self.embedded(index)[1:length], features, self.rotary(index, 1, length), attend)[-1:]
        path, score, nodes = (), 0.0, {}
        for step in range(depth):
            best = head.logits(hidden)[0].log_softmax(-1).max(-1)
            path, score = (*path, int(best.indices)), score + float(best.values)
            nodes[path] = score
            rotary = self.rotary(index, length + step, length + step + 1)
            hidden = head(torch.tensor(path[-1:]), head.feedback(hidden), rotary, attend)
        return nodes


def watched(engine):
    """Drafts as the engine gets them: (sequence, its length, `drafted_paths`); filled while it runs."""
    drafts, inner = [], engine.drafting.collect

    def collect(plan, rows):
        found = inner(plan, rows)
        trees = found.checked(rows) if isinstance(found, TreeInbox) else found and found.checked()
        for row, seq in enumerate(plan.decodes if trees is not None else ()):
            drafts.append((int(seq.request.request_id), len(seq.token_ids), drafted_paths(trees, row)))
        return found

    engine.drafting.collect = collect
    return drafts


WAYS = ("kernels", "fixed shapes", "captured")


def drafts_of(name, head, way="kernels", drafter_class=EagleDrafter, **limits):
    """Every chain that is drafted behind the prompts of a model, by sequence and length."""
    ref, drafter = shown(name), drafter_class(head, CHAIN, RecordingDevice() if way == "captured" else None)
    drafter.fixed_shapes |= way == "fixed shapes"
    engine = build_engine(ref.loaded, engine_config(CHAIN, **limits), drafter, InProcessChannel)
    try:
        drafts = watched(engine)
        run = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        assert run.finish() == [tokens[:NUM_TOKENS] for tokens in ref.continuations]
    finally:
        engine.model.remove_taps()
    return by_place(drafts)


def tokens_of(drafts):
    """Drafts of `by_place`, without scores."""
    return {at: set(drafted) for at, drafted in drafts.items()}


def by_place(drafts):
    """Watched drafts by (sequence, its length)."""
    return {(index, length): drafted for index, length, drafted in drafts}


def check(drafts, dense, at_least):
    """Each chain of `by_place` is the dense pass's."""
    check_same_drafts(drafts, {at: dense.chain(*at, len(drafted)) for at, drafted in drafts.items()}, at_least)


def check_first(drafts, dense, at_least):
    """The likeliest child of the root of each tree of `by_place` is the dense pass's."""
    first = {at: likeliest_child(drafted) for at, drafted in drafts.items() if drafted}
    check(first, dense, at_least)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_drafts_behind_media_are_those_of_a_dense_pass(name, way):
    head = head_for(name)
    check(drafts_of(name, head, way, max_num_batched_tokens=17), Dense(head, name), 3 * NUM_TOKENS + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_drafter_that_comes_later_sees_the_media_again(name):
    """Prompts are replayed in pieces that begin and end within images."""
    ref, head = shown(name), head_for(name)
    rig = Rig(ref, EagleDrafter(head, TREE), lambda end: FailingEnd(end, "wait", 2, False), max_num_batched_tokens=13)
    try:
        run = ShownRun(rig.engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        while rig.engine.drafter_state == "attached":
            rig.step(run)
        rig.replace(EagleDrafter(head, TREE))
        drafts = watched(rig.engine)
        rig.finish(run)
    finally:
        rig.engine.model.remove_taps()
    assert rig.engine.stats().num_replayed_tokens > 0
    check_first(by_place(drafts), Dense(head, name), 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_positions_that_are_off_by_one_on_an_axis_change_drafts(name, axis, monkeypatch):
    def moved(media, begin, end):
        return rotations(media, begin, end) + np.eye(3, dtype=np.int64)[:, axis : axis + 1] * bool(media)

    head = head_for(name)
    right = drafts_of(name, head)
    monkeypatch.setattr(telling, "rotations", moved)
    wrong = drafts_of(name, head)
    assert len(wrong.keys() & right.keys()) > 3 * NUM_TOKENS
    with pytest.raises(AssertionError):
        check_same_drafts(wrong, right, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_head_that_embeds_placeholders_drafts_otherwise(name):
    head, other = head_for(name), head_for(name, embeds_media=False)
    other.load_state_dict(head.state_dict())
    assert tokens_of(drafts_of(name, head)) != tokens_of(drafts_of(name, other))


def test_frequencies_turn_by_the_axis_that_transformers_turns_them_by():
    fields = shown("qwen2_5_vl").loaded.model.config.get_text_config()
    assert frequency_axes(head_for("qwen2_5_vl").config) == [0] * 4 + [1] * 2 + [2] * 2
    assert frequency_axes(head_for("qwen3_vl").config) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert sum(fields.rope_parameters["mrope_section"]) == 8
    with pytest.raises(ValueError, match="mrope_section"):
        head_for("qwen2_5_vl", mrope_section=(4, 2, 1))
