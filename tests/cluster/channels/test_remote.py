"""Guarantees of a remote channel beyond the contract of every channel: messages, waits and ends."""

import dataclasses
import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.cluster.peers import LONG_S, SHORT_S, SPEC, eventually, publish, round_trip, serve_in_thread
from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
from wingbeat.runtime.engine.outcome_writer import OutcomeWriter
from wingbeat.runtime.protocol.messages import AcceptedPaths, Outcome, ReplyHeader, RoundHeader

Pair = tuple[RemoteChannel, DrafterSide]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A verifier, and its drafter in the same thread."""
    channel = RemoteChannel("127.0.0.1", SPEC)
    drafter = RemoteChannel.attach(channel.name, 1)
    assert channel.verifier_end.incarnation == 1
    yield channel, drafter
    drafter.close()
    channel.verifier_end.close()


def decode(outcome: Outcome, slots: list[int], num_tokens: list[int], seed: int = 0) -> AcceptedPaths:
    """Write a round in which all these sequences request trees; returns the accepted paths."""
    count, path = len(slots), SPEC.max_path
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 99, (count, path), generator=generator)
    taps = torch.rand(count, path, SPEC.taps_size, generator=generator).to(SPEC.taps_dtype)
    lens = torch.tensor(num_tokens)
    paths = AcceptedPaths(torch.tensor(slots), torch.arange(count), tokens, lens, lens, tokens, taps)
    writer = OutcomeWriter(outcome)
    writer.decodes(slots, paths)
    writer.finish(slots, max_levels=2)
    return paths


def exchange(pair: Pair) -> Outcome:
    """Publish the filled round, answer it, and return the outcome that the drafter received."""
    channel, drafter = pair
    round_number = channel.verifier_end.publish_outcome()
    outcome = drafter.wait_outcome(LONG_S)
    drafter.publish_reply()
    assert channel.verifier_end.wait_reply(round_number, LONG_S) is not None
    return outcome


def bytes_of_next_round(pair: Pair) -> int:
    """Number of bytes that the next round sends to the drafter."""
    connection = pair[0].verifier_end._link.connection
    sent, send = [], connection.send
    connection.send = lambda num_bytes: (sent.append(num_bytes), send(num_bytes))
    exchange(pair)
    connection.send = send
    return sent[0]


def test_hidden_states_travel_for_the_positions_that_were_computed(pair: Pair) -> None:
    outcome = pair[0].verifier_end.acquire_outcome(LONG_S)
    paths = decode(outcome, [2, 0], [1, 3])
    seen = exchange(pair)
    for row, count in enumerate([1, 3]):
        assert torch.equal(seen.decode_taps[row, :count], paths.taps[row, :count])
        assert not seen.decode_taps[row, count:].any()
    assert seen.decode_slots[:2].tolist() == [2, 0]
    assert torch.equal(seen.decode_token_ids[:2], paths.token_ids)


def test_of_a_history_only_new_tokens_travel(pair: Pair) -> None:
    verifier, drafter = pair[0].verifier_end, pair[1]
    history, sizes, length = torch.arange(100, 100 + SPEC.max_model_len), [], 4
    for num_new in (0, 1, 3):
        length += num_new
        verifier.token_ids[1, :length] = history[:length]
        outcome = verifier.acquire_outcome(LONG_S)
        decode(outcome, [1], [1])
        outcome.epochs[1], outcome.committed_lens[1] = 7, length
        sizes.append(bytes_of_next_round(pair))
        assert torch.equal(drafter.token_ids[1, :length], history[:length])
    assert [size - sizes[1] for size in sizes] == [3 * 8, 0, 2 * 8]


def test_a_new_epoch_sends_its_history_from_the_start(pair: Pair) -> None:
    verifier, drafter = pair[0].verifier_end, pair[1]
    for epoch, first in ((1, 10), (2, 50)):
        verifier.token_ids[0, :5] = torch.arange(first, first + 5)
        outcome = verifier.acquire_outcome(LONG_S)
        decode(outcome, [0], [1])
        outcome.epochs[0], outcome.committed_lens[0] = epoch, 5
        exchange(pair)
        assert drafter.token_ids[0, :5].tolist() == list(range(first, first + 5))


def test_of_block_tables_only_changes_travel_and_both_buffers_get_them(pair: Pair) -> None:
    verifier = pair[0].verifier_end
    sizes = []
    for blocks in ([4, 0], [4, 0], [4, 0], [4, 0], [4, 6], [4, 6], [4, 6]):
        outcome = verifier.acquire_outcome(LONG_S)
        decode(outcome, [1], [1])
        outcome.block_tables[1] = torch.tensor(blocks)
        sizes.append(bytes_of_next_round(pair))
        assert pair[1]._outcomes[len(sizes) % 2].block_tables[1].tolist() == blocks
    entry = 3 * 8 + 8
    assert [size - sizes[2] for size in sizes] == [entry, entry, 0, 0, entry, entry, 0]


def test_of_what_grammars_allow_rows_of_proposals_travel_where_any_is_restricted() -> None:
    channel = RemoteChannel("127.0.0.1", dataclasses.replace(SPEC, vocab_size=70))
    drafter = RemoteChannel.attach(channel.name, 1)
    for has_masks, first in ((0, 1), (1, 5), (0, 9)):
        outcome = channel.verifier_end.acquire_outcome(LONG_S)
        decode(outcome, [1, 2], [1, 1])
        outcome.allowed_tokens[:2] = torch.arange(first, first + 6).view(2, 3)
        outcome.header[RoundHeader._fields.index("has_masks")] = has_masks
        seen = exchange((channel, drafter))
        assert torch.equal(seen.allowed_tokens[:2], outcome.allowed_tokens[:2]) == bool(has_masks)
    drafter.close()
    channel.verifier_end.close()


def test_what_chunks_have_of_images_travels_where_a_round_has_some() -> None:
    channel = RemoteChannel("127.0.0.1", dataclasses.replace(SPEC, embedding_width=4, num_axes=3))
    drafter = RemoteChannel.attach(channel.name, 1)
    for has_inputs, first in ((0, 1), (1, 40), (0, 90)):
        outcome = channel.verifier_end.acquire_outcome(LONG_S)
        told = outcome.inputs(2)
        for part in told:
            part.copy_(torch.arange(first, first + part.numel()).view(part.shape))
        writer = OutcomeWriter(outcome, lambda outcome, chunks, has_inputs=has_inputs: has_inputs)
        writer.add_chunk(1, 0, 2)
        writer.finish([], 0)
        outcome.position_deltas[1] = -first
        seen = exchange((channel, drafter))
        assert int(seen.position_deltas[1]) == -first
        same = [torch.equal(part, mine) for part, mine in zip(seen.inputs(2), told, strict=True)]
        assert same == [bool(has_inputs)] * 3
    drafter.close()
    channel.verifier_end.close()


def test_a_later_drafter_gets_all_that_counts_anew(pair: Pair) -> None:
    channel, first = pair
    for incarnation in (1, 2):
        drafter = first if incarnation == 1 else RemoteChannel.attach(channel.name, incarnation)
        assert channel.verifier_end.incarnation == incarnation
        channel.verifier_end.token_ids[2, :6] = torch.arange(6)
        outcome = channel.verifier_end.acquire_outcome(LONG_S)
        decode(outcome, [2], [2])
        outcome.epochs[2], outcome.committed_lens[2] = 3, 6
        outcome.block_tables[2] = torch.tensor([8, 5])
        seen = exchange((channel, drafter))
        assert drafter.token_ids[2, :6].tolist() == list(range(6))
        assert seen.block_tables[2].tolist() == [8, 5]
    drafter.close()


def test_of_trees_those_asked_for_travel_as_wide_as_the_widest(pair: Pair) -> None:
    channel, drafter = pair
    decode(channel.verifier_end.acquire_outcome(LONG_S), [2, 0], [1, 1])
    round_number = channel.verifier_end.publish_outcome()
    assert drafter.wait_outcome(LONG_S) is not None
    drafter.reply.num_valid.copy_(torch.tensor([3, 5, 2]))
    drafter.reply.token_ids.copy_(torch.arange(15).view(3, 5))
    drafter.reply.scores.fill_(-0.5)
    drafter.publish_reply()
    reply = channel.verifier_end.wait_reply(round_number, LONG_S)
    assert reply.num_valid.tolist() == [3, 0, 2]
    assert reply.token_ids[0].tolist() == [0, 1, 2, 0, 0]
    assert reply.token_ids[2].tolist() == [10, 11, 12, 0, 0]
    assert not reply.token_ids[1].any()
    assert reply.scores[0].tolist() == [-0.5, -0.5, -0.5, 0, 0]


def test_a_round_longer_than_the_kernel_takes_is_sent_meanwhile() -> None:
    spec = dataclasses.replace(SPEC, max_prefill_tokens=2**13, taps_size=2**10)
    channel = RemoteChannel("127.0.0.1", spec)
    verifier, drafter = channel.verifier_end, RemoteChannel.attach(channel.name, 1)
    assert verifier.incarnation == 1
    generator, sent = torch.Generator().manual_seed(3), []
    for _ in range(2):  # published one after the other, while nobody reads
        outcome = verifier.acquire_outcome(0.0)
        writer = OutcomeWriter(outcome)
        taps, _ = writer.add_chunk(0, 0, spec.max_prefill_tokens)
        sent.append(torch.rand(taps.shape, generator=generator).to(taps.dtype))
        taps.copy_(sent[-1])
        writer.finish([], 0)
        verifier.publish_outcome()
    assert verifier.wait_reply(1, SHORT_S) is None
    for number, expected in enumerate(sent, start=1):
        assert torch.equal(drafter.wait_outcome(LONG_S).chunk_taps, expected)
        drafter.publish_reply()
        assert verifier.wait_reply(number, LONG_S) is not None
    drafter.close()
    verifier.close()


def test_a_connection_that_is_cut_is_noticed_by_both_and_followed_by_another(pair: Pair) -> None:
    channel, drafter = pair
    verifier = channel.verifier_end
    round_number = publish(verifier)
    drafter._link.connection._sock.shutdown(2)
    assert verifier.wait_reply(round_number, LONG_S) is None
    assert not verifier.peer_alive()
    assert drafter.wait_outcome(LONG_S) is None
    assert drafter.closed
    for _ in range(3):
        assert round_trip(verifier) is None
    thread = serve_in_thread(RemoteChannel.attach(channel.name, 2), "answer")
    assert ReplyHeader.read(round_trip(verifier).header).incarnation == 2
    verifier.close()
    thread.join(LONG_S)


def test_a_drafter_that_leaves_is_noticed_while_nothing_runs(pair: Pair) -> None:
    channel, drafter = pair
    assert channel.verifier_end.peer_alive()
    drafter.close()
    assert eventually(lambda: not channel.verifier_end.peer_alive())


def test_a_drafter_that_answers_and_leaves_has_answered(pair: Pair) -> None:
    channel, drafter = pair
    round_number = publish(channel.verifier_end)
    assert drafter.wait_outcome(LONG_S) is not None
    drafter.publish_reply()
    drafter.close()
    assert channel.verifier_end.wait_reply(round_number, LONG_S) is not None
    assert not channel.verifier_end.peer_alive()


def test_where_no_verifier_listens_a_drafter_is_told() -> None:
    channel = RemoteChannel("127.0.0.1", SPEC)
    channel.verifier_end.close()
    with pytest.raises(ChannelError, match=r"cannot reach its verifier at 127\.0\.0\.1:"):
        RemoteChannel.attach(channel.name, 1)


def test_an_address_of_another_node_cannot_be_listened_on() -> None:
    with pytest.raises(ChannelError, match=r"cannot listen on 192\.0\.2\.1"):
        RemoteChannel("192.0.2.1", SPEC)


def test_no_text_of_an_address_shows_its_secret(pair: Pair) -> None:
    address = pair[0].name
    assert address.secret.hex() not in f"{address} {address!r}"
    assert str(address.secret) not in f"{address} {address!r}"


def test_a_channel_dropped_unclosed_is_closed(pair: Pair) -> None:
    channel = RemoteChannel("127.0.0.1", SPEC)
    drafter = RemoteChannel.attach(channel.name, 1)
    del channel
    gc.collect()
    assert eventually(lambda: drafter.poll_outcome() is None and drafter.closed)
    drafter.close()


@pytest.mark.slow
def test_ten_lives_of_a_channel_leave_no_thread_and_no_descriptor() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = held()
    for _ in range(10):
        channel = RemoteChannel("127.0.0.1", SPEC)
        for incarnation in (1, 2):  # of which nobody closes the first
            drafter = RemoteChannel.attach(channel.name, incarnation)
            assert channel.verifier_end.incarnation == incarnation
            publish(channel.verifier_end)
            assert drafter.wait_outcome(LONG_S) is not None
        drafter.close()
        channel.verifier_end.close()
    del channel, drafter
    assert eventually(lambda: held() == before)


def test_a_forked_child_does_not_end_the_connection(pair: Pair) -> None:
    channel, drafter = pair
    pid = os.fork()
    if not pid:
        channel.verifier_end.on_close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert channel.verifier_end.peer_alive()
    assert drafter.poll_outcome() is None
    assert not drafter.closed
