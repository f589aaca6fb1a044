"""Folder that keeps the compiled kernels of a first start."""

from pathlib import Path

from wingbeat.kernels.disk_cache import cache_dir, compiler_env


def test_compiled_kernels_lie_below_the_cache_folder_unless_the_environment_names_another(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert compiler_env() == {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert cache_dir() == tmp_path
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert compiler_env() == {}
