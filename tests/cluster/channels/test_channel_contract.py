"""Guarantees of every kind of channel, over several rounds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cluster.peers import (
    LONG_S,
    SHORT_S,
    SPEC,
    InProcessRig,
    ProcessRig,
    Rig,
    fill_reply,
    publish,
    round_trip,
)
from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.runtime.protocol.messages import Outcome, ReplyHeader, RoundHeader, TreeReply, reply_layout


@pytest.fixture(params=["in-process", "shm", "fake-cuda", pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A verifier's end, and drafters to start for it."""
    if request.param == "in-process":
        rig = InProcessRig()
    else:
        rig = ProcessRig(request.param, request.getfixturevalue("nursery"), request.getfixturevalue("name"))
    yield rig
    rig.verifier.close()


def fill_round(verifier: VerifierSide, outcome: Outcome, generator: torch.Generator) -> None:
    """A round of which all rows count, so that every byte has to arrive: new sequences in all slots, of full length."""
    for tensor in (*outcome, verifier.token_ids):
        randomise(tensor, generator)
    for slots in (outcome.decode_slots, outcome.chunk_slots, outcome.proposal_slots):
        slots.copy_(torch.randperm(SPEC.num_slots, generator=generator))
    outcome.decode_num_tokens.fill_(SPEC.max_path)
    outcome.chunk_lens.copy_(torch.tensor([2, SPEC.max_prefill_tokens - 3, 1]))
    outcome.epochs.copy_(torch.randint(2**40, outcome.epochs.shape, generator=generator))
    outcome.committed_lens.fill_(SPEC.max_model_len + 1)
    RoundHeader(0, *[SPEC.num_slots] * 3, max_levels=2, sampling_rules=True).write(outcome.header)


def randomise(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randint(0, 1000, tensor.shape, generator=generator))


@pytest.mark.few(2)
def test_every_field_arrives_on_both_sides_round_after_round(rig: Rig) -> None:
    rig.start(2, "answer")
    generator = torch.Generator().manual_seed(5)
    for round_number in range(1, 7):
        outcome = rig.verifier.acquire_outcome(LONG_S)
        fill_round(rig.verifier, outcome, generator)
        assert rig.verifier.publish_outcome() == round_number
        reply = rig.verifier.wait_reply(round_number, LONG_S)
        expected = TreeReply(*(torch.zeros(shape, dtype=dtype) for shape, dtype in reply_layout(SPEC).values()))
        fill_reply(outcome, rig.verifier.token_ids, expected, incarnation=2)
        ReplyHeader(round_number, 2).write(expected.header)
        for field, got, want in zip(TreeReply._fields, reply, expected, strict=True):
            assert torch.equal(got.cpu(), want), field


def test_addresses_alternate_between_two_and_never_move(rig: Rig) -> None:
    rig.start(2, "answer")
    seen = []
    for _ in range(5):
        outcome = rig.verifier.acquire_outcome(LONG_S)
        reply = rig.verifier.wait_reply(rig.verifier.publish_outcome(), LONG_S)
        seen.append([tensor.data_ptr() for tensor in (*outcome, *reply)])
        assert all(address % 64 == 0 for address in seen[-1])
    assert seen[0] == seen[2] == seen[4] != seen[1] == seen[3]


@pytest.mark.few(2)
def test_two_rounds_may_be_under_way_and_a_third_has_to_wait(rig: Rig) -> None:
    rig.start(2, "hold")
    first, second = publish(rig.verifier), publish(rig.verifier)
    assert rig.verifier.acquire_outcome(SHORT_S) is None
    assert rig.verifier.wait_reply(first, SHORT_S) is None
    assert rig.verifier.wait_reply(second, 0.0) is None
    with pytest.raises(RuntimeError, match="without an acquired"):
        rig.verifier.publish_outcome()
    assert rig.verifier.peer_alive()


def test_rounds_may_overlap(rig: Rig) -> None:
    rig.start(2, "answer")
    older = publish(rig.verifier)
    for _ in range(5):
        newer = publish(rig.verifier)
        assert ReplyHeader.read(rig.verifier.wait_reply(older, LONG_S).header).round_number == older
        older = newer
    assert ReplyHeader.read(rig.verifier.wait_reply(older, LONG_S).header).round_number == older


def test_without_a_drafter_nothing_blocks(rig: Rig) -> None:
    assert rig.verifier.incarnation == 0
    assert not rig.verifier.peer_alive()
    for _ in range(4):
        assert round_trip(rig.verifier) is None


def test_a_new_incarnation_skips_old_rounds_and_closes_its_predecessor(rig: Rig) -> None:
    rig.start(3, "hold")
    unread = [publish(rig.verifier), publish(rig.verifier)]
    saw_close = rig.close_witness()
    rig.start(4, "answer")
    assert rig.verifier.incarnation == 4
    for round_number in unread:
        assert rig.verifier.wait_reply(round_number, LONG_S) is None
    assert ReplyHeader.read(round_trip(rig.verifier).header) == (3, 4)
    assert saw_close()


def test_the_verifier_closing_is_seen_by_the_drafter_and_ends_both_sides(rig: Rig) -> None:
    rig.start(2, "answer")
    assert round_trip(rig.verifier) is not None
    saw_close = rig.close_witness()
    rig.verifier.close()
    assert saw_close()
    assert rig.verifier.acquire_outcome(LONG_S) is None
    assert rig.verifier.wait_reply(1, LONG_S) is None
    assert not rig.verifier.peer_alive()
    rig.verifier.close()


def test_ends_fulfil_the_runtimes_contract() -> None:
    from wingbeat.runtime.protocol.ends import DrafterEnd, VerifierEnd

    for side, contract in ((VerifierSide, VerifierEnd), (DrafterSide, DrafterEnd)):
        methods = {member for member in vars(contract) if not member.startswith("_")}
        assert methods <= set(dir(side))
