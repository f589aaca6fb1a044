"""Adapters in their places: the least recently used one makes room, and none that is in use."""

import random

import pytest

from tests.runtime.lora_world import num_resident
from wingbeat.runtime.lora.adapter import AdapterError
from wingbeat.runtime.lora.resident import ResidentAdapters
from wingbeat.runtime.scheduling.request import Variant


class Places:
    """Places of adapters and their contents."""

    def __init__(self, count: int) -> None:
        self.held: dict[int, str] = {}
        self.damaged: set[str] = set()
        self.num_loads = 0
        self.resident = ResidentAdapters(count, self.load, self.clear)

    def load(self, adapter: Variant, adapter_id: int) -> None:
        assert adapter_id not in self.held
        self.num_loads += 1
        self.held[adapter_id] = adapter.digest
        if adapter.digest in self.damaged:
            raise AdapterError(f"{adapter.name} is damaged")

    def clear(self, adapter_id: int) -> None:
        self.held.pop(adapter_id, None)


def named(digest: str) -> Variant:
    return Variant(f"name of {digest}", f"/adapters/{digest}", digest)


def test_the_least_recently_used_adapter_makes_room():
    places = Places(2)
    for digest in ("a", "b", "a", "c"):
        places.resident.acquire(named(digest))
        places.resident.release(named(digest))
    assert set(places.held.values()) == {"a", "c"}
    assert places.num_loads == 3


def test_an_adapter_in_use_stays_and_others_wait():
    places = Places(1)
    assert places.resident.acquire(named("a")) == 1
    assert places.resident.acquire(named("b")) is None
    assert [places.resident.has_place(named(digest)) for digest in "ab"] == [True, False]
    assert places.resident.acquire(named("a")) == 1
    places.resident.release(named("a"))
    assert places.resident.acquire(named("b")) is None
    places.resident.release(named("a"))
    assert places.resident.has_place(named("b"))
    assert places.resident.acquire(named("b")) == 1


def test_an_unloaded_adapter_leaves_with_its_last_user():
    places = Places(2)
    for _ in range(2):
        places.resident.acquire(named("a"))
    places.resident.unload("a")
    places.resident.release(named("a"))
    assert list(places.held.values()) == ["a"]
    places.resident.release(named("a"))
    assert not places.held
    places.resident.unload("a")


def test_an_adapter_that_is_loaded_again_meanwhile_stays():
    places = Places(2)
    places.resident.acquire(named("a"))
    places.resident.unload("a")
    places.resident.warm(named("a"))
    places.resident.release(named("a"))
    assert list(places.held.values()) == ["a"]


def test_files_that_cannot_be_read_cost_no_place():
    places = Places(1)
    places.damaged.add("bad")
    with pytest.raises(AdapterError, match="damaged"):
        places.resident.acquire(named("bad"))
    assert places.resident.acquire(named("a")) == 1
    assert num_resident(places.resident) == 1


def test_random_lives_never_share_a_place_or_lose_one():
    rng, places, users = random.Random(3), Places(3), []
    for _ in range(2000):
        digest = rng.choice("abcdef")
        match rng.randrange(4):
            case 0 | 1 if (place := places.resident.acquire(named(digest))) is not None:
                users.append((digest, place))
            case 2 if users:
                places.resident.release(named(users.pop(rng.randrange(len(users)))[0]))
            case 3 if rng.random() < 0.2:
                places.resident.unload(digest)
        assert all(places.held[place] == held for held, place in users)
        assert len(places.held) == num_resident(places.resident) <= 3
    for digest, _ in users:
        places.resident.release(named(digest))
    for digest in "abcdef":
        places.resident.unload(digest)
    assert num_resident(places.resident) == 0
    assert [places.resident.acquire(named(digest)) is None for digest in "abcd"] == [False] * 3 + [True]
