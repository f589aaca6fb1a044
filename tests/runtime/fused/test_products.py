"""Products of fused layers: the faster of two ways runs, and both give the layer's numbers."""

import logging

import pytest
import torch

from tests.runtime.models import random_model
from wingbeat.kernels import choice
from wingbeat.runtime.fused import products as module
from wingbeat.runtime.fused.attention import LayerOps
from wingbeat.runtime.fused.products import ROWS, Product, choose_products
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.fixture
def timed(monkeypatch):
    """Milliseconds of ours, by number of rows; the library's take one."""
    times = dict.fromkeys(ROWS, 2.0)
    monkeypatch.setattr(choice, "compiled", lambda name, tensor: module if name == "few_rows_product" else None)
    monkeypatch.setattr(module, "few_rows_product", lambda rows, *given: torch.full((1,), float(len(rows))))
    monkeypatch.setattr(module, "CudaGraphDevice", lambda device: object())

    def measured(step, graphs, repeats):
        made = step()
        return times[int(made)] if made.numel() == 1 else 1.0

    monkeypatch.setattr(module, "replay_ms", measured)
    return times


def products(dtype: torch.dtype) -> list[Product]:
    return [Product(torch.ones(6, 5, dtype=dtype), None) for _ in range(3)]


def test_the_faster_way_runs_by_the_number_of_rows(timed, caplog):
    timed |= {1: 0.9, 8: 0.98, 64: 0.5}
    made = products(torch.bfloat16)
    with caplog.at_level(logging.INFO):
        choose_products({"qkv": made})
    taken = [count for count in range(1, 80) if made[0].takes(count)]
    assert taken == [1, *range(17, 65)], "what saves less than 3 % is left to the library"
    assert all(each.own is made[0].own for each in made)
    assert caplog.messages == ["products for which the few-rows kernel is faster: qkv by 1 rows, qkv by 64 rows"]


def test_a_kernel_that_does_not_compile_is_left_out_and_said(timed, monkeypatch, caplog):
    def refuse(step, graphs, repeats):
        raise RuntimeError("out of shared memory\nat some line")

    monkeypatch.setattr(module, "replay_ms", refuse)
    made = products(torch.float16)
    with caplog.at_level(logging.INFO):
        choose_products({"o": made})
    assert not any(made[0].own)
    assert caplog.messages[0] == "products of o keep using the library: out of shared memory"


def test_float32_is_not_measured(timed):
    timed |= dict.fromkeys(ROWS, 0.1)
    made = products(torch.float32)
    choose_products({"down": made})
    assert not any(made[0].own)


def test_a_model_by_our_products_passes_its_trial(monkeypatch):
    """`prepare_model` refuses a model whose logits are not those of transformers' own decoding."""
    calls = []

    def take_ours(kinds):
        assert list(kinds) == ["qkv", "gate_up", "o", "down"]
        for products in kinds.values():
            for product in products:
                product.own = (True,) * len(ROWS)

    def counted(rows, weight, bias, total, counters, gated, norm, by=module.few_rows_product):
        calls.append((total is not None, gated))
        return by(rows, weight, bias, total, counters, gated, norm)

    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    monkeypatch.setattr("wingbeat.runtime.fused.layers.choose_products", take_ours)
    monkeypatch.setattr(module, "few_rows_product", counted)
    loaded = prepare_model(random_model("llama"), "llama")
    assert len(loaded.decoder_layers[0].products()) == 4
    assert set(calls) == {(False, False), (False, True), (True, False)}
