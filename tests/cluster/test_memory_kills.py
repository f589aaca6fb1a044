"""Processes that the kernel kills for want of memory."""

from pathlib import Path

import pytest

from wingbeat.cluster import memory_kills
from wingbeat.cluster.memory_kills import MemoryKills


def test_kills_since_then_are_told_with_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 12\noom_kill 3\n")
    monkeypatch.setattr(memory_kills, "VMSTAT", vmstat)
    kills = MemoryKills()
    assert kills.explain() == ""
    vmstat.write_text("pgfault 14\noom_kill 5\n")
    assert "killed 2 processes" in kills.explain()
    assert "kv_cache_memory_bytes" in kills.explain()
    vmstat.unlink()
    assert MemoryKills().explain() == ""
