"""The process of a shared drafter: verifiers that come, go, do not fit, and find another place; and its settings."""

from collections.abc import Iterator

import pytest
import torch

from tests.deployments.replica.drafters.test_drafter_thread import PATIENCE_S, Verifier, build_worker
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.shared_drafters.shared_calls import SharedDrafterCalls, room_of

CONFIG = AppConfig(
    drafter_factory=f"{build_worker.__module__}:build_worker", max_num_seqs=4, drafters={"num": 1, "max_num_seqs": 8}
)


@pytest.fixture
def verifiers() -> Iterator[list[Verifier]]:
    made = [Verifier(name) for name in "abc"]
    yield made
    for one in made:
        one.end.close()


def test_verifiers_come_and_go_while_others_are_drafted_for(verifiers: list[Verifier]):
    calls, (a, b, c) = SharedDrafterCalls(CONFIG, None, None), verifiers
    for one in (a, b):
        assert calls.attach_shared(one.name, 1, None).refusal is None
        assert one.drafted() == [6, 7, 5]
    assert "runs 4 sequences, and 0 slots are left" in calls.attach_shared(c.name, 1, None).refusal
    assert not c.end.peer_alive(), "who is refused knows that it has no drafter"
    calls.detach(a.name)
    assert not a.end.peer_alive()
    assert calls.attach_shared(c.name, 2, None).refusal is None
    assert [one.drafted() for one in (b, c)] == [[6, 7, 5]] * 2
    channels, silent_s = calls.status()
    assert channels == (b.name, c.name)
    assert silent_s < PATIENCE_S
    calls.release_newest()
    assert calls.status()[0] == (b.name,)


def test_a_shared_drafter_has_room_by_its_settings_and_else_by_the_machine():
    cpu = torch.device("cpu")
    given = room_of(AppConfig(drafters={"num": 1, "max_num_seqs": 20, "kv_cache_memory_bytes": 5000}), cpu)
    assert (given.num_slots, given.num_bytes) == (20, 5000)
    one, two = (room_of(AppConfig(drafters={"num": num}), cpu) for num in (1, 2))
    assert one.num_slots == two.num_slots == 8 * AppConfig().most_num_seqs()
    assert 0 < two.num_bytes < 0.75 * one.num_bytes


def test_shared_drafters_come_as_a_mapping_or_as_json_and_leave_each_verifier_without_its_own():
    config = AppConfig(drafters='{"num": 2}')
    assert config == AppConfig(drafters={"num": 2})
    assert (config.has_drafter(), config.has_own_drafter(), config.shares_core()) == (True, False, False)
    assert config.drafters.slots(config.most_num_seqs()) == 8 * 16
    assert AppConfig(drafters="none").has_own_drafter()


def test_a_shared_drafter_takes_nothing_of_a_verifiers_gpu():
    shares = {"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}
    assert AppConfig(**shares).engine_config().drafter_beside
    shared = AppConfig(**shares, drafters={"num": 1}).engine_config()
    assert (shared.gpu_share, shared.drafter_beside) == (0.7, False)
