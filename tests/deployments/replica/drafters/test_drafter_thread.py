"""The thread of a drafter, over real channels."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.runtime.scripted import ScriptedDrafter, right_chain
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters.drafter_thread import DrafterThread
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.messages import ChannelSpec, RoundHeader

TREE = SpeculationConfig.default("cpu")
SPEC = ChannelSpec(4, TREE.num_nodes, TREE.max_path, 8, 0, 64, 8, 16, 40, keeps_context=False)
CONFIG = AppConfig(drafter_factory=f"{__name__}:build_worker", max_num_seqs=4)
PATIENCE_S = 20.0


class ReadableDrafter(ScriptedDrafter):
    """A drafter of one text that accepts a head convention."""

    def read_as(self, convention: HeadConvention) -> None:
        self.convention = convention


FLUSHED: list[float] = []


def build_worker(config: AppConfig) -> DraftWorker:
    FLUSHED.append(float(torch.tensor([1e-39]) * 1))
    return DraftWorker(ReadableDrafter([[5, 6, 7] * 4], right_chain, 8))


class Verifier:
    """A channel whose verifier requests a continuation of 5 6 7 5 6."""

    def __init__(self, name: str) -> None:
        self.name = f"test-thread-{name}.{os.getpid()}"
        self.end = ShmChannel.create(self.name, SPEC).verifier_end

    def drafted(self) -> list[int]:
        """The tree that the drafter answers with; its first tokens."""
        outcome = self.end.acquire_outcome(PATIENCE_S)
        RoundHeader(0, 0, 0, 1, TREE.max_path - 1).write(outcome.header)
        outcome.proposal_slots[0] = 1
        outcome.committed_lens[1] = 5
        self.end.token_ids[1, :5] = self.end.token_ids.new_tensor([5, 6, 7, 5, 6])
        reply = self.end.wait_reply(self.end.publish_outcome(), PATIENCE_S)
        return reply.token_ids[1, :3].tolist()


@pytest.fixture
def verifiers() -> Iterator[list[Verifier]]:
    made = [Verifier(name) for name in "abc"]
    yield made
    for one in made:
        one.end.close()


def test_a_drafter_flushes_denormal_numbers(verifiers: list[Verifier]):
    DrafterThread(CONFIG).attach(verifiers[0].name, 1)
    assert FLUSHED[-1] == 0.0


def test_a_thread_that_is_to_rest_answers_no_further_round(verifiers: list[Verifier]):
    thread, one = DrafterThread(CONFIG), verifiers[0]
    thread.attach(one.name, 1)
    assert one.drafted() == [6, 7, 5]
    thread.rest()
    one.end.acquire_outcome(PATIENCE_S)
    assert one.end.wait_reply(one.end.publish_outcome(), 0.3) is None
    assert one.end.peer_alive()


def test_a_verifier_of_another_reading_is_refused_and_keeps_no_place(verifiers: list[Verifier]):
    thread, (a, b, _) = DrafterThread(CONFIG), verifiers
    thread.attach(a.name, 1, HeadConvention((1, 2)))
    with pytest.raises(ValueError, match=r"reads its head as .*\(1, 2\).* and .*\(1, 3\).* is asked for"):
        thread.attach(b.name, 1, HeadConvention((1, 3)))
    thread.attach(b.name, 2, HeadConvention((1, 2)))
    assert b.drafted() == [6, 7, 5]
