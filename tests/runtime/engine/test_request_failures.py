"""A request that raises ends alone: the others write their usual texts, and no block or slot is lost."""

import pytest

from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, new_engine
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.llm import connect
from wingbeat.runtime.scheduling.request import FinishReason, Request, SamplingParams
from wingbeat.runtime.scheduling.suspects import MAX_UNEXPLAINED

BAD = 2
"""Index of the prompt that raises."""
COUNT = 40


@pytest.fixture
def engine(ref, request):
    made = new_engine(ref.loaded, engine_config(overlap=request.param), eagle_drafter(ref.loaded, TREE))
    yield made
    made.model.remove_taps()


both = pytest.mark.parametrize("engine", [False, True], ids=["in step", "overlap"], indirect=True)


def is_bad(seq) -> bool:
    return seq.request.request_id == str(BAD)


def fails_in(engine, place: str, after: int = 0) -> None:
    """Make one place of the round raise for the bad request, once that request has this many tokens."""

    def due(seq) -> bool:
        return is_bad(seq) and seq.num_output_tokens >= after

    def attached() -> bool:
        return engine.drafter_state == "attached"

    owner, name, seqs_of = {
        "admission": (engine.drafting, "admit", lambda seq: [seq]),
        "blocks": (engine.scheduler, "_admit", lambda seq: [seq]),
        "emission": (engine.scheduler, "_emit", lambda seq, token_ids: [seq]),
        "slots": (engine.slots, "load", lambda plan: plan.admitted),
        "forward": (engine.runner, "launch", lambda plan, *rest: [*plan.decodes, *(c.seq for c in plan.chunks)]),
        "publish": (engine.drafting, "publish", lambda plan, *rest: plan.decodes if attached() else []),
        "settle": (engine.drafting, "settled", lambda flight, result: flight.plan.decodes),
    }[place]
    whole = getattr(owner, name)

    def fragile(*args):
        if any(due(seq) for seq in seqs_of(*args)):
            raise OverflowError("unlucky")
        return whole(*args)

    setattr(owner, name, fragile)


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    ("place", "after"),
    [
        ("admission", 0),
        ("blocks", 0),
        ("emission", 0),
        ("emission", 9),
        ("slots", 0),
        ("forward", 0),
        ("forward", 9),
        ("settle", 9),
    ],
)
def test_what_raises_for_one_request_ends_that_one_and_no_other(ref, engine, place, after):
    fails_in(engine, place, after)
    run = Run(engine, ref.prompts, greedy_params(COUNT))
    got = run.finish()
    assert run.last[BAD].finish_reason is FinishReason.ABORT
    assert "OverflowError: unlucky" in run.last[BAD].failure
    for index, tokens in enumerate(ref.continuations):
        if index != BAD:
            assert (got[index], run.last[index].failure) == (tokens[:COUNT], None)
    assert len(got[BAD]) <= after + engine.config.speculation.max_path
    assert got[BAD] == ref.continuations[BAD][: len(got[BAD])]
    assert Run(engine, ref.prompts[:1], greedy_params(5)).finish() == [ref.continuations[0][:5]]


@pytest.mark.slow
@both
def test_what_raises_only_where_there_is_a_drafter_costs_the_drafter_and_no_request(ref, engine):
    fails_in(engine, "publish", 1)
    run = Run(engine, ref.prompts, greedy_params(COUNT))
    assert run.finish() == [tokens[:COUNT] for tokens in ref.continuations]
    assert engine.drafter_state == "lost"


@pytest.mark.few(1)
@both
def test_rounds_that_keep_raising_with_every_drafter_never_end_the_engine(ref, engine):
    whole = engine.drafting.publish

    def fragile(plan, *rest):
        if engine.drafter_state == "attached" and len(plan.decodes) > 1:
            raise OverflowError("unlucky")
        return whole(plan, *rest)

    engine.drafting.publish = fragile
    run = Run(engine, ref.prompts, greedy_params(COUNT))
    num_drafters = 1
    while engine.has_unfinished_requests():
        run.step()
        if engine.drafter_state == "lost" and len(engine.scheduler.running) > 1:
            connect(engine, eagle_drafter(ref.loaded, TREE), InProcessChannel)
            num_drafters += 1
    assert num_drafters > MAX_UNEXPLAINED + 1
    assert run.tokens == [tokens[:COUNT] for tokens in ref.continuations]


@both
def test_two_requests_that_raise_are_both_found(ref, engine):
    fails_in(engine, "forward", 5)
    whole = engine.runner.launch

    def fragile(plan, *rest):
        if any(seq.request.request_id == "0" and seq.num_output_tokens >= 12 for seq in plan.decodes):
            raise MemoryError
        return whole(plan, *rest)

    engine.runner.launch = fragile
    run = Run(engine, ref.prompts, greedy_params(COUNT))
    got = run.finish()
    assert {index for index, last in run.last.items() if last.failure} == {0, BAD}
    assert all(got[i] == ref.continuations[i][:COUNT] for i in range(len(got)) if i not in (0, BAD))


@both
def test_an_engine_whose_own_probe_raises_is_broken_and_names_whom_it_had(ref, engine):
    run = Run(engine, ref.prompts[:3], greedy_params(COUNT))
    while not all(run.tokens):
        run.step()
    engine.add_request(Request("3", tuple(ref.prompts[3]), greedy_params(COUNT)))

    def broken(*args):
        raise RuntimeError("no device")

    engine.runner.launch = broken
    for number in range(4, 12):
        engine.add_request(Request(str(number), tuple(ref.prompts[0]), greedy_params(COUNT)))
    with pytest.raises(RoundFailed, match="no device") as raised:
        run.step()
    suspects, queued = set(raised.value.suspects), set(raised.value.queued)
    assert "3" in suspects
    assert suspects.isdisjoint({"0", "1", "2"})
    assert queued
    assert suspects | queued == {str(number) for number in range(3, 12)}


def test_rounds_that_keep_raising_though_each_request_passes_alone_break_the_engine(ref):
    engine = new_engine(ref.loaded, engine_config(), None)
    whole = engine.runner.launch

    def fragile(plan, *rest):
        if len(plan.decodes) > 2:
            raise RuntimeError("too much")
        return whole(plan, *rest)

    engine.runner.launch = fragile
    run = Run(engine, ref.prompts[:4], greedy_params(200))
    with pytest.raises(RoundFailed, match="too much"):
        run.finish()
    assert all(tokens == ref.continuations[i][: len(tokens)] for i, tokens in enumerate(run.tokens))
    engine.model.remove_taps()


@pytest.mark.parametrize("prompt", [("1",), (1.5,), (2**70,), (None,), (-1,), (10**6,)])
def test_a_prompt_of_anything_but_token_ids_is_refused(ref, prompt):
    engine = new_engine(ref.loaded, engine_config(), None)
    with pytest.raises(ValueError, match=r"^prompt holds"):
        engine.add_request(Request("r", prompt, SamplingParams()))
    engine.model.remove_taps()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**63),
        ("top_k", 1.5),
        ("max_tokens", 2**31),
        ("seed", 2**63),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("min_p", "0.5"),
    ],
)
def test_parameters_that_fit_no_tensor_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is"):
        SamplingParams(**{field: value})
