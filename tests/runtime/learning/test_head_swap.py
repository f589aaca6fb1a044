"""Another head in the middle of texts changes none of them, is told with every answer, and drafts from then on."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.drafter_kinds import KINDS as TEXT_KINDS
from tests.runtime.drafter_kinds import USER_DRAFTER
from tests.runtime.loaded_kind import Kind
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, Run, engine_config, reference
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.head_drafter import HeadDrafter
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.head_swaps import head_swaps
from wingbeat.runtime.head_swaps.head_swaps import HeadSwaps, prepare_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.inner_drafter import attach
from wingbeat.runtime.learning.head_follower import HeadFollower
from wingbeat.runtime.learning.head_versions import HeadLedger
from wingbeat.runtime.scheduling.request import SamplingParams

STREAMS, EVERY = 16, 20
MOST_TOKENS = 120


def demo(_folder) -> Kind:
    """The demo pair, whose drafts are often right."""
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    return Kind(reference("demo", 1), target, str(DEMO_PAIR / "drafter"))


KINDS = TEXT_KINDS | {"demo": demo}


def changed(source, folder, scale=0.05, **tensors):
    """A copy of a head with noise in its weights, or with other tensors."""
    shutil.copytree(source, folder)
    torch.manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = (weight + scale * torch.randn(weight.shape).to(weight.dtype)).contiguous()
    save_file(weights | tensors, folder / "model.safetensors")
    return str(folder)


class Pair:
    """An engine and what drafts for it, in this thread."""

    def __init__(self, kind, drafter, speculation, **limits):
        self.worker = DraftWorker(drafter)
        config = engine_config(speculation, max_num_seqs=STREAMS, num_kv_blocks=400, **limits)
        self.engine = Engine(kind.ref.loaded, config, drafter.needs)
        attach(self.engine, self.worker, InProcessChannel)

    def run(self, kind, params, between=lambda number: None):
        prompts = (kind.ref.prompts * STREAMS)[:STREAMS]
        run, number = Run(self.engine, prompts, params), 0
        while self.engine.has_unfinished_requests():
            run.step()
            number += 1
            between(number)
        self.engine.check_integrity()
        self.engine.model.remove_taps()
        return run.tokens


def sampled(tokens=MOST_TOKENS):
    return [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True, force_drafts=True)
        for seed in range(STREAMS)
    ]


def plain(kind):
    engine = Engine(kind.ref.loaded, engine_config(max_num_seqs=STREAMS, num_kv_blocks=400))
    return Run(engine, (kind.ref.prompts * STREAMS)[:STREAMS], sampled()).finish()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "speculation"),
    [
        ("eagle1", TREE),
        pytest.param("dflash", CHAIN, marks=pytest.mark.slow),
        pytest.param("demo", CHAIN, marks=pytest.mark.slow),
        pytest.param("dflash", TREE, marks=pytest.mark.slow),
        pytest.param("peagle", TREE, marks=pytest.mark.slow),
        pytest.param("demo", TREE, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"top_k={value.draft_top_k}",
)
def test_heads_swapped_every_twenty_rounds_change_no_token_of_sixteen_sampled_streams(name, speculation, tmp_path):
    kind = KINDS[name](tmp_path)
    drafter = kind.drafter(speculation)
    sources = [changed(kind.source, tmp_path / "other"), kind.source]
    pair = Pair(kind, drafter, speculation)
    swaps = HeadSwaps.of(pair.worker)

    def between(number):
        if number % EVERY == 0:
            version = number // EVERY
            swaps.offer(version, swaps.prepare(sources[version % 2]))

    assert pair.run(kind, sampled(), between) == plain(kind)
    counted = pair.engine.stats().by_head
    assert len(counted) > 2, "nothing was swapped"
    assert sum(counts[0] for counts in counted.values()) <= pair.engine.speculation.num_drafts
    assert pair.engine.stats().head_version == max(counted)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param("demo", marks=pytest.mark.slow), *(name for name in KINDS if name != "demo")]
)
def test_a_head_that_was_taken_drafts_as_one_that_was_loaded(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(USER_DRAFTER)
    kind = KINDS[name](tmp_path)
    if not isinstance(load_drafter(kind.source, kind.target, TREE), HeadDrafter):
        pytest.skip("it drafts with nothing that could be swapped")
    other = changed(kind.source, tmp_path / "other", 0.2)
    counts = []
    for first, then in ((other, None), (kind.source, other), (kind.source, None)):
        drafter = load_drafter(first, kind.target, TREE)
        pair = Pair(kind, drafter, TREE)
        if then is not None:
            HeadSwaps.of(pair.worker).offer(1, prepare_head(drafter, then))
        pair.run(kind, sampled(24))
        counts.append(next(iter(pair.engine.stats().by_head.values())))
    assert counts[0] == counts[1]
    assert counts[1] != counts[2], "the heads draft alike, so that nothing was tested"


def poisoned(source, folder):
    """By what is wrong, a head's folder."""
    weights = load_file(f"{source}/model.safetensors")
    name = next(name for name in weights if name.endswith("fc.weight"))
    nan, wide = weights[name].clone(), torch.zeros(3, 5)
    nan[0, 0] = float("nan")
    found = {"not finite": changed(source, folder / "nan", **{name: nan})}
    found["fc.weight"] = changed(source, folder / "shape", **{name: wide})
    found["vocab_size"] = changed(source, folder / "vocabulary")
    raw = json.loads((folder / "vocabulary" / "config.json").read_text())
    (folder / "vocabulary" / "config.json").write_text(json.dumps(raw | {"vocab_size": raw["vocab_size"] + 7}))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dflash", "demo"])
def test_poisoned_heads_are_refused_by_name_and_the_version_before_goes_on(name, tmp_path):
    kind = KINDS[name](tmp_path)
    drafter = kind.drafter(TREE)
    worker, ledger = DraftWorker(drafter), HeadLedger(tmp_path / "ledger", kind.source, "v")
    follower = HeadFollower(ledger, worker)
    for word, folder in poisoned(kind.source, tmp_path).items():
        number = ledger.add(
            lambda into, folder=folder: shutil.copytree(folder, into, dirs_exist_ok=True), "operator", ""
        )
        ledger.promote(number, "by mistake")
        assert not follower.look()
        version = ledger.read().version(number)
        assert version.state == "refused"
        assert word in version.reason
        assert ledger.read().served == 0
    assert follower.swaps.version == 0
    assert not follower.swaps.take()


@pytest.mark.parametrize("name", ["dflash"])
def test_a_head_of_another_kind_is_refused(name, tmp_path):
    kind, other = KINDS[name](tmp_path / "a"), KINDS["eagle3"](tmp_path / "b")
    with pytest.raises(ValueError, match="no head that drafts in one pass"):
        prepare_head(kind.drafter(TREE), other.source)
    with pytest.raises(ValueError, match="drafts in one pass"):
        prepare_head(other.drafter(TREE), kind.source)


def test_a_drafter_without_a_head_takes_none():
    with pytest.raises(ValueError, match="EAGLE and one-pass"):
        prepare_head(ScriptedDrafter([], right_tree, 2), "a head")


def test_a_drafter_that_starts_anew_drafts_with_the_version_that_is_served(tmp_path):
    kind = KINDS["eagle3"](tmp_path)
    ledger = HeadLedger(tmp_path / "ledger", kind.source, "v")
    other = changed(kind.source, tmp_path / "other")
    number = ledger.add(lambda into: shutil.copytree(other, into, dirs_exist_ok=True), "operator", "")
    ledger.promote(number, "asked for")
    worker = DraftWorker(kind.drafter(TREE))
    HeadFollower(ledger, worker).start()
    assert worker.watch.head_version == number
    assert ledger.read().version(number).taken


def promoted(ledger, source):
    """A copy of a head as the version that is served; its number."""
    number = ledger.add(lambda into: shutil.copytree(source, into, dirs_exist_ok=True), "operator", "")
    ledger.promote(number, "asked for")
    return number


def unlucky(*args):
    raise OverflowError("unlucky")


def test_a_version_is_taken_once_the_swap_is_over_and_not_when_it_is_offered(tmp_path):
    kind = demo(tmp_path)
    ledger, worker = HeadLedger(tmp_path / "ledger", kind.source, "v"), DraftWorker(kind.drafter(TREE))
    follower, number = HeadFollower(ledger, worker), promoted(ledger, kind.source)
    assert follower.look()
    assert not ledger.read().version(number).taken, "a drafter that is killed at the swap would read it for ever"
    assert follower.swaps.take()
    follower._follow()
    assert ledger.read().version(number).taken


@pytest.mark.slow
@pytest.mark.parametrize("place", ["take_head", "answer"])
def test_a_version_that_raises_at_the_swap_or_in_its_first_round_is_refused(place, tmp_path, monkeypatch):
    kind = demo(tmp_path)
    drafter = kind.drafter(TREE)
    pair, ledger = Pair(kind, drafter, TREE), HeadLedger(tmp_path / "ledger", kind.source, "v")
    follower, number = HeadFollower(ledger, pair.worker), promoted(ledger, kind.source)

    def between(count):
        if count == 3:
            monkeypatch.setattr(head_swaps if place == "take_head" else drafter, place, unlucky)
            assert follower.look()

    assert pair.run(kind, sampled(24), between) == [tokens[:24] for tokens in plain(kind)]
    assert pair.engine.drafter_state == "lost"
    found = ledger.read()
    assert (found.served, found.version(number).state) == (0, "refused")
    assert "OverflowError: unlucky" in found.version(number).reason


def test_a_drafter_starts_with_the_version_before_where_that_which_is_served_cannot_be_taken(tmp_path, monkeypatch):
    kind = demo(tmp_path)
    ledger, drafter = HeadLedger(tmp_path / "ledger", kind.source, "v"), kind.drafter(TREE)
    first, second = promoted(ledger, kind.source), promoted(ledger, kind.source)
    whole, tried = head_swaps.take_head, []

    def take_head(drafter, head):
        tried.append(head)
        return unlucky() if len(tried) == 1 else whole(drafter, head)

    monkeypatch.setattr(head_swaps, "take_head", take_head)
    worker = DraftWorker(drafter)
    HeadFollower(ledger, worker).start()
    found = ledger.read()
    assert (worker.watch.head_version, found.served, found.version(second).state) == (first, first, "refused")
    assert found.version(first).taken
    assert not found.version(second).taken


def test_a_swap_that_raises_leaves_the_head_before_whole(tmp_path, monkeypatch):
    kind = demo(tmp_path)
    drafter = kind.drafter(TREE)
    Pair(kind, drafter, TREE).engine.model.remove_taps()
    if drafter.passes is None:
        pytest.skip("the swap has one step where torch drafts")
    head = drafter.head
    monkeypatch.setattr(drafter.passes, "use_weights", unlucky)
    with pytest.raises(OverflowError):
        head_swaps.take_head(drafter, prepare_head(drafter, changed(kind.source, tmp_path / "other")))
    assert drafter.head is head
