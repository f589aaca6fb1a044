"""Scheduling without a model: budgets, order, blocks, preemption and the prefix cache, on scripted tokens."""

import random

import pytest

from tests.runtime.scheduling_world import make, names, play, request
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.kv.blocks import IntegrityError
from wingbeat.runtime.scheduling.request import FinishReason


def test_prompts_share_the_budget_in_order_of_arrival():
    scheduler = make()
    for name, length in (("a", 10), ("b", 10), ("c", 3)):
        scheduler.add(request(name, length))
    plan = scheduler.schedule()
    assert [(chunk.seq.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks] == [
        ("a", 0, 10),
        ("b", 0, 6),
    ]
    assert (names(plan.admitted), plan.budget_left) == (["a", "b"], 0)
    play(scheduler, plan)
    plan = scheduler.schedule()
    assert names(plan.decodes) == ["a"]
    assert [(chunk.seq.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks] == [
        ("b", 6, 4),
        ("c", 0, 3),
    ]
    assert plan.budget_left == 9


def test_no_more_sequences_than_slots():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=2))
    plan = scheduler.schedule()
    assert names(plan.admitted) == ["a", "b"]
    assert sorted(seq.slot for seq in plan.admitted) == [0, 1]
    play(scheduler, plan)
    outputs = play(scheduler, scheduler.schedule())
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 2
    assert names(scheduler.schedule().admitted) == ["c"]


def test_a_tree_is_given_up_before_a_sequence_is():
    scheduler = make(num_kv_blocks=22, speculation=SpeculationConfig())
    scheduler.add(request("a", 8, max_tokens=50))
    scheduler.add(request("b", 8, max_tokens=50))
    play(scheduler, scheduler.schedule())
    first, second = scheduler.running
    scheduler.block_manager.allocate(scheduler.block_manager.num_free - 5)
    first.draft.tree_requested = second.draft.tree_requested = True
    plan = scheduler.schedule()
    assert names(plan.decodes) == ["a", "b"]
    assert plan.with_trees() == [True, False]
    assert len(first.blocks) * 4 >= 8 + 16
    assert scheduler.num_preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make(num_kv_blocks=21, enable_prefix_caching=False)
    for name in "abc":
        scheduler.add(request(name, 8, max_tokens=50))
    scheduler.add(request("d", 3))
    while scheduler.waiting or any(seq.num_uncomputed > 1 for seq in scheduler.running):
        play(scheduler, scheduler.schedule())
    tokens = {seq.request.request_id: list(seq.token_ids) for seq in scheduler.running}
    held = scheduler.block_manager.allocate(scheduler.block_manager.num_free)
    while not scheduler.num_preemptions:
        play(scheduler, scheduler.schedule(), held=held)
    assert names(scheduler.waiting)[0] == "d"
    victim = scheduler.waiting[0]
    assert (victim.slot, victim.blocks, victim.num_computed, victim.epoch) == (-1, [], 0, 0)
    assert victim.token_ids[: len(tokens["d"])] == tokens["d"]
    scheduler.block_manager.release(held)
    plan = scheduler.schedule()
    assert names(plan.admitted)[:1] == ["d"]
    assert victim.epoch > max(seq.epoch for seq in scheduler.running if seq is not victim)


def test_of_higher_priority_is_admitted_first_and_preempted_last():
    scheduler = make(num_kv_blocks=21, enable_prefix_caching=False, max_num_seqs=3)
    for name, priority in (("a", 0), ("b", -1), ("c", 2), ("d", 2), ("e", 1)):
        scheduler.add(request(name, 8, max_tokens=50, priority=priority))
    admitted = []
    while len(admitted) < 3:
        plan = scheduler.schedule()
        admitted += names(plan.admitted)
        play(scheduler, plan)
    assert admitted == ["c", "d", "e"]
    while any(seq.num_uncomputed > 1 for seq in scheduler.running):
        play(scheduler, scheduler.schedule())
    held = scheduler.block_manager.allocate(scheduler.block_manager.num_free)
    left = set(admitted)
    for victim in ("e", "d"):  # of one priority the youngest
        while left == set(names(scheduler.running)):
            play(scheduler, scheduler.schedule(), held=held)
        left = set(names(scheduler.running))
        assert victim not in left
    assert left == {"c"}


def test_prefixes_are_shared_by_requests_of_one_salt_alone():
    scheduler = make()
    found = []
    for salt in ("", "x", "x", "", "y"):
        scheduler.add(request("a", 11, max_tokens=1, cache_salt=salt))
        found.append(play(scheduler, scheduler.schedule())[0].num_cached_tokens)
    assert found == [0, 0, 8, 8, 0]


def test_a_cached_prefix_is_not_computed_again():
    scheduler = make()
    scheduler.add(request("a", 11, max_tokens=1))
    outputs = play(scheduler, scheduler.schedule())
    assert (outputs[0].finish_reason, outputs[0].num_cached_tokens) == (FinishReason.LENGTH, 0)
    scheduler.add(request("a", 11, max_tokens=1))
    plan = scheduler.schedule()
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(8, 3)]
    assert play(scheduler, plan)[0].num_cached_tokens == 8


def test_tokens_after_an_end_of_sequence_are_cut_off():
    scheduler = make(eos=(7,))
    scheduler.add(request("a", 3, max_tokens=30))
    scheduler.add(request("b", 3, max_tokens=30, ignore_eos=True))
    play(scheduler, scheduler.schedule(), token=1)
    plan = scheduler.schedule()
    scheduler.advance(plan, with_trees=False)
    outputs = scheduler.update([(seq, [1, 2, 7, 4]) for seq in plan.decodes], [])
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [
        ((1, 2, 7), FinishReason.STOP),
        ((1, 2, 7, 4), None),
    ]
    assert names(scheduler.running) == ["b"]


def test_an_abort_frees_blocks_and_slot_wherever_the_request_is():
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 4))
    play(scheduler, scheduler.schedule())
    assert scheduler.abort("a").request.request_id == "a"
    assert scheduler.abort("a") is None
    assert scheduler.block_manager.num_free == 99
    assert names(scheduler.schedule().admitted) == ["b"]
    assert scheduler.abort("b") is not None
    assert not scheduler.running
    assert not scheduler.waiting


@pytest.mark.parametrize("seed", range(6))
def test_everything_finishes_and_the_books_balance(seed):
    """Random arrivals, tree sizes, aborts and shortage: all requests end at their length and no block is lost."""
    rng = random.Random(seed)
    scheduler = make(num_kv_blocks=24, speculation=SpeculationConfig(verify_tree_size=8), max_num_batched_tokens=9)
    wanted, received, aborted = {}, {}, set()
    for number in range(25):
        name = f"{rng.choice('abc')}{number}"
        wanted[name] = rng.randrange(1, 30)
        scheduler.add(request(name, rng.randrange(1, 30), max_tokens=wanted[name]))
    for _ in range(5000):
        if not (scheduler.running or scheduler.waiting):
            break
        plan = scheduler.schedule()
        assert sum(chunk.length for chunk in plan.chunks) + plan.budget_left == 9
        slots = [seq.slot for seq in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert min(slots, default=0) >= 0
        scheduler.advance(plan, with_trees=True)
        decodes = []
        for seq, with_tree in zip(plan.decodes, plan.with_trees(), strict=True):
            count = rng.randrange(1, 5) if with_tree else 1
            assert len(seq.blocks) * 4 >= len(seq.token_ids) - 1 + (8 if with_tree else 1)
            decodes.append((seq, [rng.randrange(50) for _ in range(count)]))
            seq.draft.tree_requested = rng.random() < 0.7
        chunks = [(chunk, [rng.randrange(50)] if chunk.samples else []) for chunk in plan.chunks]
        for output in scheduler.update(decodes, chunks):
            received[output.request_id] = received.get(output.request_id, 0) + len(output.token_ids)
        if scheduler.running and rng.random() < 0.02:
            name = rng.choice(scheduler.running).request.request_id
            scheduler.abort(name)
            aborted.add(name)
        scheduler.block_manager.check_integrity([seq.blocks for seq in scheduler.running])
    assert not scheduler.running
    assert scheduler.num_preemptions > 0
    assert scheduler.block_manager.num_free == 23
    assert all(received[name] == count for name, count in wanted.items() if name not in aborted)


def test_a_round_in_flight_counts_with_all_it_may_emit():
    scheduler = make(speculation=SpeculationConfig())
    scheduler.add(request("a", 6, max_tokens=50))
    play(scheduler, scheduler.schedule())
    (seq,) = scheduler.running
    seq.draft.tree_requested = True
    scheduler.advance(scheduler.schedule(), with_trees=True)
    assert (seq.min_len, seq.max_len, seq.is_decoding) == (8, 13, True)
    plan = scheduler.schedule()
    assert names(plan.decodes) == ["a"]
    assert len(seq.blocks) * 4 >= seq.max_len - 1 + 16
    scheduler.advance(plan, with_trees=False)
    assert (seq.min_len, seq.max_len) == (9, 14)
    scheduler.update([(seq, [1, 2, 3])], [])
    assert (len(seq.token_ids), seq.min_len, seq.max_len) == (10, 11, 11)


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 64), (50, 11)])
def test_no_round_is_scheduled_past_an_end_that_is_known_ahead(max_tokens, max_model_len):
    scheduler = make(max_model_len=max_model_len)
    scheduler.add(request("a", 8, max_tokens=max_tokens))
    plans = []
    while (plan := scheduler.schedule()).decodes or plan.chunks:
        scheduler.advance(plan, with_trees=False)
        plans.append(plan)
    assert [len(plan.decodes) for plan in plans] == [0, 1, 1]
    for plan in plans:
        outputs = scheduler.update(
            [(seq, [7]) for seq in plan.decodes], [(chunk, [7] if chunk.samples else []) for chunk in plan.chunks]
        )
    assert outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(6))
def test_the_books_balance_one_round_behind(seed):
    """As above, but each round is settled after the next one was launched, as the sequences still there want it."""
    rng = random.Random(seed)
    scheduler = make(
        eos=(49,), num_kv_blocks=24, speculation=SpeculationConfig(verify_tree_size=8), max_num_batched_tokens=9
    )
    wanted, received, ended, aborted = {}, {}, set(), set()
    for number in range(25):
        name = f"{rng.choice('abc')}{number}"
        wanted[name] = rng.randrange(1, 30)
        scheduler.add(request(name, rng.randrange(1, 30), max_tokens=wanted[name]))
    in_flight = []
    for _ in range(5000):
        plan = scheduler.schedule()
        launched = bool(plan.decodes or plan.chunks)
        if launched:
            for seq, with_tree in zip(plan.decodes, plan.with_trees(), strict=True):
                assert len(seq.blocks) * 4 >= seq.max_len - 1 + (8 if with_tree else 1)
                assert seq.max_len < scheduler.config.max_model_len
            paths = [rng.randrange(1, 7) if with_tree else 1 for with_tree in plan.with_trees()]
            scheduler.advance(plan, with_trees=True)
            epochs = [seq.epoch for seq in (*plan.decodes, *(chunk.seq for chunk in plan.chunks))]
            in_flight.append((plan, epochs, paths))
            for seq in plan.decodes:
                seq.draft.tree_requested = rng.random() < 0.7
        while len(in_flight) > launched:
            settled, epochs, paths = in_flight.pop(0)
            live = iter(epochs)
            decodes = [
                (seq, [rng.randrange(50) for _ in range(count)])
                for seq, count in zip(settled.decodes, paths, strict=True)
                if seq.epoch == next(live)
            ]
            chunks = [
                (chunk, [rng.randrange(50)] if chunk.samples else [])
                for chunk in settled.chunks
                if chunk.seq.epoch == next(live)
            ]
            for output in scheduler.update(decodes, chunks):
                assert output.request_id not in ended
                received[output.request_id] = received.get(output.request_id, 0) + len(output.token_ids)
                if output.finish_reason is not None:
                    ended.add(output.request_id)
                assert (output.finish_reason is FinishReason.STOP) == (output.token_ids[-1] == 49)
        if scheduler.running and rng.random() < 0.02:
            name = rng.choice(scheduler.running).request.request_id
            scheduler.abort(name)
            aborted.add(name)
        scheduler.check_integrity()
        if not (scheduler.running or scheduler.waiting or in_flight):
            break
    assert ended | aborted == wanted.keys()
    assert scheduler.num_preemptions > 0
    assert scheduler.block_manager.num_free == 23
    assert all(0 < received[name] <= wanted[name] for name in ended)


def test_a_slot_held_twice_is_noticed():
    scheduler = make()
    scheduler.add(request("a", 3))
    play(scheduler, scheduler.schedule())
    scheduler.check_integrity()
    scheduler.running[0].slot += 1
    with pytest.raises(IntegrityError, match="slots free or held are"):
        scheduler.check_integrity()
