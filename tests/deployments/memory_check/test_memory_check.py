"""Numbers that no machine holds end in one line before a start."""

from typing import get_args

import pytest

from tests.optional import is_gone
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.memory_check.check import check_memory
from wingbeat.runtime.drafters.choice import FALLBACK
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


def refusal(name: str) -> str | None:
    """The error for an absurdly large value of a setting, or None if the value is accepted."""
    try:
        config = AppConfig.model_validate({name: 10**15})
        check_memory(config, ConfigFile.read(config.model_dir()))
    except ValueError as error:
        return str(error)
    return None


def test_a_number_of_any_setting_is_bounded_or_a_quota(monkeypatch: pytest.MonkeyPatch):
    """Huge values are refused by name before memory runs out, except quotas of the disk or of concurrent requests."""
    quotas = {"recording_max_bytes", "max_queued_requests", "max_ongoing_requests"}
    ram = {"kv_cache_memory_bytes", "max_answer_bytes", "max_body_bytes", "max_media_memory_bytes"}
    ram = {name for name in ram if not is_gone(name)}
    monkeypatch.setattr("wingbeat.deployments.memory_check.check.free_memory", lambda: 2**33)
    monkeypatch.setattr("wingbeat.deployments.memory_check.check.total_memory", lambda: 2**34)
    unbounded = set()
    for name, field in AppConfig.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        if not {int, float} & set(kinds):
            continue
        said = refusal(name)
        if said is None:
            unbounded.add(name)
        else:
            assert name in said or name.startswith("num_gpus"), said
            ram -= {name} if "this machine has 17179869184 bytes of memory" in said else set()
    assert unbounded - quotas == {"num_cpus_per_verifier"}
    assert not ram


def test_more_sequences_than_the_memory_has_tables_for_are_refused():
    config = AppConfig(max_num_seqs=2**20, max_model_len=2**20, drafter=FALLBACK.kind)
    with pytest.raises(ValueError, match="max_num_seqs is 1048576: the tables of that many sequences of"):
        check_memory(config, ConfigFile.read(config.model_dir()))
