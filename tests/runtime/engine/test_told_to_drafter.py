"""Inputs of the drafter that only affect acceptance: each is checked by what was sent, and by what was drafted."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tests.runtime.by_torch import by_torch
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, Run, engine_config, greedy_params, reference
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.inner_drafter import attach
from wingbeat.runtime.protocol.messages import RoundHeader
from wingbeat.runtime.protocol.sampling_rules import RuleKinds

COUNT, BAN = 12, float("-inf")
_BY_TORCH = pytest.param(by_torch, id="torch", marks=pytest.mark.slow)
DRAFTED_BY = pytest.mark.parametrize("draft_by", [pytest.param(lambda run: run(), id="kernels"), _BY_TORCH])
SHAPES = pytest.mark.parametrize(
    "shape", [pytest.param(CHAIN, id="chain", marks=pytest.mark.slow), pytest.param(TREE, id="tree")]
)


class Pass(NamedTuple):
    """Reply of the drafter: its header, and the trees."""

    header: RoundHeader
    token_ids: list[list[int]]
    """Valid tokens of each tree, without the root."""
    depths: list[list[int]]


class Pair:
    """The demo pair's engine and drafter in this thread; records every pass that drafts trees."""

    def __init__(self, shape, spoil=lambda outcome: None) -> None:
        target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
        drafter = load_drafter(DEMO_PAIR / "drafter", target, shape, DrafterOptions(torch.float32, "cpu"))
        self.ref, self.passes, self._worker = reference("demo", 1), [], DraftWorker(drafter)
        self._spoil = spoil
        self.engine = Engine(self.ref.loaded, engine_config(shape), drafter.needs)
        self._draft, self._worker._draft = self._worker._draft, self._noted
        attach(self.engine, self._worker, InProcessChannel)
        self.passes.clear()  # passes of the calibration

    def run(self, params) -> list[Pass]:
        """Serve one request per entry of `params`; return the recorded passes."""
        prompts = self.ref.prompts[: len(params)]
        Run(self.engine, prompts, params).finish()
        self.engine.model.remove_taps()
        assert self.passes
        return self.passes

    def _noted(self, pending) -> None:
        [(attachment, outcome)] = pending
        header, reply = RoundHeader.read(outcome.header), attachment.end.reply
        slots = outcome.proposal_slots[: header.num_proposals].tolist()
        self._spoil(outcome)
        self._draft(pending)
        if slots:
            trees = [
                (reply.token_ids[slot, 1:count].tolist(), reply.depths[slot, 1:count].tolist(), reply.scores[slot])
                for slot in slots
                for count in [int(reply.num_valid[slot])]
            ]
            kept = [[place for place in range(len(ids)) if scores[place + 1] > BAN] for ids, _, scores in trees]
            token_ids = [[ids[place] for place in own] for (ids, *_), own in zip(trees, kept, strict=True)]
            depths = [[depths[place] for place in own] for (_, depths, _), own in zip(trees, kept, strict=True)]
            self.passes.append(Pass(header, token_ids, depths))


def drafted_tokens(passes) -> Counter:
    return Counter(token_id for one in passes for tree in one.token_ids for token_id in tree)


@DRAFTED_BY
@SHAPES
def test_tokens_that_a_request_bans_are_told_and_not_drafted(shape, draft_by):
    free = drafted_tokens(draft_by(lambda: Pair(shape).run([greedy_params(COUNT)] * 2)))
    banned = tuple((token_id,) for token_id, _ in free.most_common(20))
    passes = draft_by(lambda: Pair(shape).run([greedy_params(COUNT, bad_words=banned)] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS | RuleKinds.LISTED}
    assert drafted_tokens(passes)
    assert not drafted_tokens(passes) & Counter({token_id for (token_id,) in banned})


@DRAFTED_BY
@SHAPES
def test_a_filter_that_leaves_a_single_token_has_a_single_token_drafted(shape, draft_by):
    params = replace(greedy_params(COUNT), temperature=1.0, top_k=1, seed=3)
    passes = draft_by(lambda: Pair(shape).run([params] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS}
    assert {depths.count(1) for one in passes for depths in one.depths} == {1}


@DRAFTED_BY
def test_penalties_are_told_and_move_drafts_away_from_what_was_written(draft_by):
    def repeated(params, kinds):
        run = Pair(TREE).run([params] * 4)
        assert {one.header.sampling_rules for one in run} == {kinds}
        trees = [tree for one in run for tree in one.token_ids if tree]
        return sum(len(tree) - len(set(tree)) for tree in trees) / len(trees)

    told = RuleKinds.NUMBERS | RuleKinds.PENALTIES
    free = draft_by(lambda: repeated(greedy_params(COUNT), 0))
    penalised = draft_by(lambda: repeated(greedy_params(COUNT, presence_penalty=2.0, frequency_penalty=2.0), told))
    assert penalised < free


@DRAFTED_BY
def test_where_few_tokens_are_allowed_no_other_is_drafted(draft_by):
    allowed = tuple(range(100, 140))
    passes = draft_by(lambda: Pair(TREE).run([greedy_params(COUNT, allowed_token_ids=allowed)] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS | RuleKinds.LISTED}
    assert drafted_tokens(passes)
    assert drafted_tokens(passes).keys() <= set(allowed)


@pytest.mark.few(1)
@DRAFTED_BY
@pytest.mark.parametrize("field", ["seeds", "temperatures"])
def test_sampled_drafts_are_ranked_by_the_noise_that_chooses_the_tokens(field, draft_by):
    """With a wrong seed or temperature, fewer of the drafter's tokens are accepted."""

    def accepted(spoil=lambda outcome: None):
        pair = Pair(CHAIN, spoil)
        pair.run([replace(greedy_params(3 * COUNT), temperature=1.3, seed=seed) for seed in range(11, 17)])
        return pair.engine.speculation.num_accepted_tokens / pair.engine.speculation.num_drafts

    def other(outcome):
        getattr(outcome, field).fill_(12_345 if field == "seeds" else 0.0)

    assert draft_by(accepted) > 2 * draft_by(lambda: accepted(other))
