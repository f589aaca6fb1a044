"""Images in the scheduler: chunks end before those that must stay whole, and blocks are hashed by their content."""

import numpy as np
import pytest

from wingbeat.cluster.routing import PromptBlocks
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.block_hashes import hash_block, salted_root
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.scheduling.plan import Chunk
from wingbeat.runtime.scheduling.prompt_spans import prefix_ids
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import Scheduler
from wingbeat.runtime.scheduling.sequence import Sequence


def image(start, length, value=0.0, whole=False):
    return MediaInput.of(start, length, {"pixel_values": np.full(3, value)}, whole=whole)


def seq(num_tokens, *images, computed=0):
    made = Sequence(Request("a", tuple(range(num_tokens)), SamplingParams(), spans=images))
    made.num_computed = computed
    return made


@pytest.mark.parametrize(
    ("computed", "budget", "length"),
    [(0, 5, 5), (0, 9, 6), (0, 6, 6), (0, 16, 16), (0, 15, 6), (6, 9, 0), (6, 10, 10), (6, 14, 14), (8, 40, 22)],
)
def test_a_chunk_ends_before_an_image_that_it_cannot_hold(computed, budget, length):
    chunk = Chunk.next_of(seq(30, image(6, 10, whole=True), computed=computed), budget)
    assert chunk.length == length
    assert chunk.samples == (computed + length == 30)
    assert Chunk.next_of(seq(30, image(6, 10), computed=computed), budget).length == min(budget, 30 - computed)


def test_an_image_waits_for_a_round_that_has_room_for_it():
    config = EngineConfig(max_num_seqs=3, max_model_len=64, max_num_batched_tokens=12, num_kv_blocks=40, block_size=4)
    scheduler = Scheduler(config, BlockManager(40, 4), frozenset())
    for name, num_tokens, images in (("a", 9, ()), ("b", 14, (image(0, 10, whole=True),)), ("c", 3, ())):
        scheduler.add(Request(name, tuple(range(num_tokens)), SamplingParams(), spans=images))
    rounds = []
    for _ in range(3):
        plan = scheduler.schedule()
        rounds.append([(chunk.seq.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks])
        scheduler.advance(plan, False)
        scheduler.check_integrity()
    assert rounds[0] == [("a", 0, 9)]
    assert rounds[1] == [("b", 0, 12)]
    assert rounds[2][0] == ("b", 12, 2)


def test_blocks_are_hashed_by_what_an_image_shows_and_as_before_without():
    tokens = list(range(20))
    one, other = image(5, 6, 1.0), image(5, 6, 2.0)
    assert prefix_ids(tokens, ()) == tokens
    assert prefix_ids(tokens, (one,)) == prefix_ids(tokens, (image(5, 6, 1.0),))
    mine, theirs = prefix_ids(tokens, (one,)), prefix_ids(tokens, (other,))
    assert [index for index, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b] == list(range(5, 11))
    assert all(value < 0 for value in mine[5:11])
    assert len(set(mine[5:11])) == 2
    assert mine[:5] + mine[11:] == tokens[:5] + tokens[11:]


def test_a_router_hashes_a_prompt_with_images_as_its_engine_does():
    sequence = seq(20, image(5, 6))
    blocks = PromptBlocks(prefix_ids(sequence.token_ids, sequence.request.spans), 4, "", "")
    expected = salted_root("")
    for index in range(4):
        expected = hash_block(expected, sequence.prefix_ids()[4 * index : 4 * index + 4])
        assert blocks.hash(index) == expected[: len(blocks.hash(index))]


def test_the_digest_is_of_names_types_shapes_and_values():
    arrays = {"pixel_values": np.arange(6, dtype=np.float32).reshape(2, 3)}
    digests = {
        MediaInput.of(0, 1, given).digest
        for given in (
            arrays,
            {"pixel": arrays["pixel_values"]},
            {"pixel_values": arrays["pixel_values"].reshape(3, 2)},
            {"pixel_values": arrays["pixel_values"].astype(np.float64)},
            {"pixel_values": arrays["pixel_values"] + 1},
        )
    }
    assert len(digests) == 5
    assert MediaInput.of(3, 2, {"pixel_values": arrays["pixel_values"].T.copy().T}).digest in digests
