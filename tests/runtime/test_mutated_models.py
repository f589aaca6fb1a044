"""A verifier's JSON files with one field wrong: refused by one line, or served with the text of generate()."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

from tests.runtime.models import CHAIN, engine_config, generate
from tests.runtime.mutations import Mutation, mutations, some
from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import load_model

PROMPT, NUM_TOKENS, LEAST = [5, 7, 9, 11, 2], 8, 5
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN),
    "llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "gemma2": lambda: Gemma2Config(**SHAPE, sliding_window=16, query_pre_attn_scalar=8),
}
FILES = ("config.json", "generation_config.json")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(root / name)
        # Defaults of the class become fields that can be mutated too.
        edit(root / name, "config.json", rms_norm_eps=1e-6, attention_bias=False)
    return {name: root / name for name in CONFIGS}


def edit(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def write(folder: Path) -> list[list[int]] | None:
    """Our texts, without and with `min_tokens`; None where the checkpoint is refused, by one line."""
    loaded, lines = None, []
    try:
        loaded = load_model(folder, torch.float32, torch.device("cpu"))
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
    if loaded is None:
        assert len(lines) == 1, lines
        return None
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=least) for least in (0, LEAST)]
    return generate(loaded, engine_config(CHAIN, max_model_len=64), None, [PROMPT] * 2, params)[0]


def expected(folder: Path) -> list[list[int]]:
    """Texts by transformers, which reads end tokens from the generation config alone."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=read_config(folder), dtype=torch.float32, attn_implementation="eager"
    )
    eos = model.generation_config.eos_token_id
    texts = []
    for least in (0, LEAST):
        out = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=least or None,
            do_sample=False,
            use_cache=True,
            output_attentions=False,
            output_hidden_states=False,
            eos_token_id=model.config.eos_token_id if eos is None else eos,
            pad_token_id=0,
        )
        texts.append(out[0, len(PROMPT) :].tolist())
    return texts


def check(checkpoint: Path, folder: Path, mutation: Mutation) -> None:
    shutil.copytree(checkpoint, folder)
    mutation.write(folder)
    ours = write(folder)
    if ours is not None:
        assert ours == expected(folder), mutation


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_wrong_field_is_refused_or_changes_no_text(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    of = [mutation for file in FILES for mutation in mutations(checkpoints[name], file)]
    for index, mutation in enumerate(some(of, 20)):
        check(checkpoints[name], tmp_path / str(index), mutation)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_wrong_field_is_refused_or_changes_no_text(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, file: str
) -> None:
    for index, mutation in enumerate(mutations(checkpoints[name], file)):
        check(checkpoints[name], tmp_path / str(index), mutation)
        shutil.rmtree(tmp_path / str(index))


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("yarn", {"rms_norm_eps": 0}, "rms_norm_eps is 0, it must be a number above 0"),
        ("yarn", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ("yarn", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ("yarn", {"rope_parameters": YARN | {"factor": -2}}, "rope_parameters.factor is -2"),
        ("yarn", {"rope_scaling": YARN | {"factor": "two"}}, 'rope_scaling.factor is "two"'),
        ("yarn", {"rope_parameters": YARN | {"rope_theta": -1}}, "rope_parameters.rope_theta is -1"),
        ("yarn", {"rope_parameters": YARN | {"beta_slow": 0}}, "rope_parameters.beta_slow is 0"),
        ("llama3", {"rope_parameters": LLAMA3 | {"low_freq_factor": 0.0}}, "low_freq_factor is 0.0"),
        ("gemma2", {"sliding_window": 0}, "sliding_window is 0, it must be a positive whole number"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("yarn", {"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, .* up to 65536"),
        ("yarn", {"num_attention_heads": True}, "num_attention_heads is true, it must be a positive whole number"),
        ("yarn", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ("yarn", {"eos_token_id": True}, "eos_token_id is true, it must be a token id"),
        ("yarn", {"eos_token_id": [3, 2.5]}, r"eos_token_id is \[3, 2.5\]"),
        ("yarn", {"dtype": "float8_e4m3fn"}, 'dtype is "float8_e4m3fn", it must be one of float32, bfloat16'),
        ("yarn", {"torch_dtype": "int8"}, 'torch_dtype is "int8"'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_number_that_cannot_be_right_is_refused_by_its_name(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, fields: dict[str, Any], says: str
) -> None:
    folder = shutil.copytree(checkpoints[name], tmp_path / "model")
    edit(folder, "config.json", **fields)
    with pytest.raises(ValueError, match=rf"config\.json: .*{says}") as refused:
        load_model(folder, torch.float32, torch.device("cpu"))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"eos_token_id": "three"}'])
def test_a_generation_config_that_transformers_would_pass_over_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, text: str
) -> None:
    folder = shutil.copytree(checkpoints["yarn"], tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load_model(folder, torch.float32, torch.device("cpu"))


@pytest.mark.few(3)
@pytest.mark.parametrize("eos", [10**9, -1, -38, [-38, 3], [3, 40]], ids=str)
@pytest.mark.parametrize("file", FILES)
def test_an_end_of_text_outside_the_vocabulary_changes_no_text(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    eos: int | list[int],
) -> None:
    """-38 counted from the end is token 2, which the text is made of."""
    folder = shutil.copytree(checkpoints["yarn"], tmp_path / "model")
    if file == "config.json":
        edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, file, eos_token_id=eos)
    assert write(folder) == expected(folder)
    assert "outside the vocabulary of 40: ignored, because never generated" in caplog.text
