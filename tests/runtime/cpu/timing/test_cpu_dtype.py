"""A checkpoint in bfloat16 is served so where its rounds are shorter, and by the same dtype when it starts again."""

import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    random_model,
    reference,
)
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.cpu.timing import cpu_dtype
from wingbeat.runtime.cpu.timing.cpu_dtype import load_in_faster_dtype
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.verifier.loading.loader import load_model, prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

EXACT, ROUNDED = torch.float32, torch.bfloat16


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_dtype, "has_bfloat16_units", lambda: True)
    random_model("llama").to(ROUNDED).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rounds_take(monkeypatch, exact, rounded):
    taken = {EXACT: exact, ROUNDED: rounded}
    monkeypatch.setattr(cpu_dtype, "least_seconds", lambda ways: {way: taken[way] for way in ways})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rounded", "dtype"), [([0.8, 2.0], ROUNDED), ([1.0, 3.9], EXACT), ([5.0, 9.0], EXACT)], ids=["yes", "alike", "no"]
)
def test_bfloat16_is_taken_where_rounds_are_clearly_shorter_and_stays(folder, monkeypatch, rounded, dtype):
    rounds_take(monkeypatch, [1.0, 4.0], rounded)
    assert load_in_faster_dtype(folder, torch.device("cpu")).dtype == dtype
    monkeypatch.setattr(cpu_dtype, "least_seconds", lambda ways: pytest.fail("tried again"))
    assert load_in_faster_dtype(folder, torch.device("cpu")).dtype == dtype


def test_a_model_that_bfloat16_does_not_suit_is_served_in_float32_and_tried_once(folder, monkeypatch):
    tried = []

    def refusing(path, dtype, *options):
        tried.append(dtype)
        if dtype == ROUNDED:
            raise UnsupportedModelError("its text would be wrong")
        return load_model(path, dtype, *options)

    monkeypatch.setattr(cpu_dtype, "load_model", refusing)
    for _ in range(2):
        assert load_in_faster_dtype(folder, torch.device("cpu")).dtype == EXACT
    assert tried == [EXACT, ROUNDED, EXACT]


@pytest.mark.slow
def test_both_are_timed_on_this_machine(folder):
    assert load_in_faster_dtype(folder, torch.device("cpu")).dtype in (EXACT, ROUNDED)


@pytest.mark.slow
def test_only_auto_asks_for_it_and_only_where_the_cpu_has_units(folder, monkeypatch):
    rounds_take(monkeypatch, [1.0, 4.0], [0.5, 2.0])

    def dtype_of(asked, has_units=True):
        monkeypatch.setattr(cpu_dtype, "has_bfloat16_units", lambda: has_units)
        llm = LLM(folder, "none", engine_config(CHAIN), InProcessChannel, dtype=asked, device="cpu")
        assert len(llm.generate([[1, 2, 3]], [greedy_params(4)])[0].token_ids) == 4
        return llm.engine.loaded.dtype

    assert dtype_of("auto") == ROUNDED
    assert dtype_of("auto", has_units=False) == dtype_of(None) == dtype_of("float32") == EXACT


@pytest.mark.slow
def test_a_head_in_float32_drafts_for_a_verifier_in_bfloat16():
    ref = reference("llama")
    loaded = prepare_model(random_model("llama").to(ROUNDED), "llama")
    tokens, engine = generate(
        loaded, engine_config(CHAIN), eagle_drafter(ref.loaded, CHAIN), ref.prompts, greedy_params(16)
    )
    assert {len(written) for written in tokens} == {16}
    assert engine.drafter_state == "attached"
    assert engine.speculation.num_drafts > 0
