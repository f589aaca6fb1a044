"""A drafter shared by several verifiers: texts, acceptance, limits, and no verifier that waits for another."""

import pytest

from tests.runtime.models import CHAIN, TREE, eagle_drafter, engine_config, random_model, reference
from tests.runtime.scripted import ScriptedDrafter, right_tree
from tests.runtime.shared_drafter import LENGTH, Verifier, alone, run_all
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.protocol.messages import ChannelSpec, RoundHeader
from wingbeat.runtime.shared_drafters.shared_worker import LONG_CHUNKS, MOST_FAILURES, SharedWorker, first_gap
from wingbeat.runtime.verifier.loading.loader import prepare_model

SPEC = ChannelSpec(4, TREE.num_nodes, TREE.max_path, 128, 0, 64, 8, 16, 40, keeps_context=False)


class SpyDrafter(ScriptedDrafter):
    """Records the slots of every pass; raises for passes with one of the slots in `cursed`."""

    def __init__(self, cursed=()):
        super().__init__([], right_tree, 97)
        self.cursed = set(cursed)
        self.passes = []

    def draft(self, batch):
        slots = [*batch.chunk_slots, *batch.decode_slots.tolist(), *batch.proposal_slots.tolist()]
        self.passes.append(sorted(set(slots)))
        if self.cursed & set(slots):
            raise RuntimeError("cursed")


class Asking:
    """A verifier end that only publishes rounds."""

    def __init__(self, worker, name, spec=SPEC):
        self.channel = InProcessChannel(spec)
        worker.attach(name, self.channel.drafter_end)

    def ask(self, chunk=0):
        """Publish a round with a decode in slot 0, or with a prompt chunk of this many tokens in slot 0."""
        outcome = self.channel.verifier_end.acquire_outcome(0)
        RoundHeader(0, int(not chunk), int(chunk > 0)).write(outcome.header)
        outcome.chunk_lens[0] = chunk
        outcome.decode_num_tokens[0] = 1
        self.round = self.channel.verifier_end.publish_outcome()

    @property
    def answered(self):
        return self.channel.verifier_end.wait_reply(self.round, 0) is not None


def models(ref, count):
    """Separate copies of a model, because taps are hooks on the model and each verifier needs its own."""
    return [ref.loaded, *(prepare_model(random_model("llama"), "llama") for _ in range(count - 1))]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [TREE, CHAIN], ids=["tree", "chain"])
def test_three_verifiers_of_other_lengths_write_and_accept_as_with_drafters_of_their_own(speculation):
    ref = reference("llama")
    lens, prompts = (256, 200, 144), [ref.prompts[:2], ref.prompts[2:4], ref.prompts[4:5]]
    configs = [engine_config(speculation, max_num_seqs=3, max_model_len=longest) for longest in lens]
    solo = [alone(ref, config, mine) for config, mine in zip(configs, prompts, strict=True)]
    worker = SharedWorker(DraftWorker(eagle_drafter(ref.loaded, speculation)))
    three = [Verifier(*each) for each in zip(models(ref, 3), configs, [worker] * 3, "abc", prompts, strict=True)]
    run_all(three)
    for one, single, mine in zip(three, solo, prompts, strict=True):
        expected = [ref.continuations[ref.prompts.index(prompt)][:LENGTH] for prompt in mine]
        assert one.run.tokens == expected
        assert one.end.trees == single.end.trees
        assert one.engine.speculation == single.engine.speculation
        one.close()


def test_verifiers_of_a_drafter_that_is_gone_go_on_plainly_and_then_with_another_one():
    ref = reference("llama")
    config, prompts = engine_config(TREE, max_num_seqs=3), [ref.prompts[:2], ref.prompts[3:4]]
    first, second = (SharedWorker(DraftWorker(eagle_drafter(ref.loaded, TREE))) for _ in range(2))
    both = [Verifier(*each) for each in zip(models(ref, 2), [config] * 2, [first] * 2, "ab", prompts, strict=True)]
    for one in (*both, *both, *both):
        one.run.step()
    for name in "ab":
        first.detach(name)
    for one in both:
        one.run.step()
        assert one.engine.drafter_state == "lost"
    for one, name in zip(both, "ab", strict=True):
        one.move_to(second, name)
        one.end.trees.clear()
    run_all(both)
    for one, mine in zip(both, prompts, strict=True):
        assert one.run.tokens == [ref.continuations[ref.prompts.index(prompt)][:LENGTH] for prompt in mine]
        assert any(num_valid > 1 for *_, numbers in one.end.trees for num_valid in numbers)
        one.close()


def test_those_who_wait_at_the_same_time_share_a_pass_and_nobody_waits_for_who_asks_nothing():
    worker = SharedWorker(DraftWorker(SpyDrafter()))
    a, b, c = (Asking(worker, name) for name in "abc")
    a.ask()
    c.ask()
    assert worker.run_once()
    assert worker.drafter.passes == [[0, 8]]
    assert a.answered
    assert c.answered
    b.ask()
    assert worker.run_once()
    assert b.answered
    assert not worker.run_once()


def test_a_long_prompt_of_one_verifier_is_answered_after_the_others_and_not_after_their_next_rounds():
    worker = SharedWorker(DraftWorker(SpyDrafter()))
    a, b = (Asking(worker, name) for name in "ab")
    a.ask(chunk=LONG_CHUNKS + 1)
    b.ask()
    assert worker.run_once()
    assert worker.drafter.passes == [[4], [0]]
    assert a.answered
    assert b.answered
    a.ask(chunk=LONG_CHUNKS)
    b.ask()
    assert worker.run_once()
    assert worker.drafter.passes[2:] == [[0, 4]]


def test_a_verifier_whose_device_is_not_there_yet_keeps_no_other_waiting():
    worker = SharedWorker(DraftWorker(SpyDrafter()))
    slow, quick = (Asking(worker, name) for name in "ab")
    slow.channel.drafter_end.has_outcome = lambda: False
    slow.ask()
    quick.ask()
    assert worker.run_once()
    assert quick.answered
    assert not slow.answered
    worker.detach("b")
    assert worker.run_once(), "alone it is answered as soon as it asks: its pass may be enqueued ahead"
    assert slow.answered


def test_a_round_that_breaks_a_pass_costs_its_own_verifier_alone():
    worker = SharedWorker(DraftWorker(SpyDrafter(cursed=[4])))
    a, b, c = (Asking(worker, name) for name in "abc")
    for one in (a, b, c):
        one.ask()
    assert worker.run_once()
    assert a.answered
    assert c.answered
    assert worker.names == ["a", "c"]
    assert not b.channel.verifier_end.peer_alive(), "it knows at once that it has no drafter"


def test_a_drafter_that_breaks_under_everyone_is_at_its_end():
    worker = SharedWorker(DraftWorker(SpyDrafter(cursed=range(16))))
    for one in [Asking(worker, name) for name in "abcd"[: MOST_FAILURES + 1]]:
        one.ask()
    with pytest.raises(RuntimeError, match="cursed"):
        worker.run_once()


@pytest.mark.parametrize(
    ("taken", "size", "first"), [([], 5, 0), ([(0, 4)], 4, 4), ([(4, 4)], 4, 0), ([(10, 4), (0, 4), (5, 2)], 3, 7)]
)
def test_a_range_goes_into_the_first_gap_that_holds_it(taken, size, first):
    assert first_gap(taken, size) == first
