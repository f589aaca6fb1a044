"""A round that raises leaves nothing behind for the next round, or for the next sequence in its slot."""

import threading

import pytest

from tests.needs import needs
from tests.runtime.models import Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.graphs.graph_runner import GraphRunner
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import FinishReason

COUNT = 12
UNUSED = ((90, 91),)
"""Bad words that occur in no text here: the sequence's rounds have masks, which forbid nothing that is written."""


@pytest.fixture
def engines():
    made = []

    def make(loaded, graph_device=None, **limits):
        config = engine_config(max_num_seqs=2, **limits)
        if graph_device is None:
            made.append(new_engine(loaded, config, None))
        else:
            made.append(build_engine(loaded, config, None, InProcessChannel, graph_device))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()


def raises_once(monkeypatch, owner, name, after: bool):
    """Make a method raise at its next call, before or after its work."""
    whole, left = getattr(owner, name), [None]

    def fragile(*args, **kwargs):
        if left and not after:
            left.pop()
            raise OverflowError("unlucky")
        result = whole(*args, **kwargs)
        if left:
            left.pop()
            raise OverflowError("unlucky")
        return result

    monkeypatch.setattr(owner, name, fragile)


def fails_alone(engine, prompt, params):
    """Check that one request ends by the exception and that the engine goes on."""
    run = Run(engine, [prompt], params)
    run.finish()
    assert run.last[0].finish_reason is FinishReason.ABORT
    assert "OverflowError: unlucky" in run.last[0].failure


@needs("masks")
def test_masks_that_are_late_are_waited_for_where_the_forward_pass_raises(engines, monkeypatch):
    ref, release = reference("llama"), threading.Event()
    engine = engines(ref.loaded)
    late = Run(engine, ref.prompts[:1], greedy_params(COUNT, bad_words=UNUSED))

    def fill(token_ids, parents, masks):
        release.wait(0.2)
        masks[:] = 0
        masks[:, 0] = 1 << 7  # allow token 7 only
        return True

    engine.scheduler.waiting[0].masker.fill = fill
    raises_once(monkeypatch, engine.runner.eager, "forward", after=False)
    late.finish()
    assert "OverflowError: unlucky" in late.last[0].failure
    release.set()
    engine.runner.masks._thread.submit(lambda: None).result()
    run = Run(engine, ref.prompts[:2], [greedy_params(COUNT), greedy_params(COUNT, bad_words=UNUSED)])
    assert run.finish() == [tokens[:COUNT] for tokens in ref.continuations[:2]]


def test_logits_altered_for_a_request_whose_admission_raised_are_not_the_next_ones(engines, monkeypatch):
    ref = reference("llama")
    engine = engines(ref.loaded)
    raises_once(monkeypatch, engine.slots.processors, "_write_bias", after=True)
    fails_alone(engine, ref.prompts[0], greedy_params(COUNT, logit_bias=((7, 99.0),)))
    params = [greedy_params(COUNT), greedy_params(COUNT, logit_bias=((ref.continuations[1][0], 0.0),))]
    assert Run(engine, ref.prompts[:2], params).finish() == [tokens[:COUNT] for tokens in ref.continuations[:2]]


def test_inputs_of_a_graph_that_raised_before_they_were_written_are_written_again(engines, monkeypatch):
    loaded = reference("llama").loaded
    params = greedy_params(COUNT, speculation=False)
    expected = Run(engines(loaded), [[5]], params).finish()
    engine = engines(loaded, RecordingDevice())
    raises_once(monkeypatch, GraphRunner, "run", after=False)
    fails_alone(engine, [5], params)
    assert Run(engine, [[5]], params).finish() == expected
