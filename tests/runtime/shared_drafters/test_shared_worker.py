"""A drafter that serves several verifiers drafts for each as if it were alone."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.draft_world import channel_spec
from tests.runtime.drafters.test_worker import serve_from_meta, serve_on_either_side, told
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import CHAIN, TREE, eagle_drafter, engine_config, random_head, random_model, reference
from tests.runtime.shared_drafter import LENGTH, Verifier, alone, run_all
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.outcome_batch import batch_of
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.protocol.messages import Outcome, RoundHeader, outcome_layout
from wingbeat.runtime.shared_drafters.joined_batch import Attachment, join
from wingbeat.runtime.shared_drafters.shared_worker import SharedWorker
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)
HERE = torch.device("cpu")


def shared(drafter):
    return SharedWorker(DraftWorker(drafter))


def test_a_place_is_free_once_its_verifier_has_left():
    ref = reference("llama")
    worker = shared(told(ref))
    names = iter("abcdef")
    config = engine_config(max_num_seqs=2)
    first, second = (Verifier(ref.loaded, config, worker, next(names), ref.prompts[:2]) for _ in range(2))
    for _ in range(3):
        first.run.step()
        second.run.step()
    first.channel.verifier_end.close()
    second.run.step()
    assert len(worker.ends) == 1
    third = Verifier(ref.loaded, config, worker, next(names), ref.prompts[2:4])
    assert second.run.finish() == [tokens[:LENGTH] for tokens in ref.continuations[:2]]
    assert third.run.finish() == [tokens[:LENGTH] for tokens in ref.continuations[2:4]]
    assert third.engine.speculation.acceptance_length > 5


def test_channels_that_do_not_fit_are_refused_and_forgotten():
    ref = reference("llama")
    drafter = eagle_drafter(ref.loaded, TREE)
    worker = shared(drafter)
    engine = Engine(ref.loaded, engine_config(TREE), drafter.needs)
    engine.model.remove_taps()
    spec = engine.channel_spec
    with pytest.raises(ValueError, match="taps of size 64"):
        worker.attach("a", InProcessChannel(replace(spec, taps_size=64)).drafter_end)
    assert worker.ends == []
    worker.attach("a", InProcessChannel(spec).drafter_end)
    with pytest.raises(ValueError, match="attached already"):
        worker.attach("a", InProcessChannel(spec).drafter_end)
    with pytest.raises(ValueError, match="other than the verifiers"):
        worker.attach("b", InProcessChannel(replace(spec, block_size=8)).drafter_end)
    assert len(worker.ends) == 1
    worker.detach("never seen")
    worker.detach("a")
    assert worker.ends == []
    assert not worker.run_once()


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_graphs_serve_two_verifiers_as_the_cpu_path_does(speculation):
    """Batches that grow and shrink, prompts among decodes, sequences that end; a second verifier moves the buffers."""
    ref = reference("llama")
    configs = [engine_config(speculation, max_num_seqs=3), engine_config(speculation, num_kv_blocks=120)]
    prompts = [ref.prompts[:4], ref.prompts[3:]]
    solo = [alone(ref, config, mine) for config, mine in zip(configs, prompts, strict=True)]
    drafter = EagleDrafter(random_head(ref.loaded), speculation, FakeDevice())
    worker = shared(drafter)
    models = [ref.loaded, prepare_model(random_model("llama"), "llama")]
    both = [Verifier(*each) for each in zip(models, configs, [worker] * 2, "ab", prompts, strict=True)]
    run_all(both)
    for one, single in zip(both, solo, strict=True):
        assert one.run.tokens == single.run.tokens
        assert one.end.trees == single.end.trees
        one.close()
    stats = drafter.graph_stats
    assert stats.replays[Stage.DRAFT_PROPOSAL] > 0
    assert not stats.eager_runs


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_device_channels_are_served_without_reading_the_device(speculation, captured, monkeypatch):
    serve_from_meta(shared, 2, speculation, captured, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("channel_device", ["cuda", "cpu"])
@pytest.mark.parametrize("drafter_device", ["cuda", "cpu"])
def test_a_drafter_serves_channels_on_either_side(channel_device, drafter_device):
    serve_on_either_side(shared, 2, channel_device, drafter_device)


@pytest.mark.parametrize("vocab_size", [97, 0], ids=["says nothing", "cannot say anything"])
def test_verifiers_that_restrict_nothing_share_a_pass_with_those_that_do(vocab_size):
    batches = []
    for index, (size, has_masks, proposals) in enumerate(((97, 1, 2), (vocab_size, 0, 3), (97, 1, 1))):
        spec = replace(channel_spec(TREE, 0), vocab_size=size)
        channel = InProcessChannel(spec)
        outcome = Outcome(*(torch.zeros(shape, dtype=dtype) for shape, dtype in outcome_layout(spec).values()))
        outcome.allowed_tokens[:] = size
        RoundHeader(num_proposals=proposals, has_masks=has_masks).write(outcome.header)
        attachment = Attachment(channel.drafter_end, index * spec.num_slots, index * spec.num_blocks)
        batches.append((attachment, batch_of(channel.drafter_end, outcome, HERE)))
    joined = join(batches, [attachment for attachment, _ in batches])
    assert joined.allowed_tokens.tolist() == [[97] * 4] * 2 + [[-1] * 4] * 3 + [[97] * 4]
