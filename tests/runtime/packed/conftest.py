"""Weights of a CPU's models are held as a GPU holds them, and multiplied by the references of its kernels."""

import pytest

from wingbeat.runtime.fused.layers import LayerOps
from wingbeat.runtime.packed import modules
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.quantised import packed_loading


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """No other part holds weights, and layers are those of `LayerOps`."""

    def first_of_all(name, *given):
        return getattr(modules, name)(*given) if name in ("pack_weight", "pack_experts") else first_result(name, *given)

    ops = LayerOps()
    monkeypatch.setattr(modules, "DEVICES", {"cpu"})
    monkeypatch.setattr(packed_loading, "first_result", first_of_all)
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": ops})
