"""Order of admission, by simulation of the scheduler: no request waits for ever, whatever the others are."""

from tests.runtime.scheduling_world import make, names, play, request
from wingbeat.runtime.scheduling.scheduler import Scheduler

LONG = 50


def rounds_until_admitted(scheduler: Scheduler, name: str, arrivals=lambda number: ()) -> int:
    """Rounds played until this request has its slot; `arrivals` come before each."""
    for number in range(20_000):
        for arrival in arrivals(number):
            scheduler.add(arrival)
        plan = scheduler.schedule()
        if name in names(plan.admitted):
            return number
        play(scheduler, plan)
    raise AssertionError(f"{name} was never admitted")


def test_a_short_request_behind_256_long_ones_waits_for_one_slot_to_come_free():
    scheduler = make(max_num_seqs=16, num_kv_blocks=400)
    for number in range(256):
        scheduler.add(request(f"long {number}", 3, max_tokens=LONG))
    for _ in range(10):
        play(scheduler, scheduler.schedule())
    scheduler.add(request("short", 3, max_tokens=1))
    assert rounds_until_admitted(scheduler, "short") <= LONG


def test_of_many_short_requests_the_last_waits_for_four_slots_each_at_most():
    scheduler = make(max_num_seqs=4)
    for number in range(64):
        scheduler.add(request(f"long {number}", 3, max_tokens=LONG))
    for number in range(8):
        scheduler.add(request(f"short {number}", 3, max_tokens=1))
    order = []
    while scheduler.waiting:
        plan = scheduler.schedule()
        order += names(plan.admitted)
        play(scheduler, plan)
    assert [name for name in order if name.startswith("short")] == [f"short {number}" for number in range(8)]
    assert order.index("short 7") < 8 * 4
    long_ones = [name for name in order if name.startswith("long")]
    assert long_ones == [f"long {number}" for number in range(64)]


def test_a_stream_of_short_requests_does_not_starve_a_long_one():
    scheduler = make(max_num_seqs=1)

    def arrivals(number):
        return [request(f"short {number}", 3, max_tokens=1)]

    for number in range(30):
        scheduler.add(request(f"medium {number}", 3, max_tokens=2))
    scheduler.add(request("long", 20, max_tokens=LONG - 10))
    # In order of arrival it takes 30 slots of two or three rounds each; every third one lets another one pass.
    assert rounds_until_admitted(scheduler, "long", arrivals) <= 40 * 3


def test_a_preempted_sequence_comes_back_before_any_short_one():
    scheduler = make(num_kv_blocks=21, enable_prefix_caching=False)
    for name in "abcd":
        scheduler.add(request(name, 8, max_tokens=LONG))
    while scheduler.waiting or any(seq.num_uncomputed > 1 for seq in scheduler.running):
        play(scheduler, scheduler.schedule())
    held = scheduler.block_manager.allocate(scheduler.block_manager.num_free)
    while not scheduler.num_preemptions:
        play(scheduler, scheduler.schedule(), held=held)
    scheduler.add(request("short", 1, max_tokens=1))
    scheduler.block_manager.release(held)
    assert names(scheduler.schedule().admitted) == ["d"]


def test_requests_of_about_one_length_are_admitted_in_order():
    scheduler = make(max_num_seqs=2)
    for number in range(40):
        scheduler.add(request(f"r{number}", 3, max_tokens=10 - number % 4))
    order = []
    while scheduler.waiting:
        plan = scheduler.schedule()
        order += names(plan.admitted)
        play(scheduler, plan)
    assert order == [f"r{number}" for number in range(40)]
