"""Inputs of the drafter that only affect acceptance: each is checked by what was sent, and by what was drafted."""

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
        self._draft, self._worker.draft = self._worker.draft, self._noted
        attach(self.engine, self._worker, InProcessChannel)
        self.passes.clear()  # passes of the calibration

    def run(self, params) -> list[Pass]:
        """Serve one request per entry of `params`; return the recorded passes."""
        prompts = self.ref.prompts[: len(params)]
        Run(self.engine, prompts, params).finish()
        self.engine.model.remove_taps()
        assert self.passes
        return self.passes

    def _noted(self, end, outcome) -> None:
        header, reply = RoundHeader.read(outcome.header), end.reply
        slots = outcome.proposal_slots[: header.num_proposals].tolist()
        self._spoil(outcome)
        self._draft(end, outcome)
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
