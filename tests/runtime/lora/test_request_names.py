"""Adapters of an engine's requests, by the names in metrics."""

from types import SimpleNamespace

from wingbeat.runtime.lora.places import AdapterPlaces
from wingbeat.runtime.scheduling.request import Variant


class Places(AdapterPlaces):
    """Room for adapters of no model."""

    def rows_of(self, ids, on_host):
        raise AssertionError("there is no pass")

    def put(self, adapter_id, path, adapter):
        """Nothing is written."""

    def clear(self, adapter_id):
        """Nothing is there."""


def test_adapters_of_requests_are_told_by_name():
    def seq(name):
        adapter = None if name is None else Variant(name, "folder", name)
        return SimpleNamespace(request=SimpleNamespace(variant=adapter))

    assert Places(8, 16).requests([seq("b"), seq("a"), seq(None), seq("b")], [seq("c")]) == {
        "max_lora": "8",
        "waiting_lora_adapters": "c",
        "running_lora_adapters": "a,b",
    }
