"""Models that cannot be divided among ranks are refused from their configuration, in one line."""

import pytest
from transformers import GPT2Config

from tests.runtime.models import CONFIGS
from wingbeat.runtime.tensor_parallel.divisible import check_divisible
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config


def check(config, folder, size=2):
    config.architectures = ["X"]
    config.save_pretrained(folder)
    file = ConfigFile.read(folder)
    check_divisible(file, load_config(file), size)


def llama(**fields):
    return type(CONFIGS["llama"])(**(CONFIGS["llama"].to_dict() | {"vocab_size": 96} | fields))


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (llama(vocab_size=97), 2, "must divide vocab_size of X, which is 97"),
        (llama(), 4, "tensor_parallel_size is 4: it must divide num_key_value_heads of X, which is 2"),
        (llama(intermediate_size=97), 2, "must divide intermediate_size of X, which is 97"),
        (llama(quantization_config={"quant_method": "fp8"}), 2, "tensor_parallel_size is 2 and X is quantised"),
        (GPT2Config(vocab_size=96), 2, "transformers has no tensor parallel plan for X"),
    ],
    ids=["vocabulary", "kv-heads", "mlp", "quantised", "no-plan"],
)
def test_what_cannot_be_divided_is_named(config, size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check(config, tmp_path, size)


def test_what_can_be_divided_passes(tmp_path):
    check(llama(), tmp_path)
