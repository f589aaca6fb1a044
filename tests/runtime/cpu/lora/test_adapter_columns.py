"""A batch has the adapter column exactly if one of its rows has an adapter, which the host checks."""

import pytest

from tests.runtime.lora_world import lora_world
from tests.runtime.models import engine_config, new_engine
from tests.runtime.round.test_features import passes_of
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.lora.stacked_adapters import AdapterRows


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
def test_a_column_is_there_where_a_row_needs_it():
    loaded = lora_world().loaded
    assert all(not batch.columns for batch in passes_of(new_engine(loaded, engine_config())))
    adapted = passes_of(new_engine(loaded, engine_config()), variant=lora_world().adapters[1])
    assert all(isinstance(batch.columns[AdapterRows], AdapterRows) for batch in adapted)
    assert loaded.parts["adapters"].rows is None, "outside of a pass"
