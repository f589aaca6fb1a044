"""A round's expected time, by the bytes that it reads, beside the measured one."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from wingbeat.deployments.doctor import rounds
from wingbeat.deployments.doctor.options import DoctorConfig
from wingbeat.deployments.doctor.rounds import CopyRate, RoundEstimate, bytes_of_a_round, copy_rate, round_estimate
from wingbeat.deployments.local.engine import open_engine

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def num_weights(model) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_an_input_embedding_is_read_where_it_is_the_output_matrix_too(tied):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    embedding = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert bytes_of_a_round(model) == 4 * (num_weights(model) - (0 if tied else embedding))


def test_a_token_reads_the_experts_that_it_is_sent_to():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=True))
    of_experts = sum(one.numel() for name, one in model.named_parameters() if ".experts" in name)
    assert of_experts == 2 * 8 * 3 * 12 * SHAPE["hidden_size"]
    assert bytes_of_a_round(model) == 4 * (num_weights(model) - of_experts * 3 // 4)


def test_a_copy_has_a_rate():
    assert 1e7 < copy_rate(torch.device("cpu"), 4 << 20) < 1e13


def test_the_demos_rounds_are_estimated_and_measured():
    llm = open_engine(DoctorConfig(device="cpu", dtype="float32", threads=1, drafter="none"), 1)
    found = round_estimate(llm)
    assert [rate.device for rate in found.rates] == ["cpu"]
    held, embedding = llm.engine.loaded.weights_bytes, llm.engine.model.model.get_input_embeddings().weight.nbytes
    assert held - embedding <= found.num_bytes + 4096 <= held + 4096, (
        "the embedding may be packed as output matrix alone"
    )
    assert 0 < found.measured_s < 5
    assert found.sentence().startswith("a plain round reads ")


def test_each_card_has_its_own_line(monkeypatch):
    rates = {"cuda:1": 3e12, "cuda:0": 1e12}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rounds, "copy_rate", lambda device, num_bytes: rates[str(device)])
    monkeypatch.setattr(rounds, "bytes_of_a_round", lambda model: 15e9)
    monkeypatch.setattr(rounds, "plain_round_s", lambda llm: 6.4e-3)
    loaded = SimpleNamespace(model=None, device=torch.device("cuda", 1))
    found = round_estimate(SimpleNamespace(engine=SimpleNamespace(loaded=loaded)))
    assert found == RoundEstimate(15e9, (CopyRate("cuda:1", 3e12), CopyRate("cuda:0", 1e12)), 6.4e-3)
    assert found.sentence() == (
        "a plain round reads 15,000 MB: 5 ms at cuda:1's copy rate of 3,000 GB/s, measured 6.4 ms (1.28 of it); "
        "cuda:0 15 ms at 1,000 GB/s"
    )
