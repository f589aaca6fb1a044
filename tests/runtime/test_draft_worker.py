"""One drafter serving several verifiers drafts for each as if it were alone."""

from dataclasses import replace

import pytest
import torch
from models import CHAIN, TREE, Run, eagle_drafter, engine_config, greedy_params, random_model, reference
from scripted import ScriptedDrafter, right_tree

from wingbeat.cluster.channel import InProcessChannel
from wingbeat.runtime.draft_worker import DraftWorker
from wingbeat.runtime.engine import Engine
from wingbeat.runtime.model_loader import prepare_model

LENGTH = 40


class RecordingEnd:
    """A verifier's end that keeps a copy of every tree it gets."""

    def __init__(self, end):
        self._end = end
        self.trees = []

    def __getattr__(self, name):
        return getattr(self._end, name)

    def acquire_outcome(self, timeout_s):
        self._outcome = self._end.acquire_outcome(timeout_s)
        return self._outcome

    def wait_reply(self, round_number, timeout_s):
        slots = self._outcome.proposal_slots[: int(self._outcome.header[3])].clone()
        reply = self._end.wait_reply(round_number, timeout_s)
        self.trees.append([field[slots].tolist() for field in (reply.token_ids, reply.parents, reply.num_valid)])
        return reply


class Verifier:
    """An engine, its channel and its requests."""

    def __init__(self, loaded, config, worker, name, prompts):
        self.engine = Engine(loaded, config, worker.drafter.tap_layers)
        self.channel = InProcessChannel(self.engine.channel_spec)
        worker.attach(name, self.channel.drafter_end)
        self.channel.pump = worker.run_once
        self.end = RecordingEnd(self.channel.verifier_end)
        self.engine.attach_drafter(self.end)
        self.run = Run(self.engine, prompts, greedy_params(LENGTH))

    def close(self):
        self.engine.check_integrity()
        self.engine.model.remove_taps()


def alone(ref, config, prompts):
    one = Verifier(ref.loaded, config, DraftWorker(eagle_drafter(ref.loaded, config.speculation)), "a", prompts)
    one.run.finish()
    one.close()
    return one


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_two_verifiers_share_a_drafter(speculation):
    ref = reference("llama")
    configs = [engine_config(speculation, max_num_seqs=4), engine_config(speculation, num_kv_blocks=120)]
    prompts = [ref.prompts[:4], ref.prompts[3:]]
    solo = [alone(ref, config, mine) for config, mine in zip(configs, prompts, strict=True)]
    worker = DraftWorker(eagle_drafter(ref.loaded, speculation))
    # The taps are hooks on the model, so each verifier has its own.
    models = [ref.loaded, prepare_model(random_model("llama"), "llama")]
    both = [Verifier(*each) for each in zip(models, configs, [worker] * 2, "ab", prompts, strict=True)]
    while any(one.engine.has_unfinished_requests() for one in both):
        for one in both:
            if one.engine.has_unfinished_requests():
                one.run.step()
    for one, single, mine in zip(both, solo, prompts, strict=True):
        expected = [ref.continuations[ref.prompts.index(prompt)][:LENGTH] for prompt in mine]
        assert one.run.tokens == single.run.tokens == expected
        assert one.end.trees == single.end.trees
        assert one.engine.speculation == single.engine.speculation
        one.close()


def told(ref):
    return ScriptedDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)


def test_a_place_is_free_once_its_verifier_has_left():
    ref = reference("llama")
    worker = DraftWorker(told(ref))
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
    worker = DraftWorker(drafter)
    engine = Engine(ref.loaded, engine_config(TREE), drafter.tap_layers)
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


def test_rounds_without_proposals_are_answered():
    """The answer frees the round's buffers, also where nobody asks for a tree."""
    ref = reference("llama")
    worker = DraftWorker(told(ref))
    engine = Engine(ref.loaded, engine_config(max_num_batched_tokens=4), ())
    channel = InProcessChannel(engine.channel_spec)
    worker.attach("a", channel.drafter_end)
    channel.pump = worker.run_once
    engine.attach_drafter(channel.verifier_end)
    run = Run(engine, [ref.prompts[4]], greedy_params(8))
    assert run.finish() == [ref.continuations[4][:8]]
    assert engine.drafter_state == "attached"
    assert torch.equal(channel.verifier_end.token_ids[0, :64], torch.tensor(ref.prompts[4]))
