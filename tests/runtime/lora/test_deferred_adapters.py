"""A request waits for its adapter's place."""

from dataclasses import replace

from tests.runtime.scheduling_world import make, names, play, request
from wingbeat.runtime.lora.resident import ResidentAdapters
from wingbeat.runtime.scheduling.request import Variant


def test_a_request_whose_adapter_finds_no_place_is_deferred():
    seats = ResidentAdapters(1, lambda _adapter, _place: None, lambda _place: None)
    scheduler = make(seats=seats)
    for name in "abc":
        adapter = None if name == "c" else Variant(name, f"/adapters/{name}", name)
        scheduler.add(replace(request(name, 3, max_tokens=2), variant=adapter))
    play(scheduler, scheduler.schedule())
    assert names(scheduler.waiting) == ["b", "c"]
    assert scheduler.num_deferred == 1
    while scheduler.waiting:
        play(scheduler, scheduler.schedule())
    assert scheduler.num_deferred == 0
