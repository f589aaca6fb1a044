"""`wingbeat generate` over a fake engine, and the engine of a command."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.cli.options import UserError, option_name
from wingbeat.deployments.local import engine
from wingbeat.deployments.local.engine import LocalConfig
from wingbeat.deployments.local.generate import GenerateConfig
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import FinishReason, RequestOutput
from wingbeat.runtime.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    entries = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = BackendTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


class FakeLLM:
    """Answers every prompt with the same text, repeated where the end of text is ignored."""

    def __init__(self, answer: str = "one two three") -> None:
        self.tokenizer = byte_tokenizer()
        self.engine = SimpleNamespace(config=EngineConfig(max_model_len=256))
        self._answer = answer
        self.seen: list[tuple[list[int], object]] = []
        self.num_closed = 0

    def _token_ids(self, params) -> list[int]:
        token_ids = byte_tokenizer().encode(self._answer)
        token_ids = token_ids * params.max_tokens if params.ignore_eos else [*token_ids, 0]
        return token_ids[: params.max_tokens]

    def stream(self, prompts, params):
        self.seen += zip(prompts, params, strict=True)
        try:
            for index, one in enumerate(params):
                token_ids = self._token_ids(one)
                for start in range(0, len(token_ids), 3):
                    yield index, RequestOutput(str(index), tuple(token_ids[start : start + 3]))
                reason = FinishReason.STOP if token_ids[-1] == 0 else FinishReason.LENGTH
                metrics = SpeculationMetrics(4, 8, 6, [4, 2]) if one.speculation else SpeculationMetrics()
                yield index, RequestOutput(str(index), (), reason, metrics, 0)
        finally:
            self.num_closed += 1


@pytest.fixture
def wingbeat(capsys, monkeypatch):
    """Run the command over a fake engine; returns exit code, stdout and stderr."""

    def run(*args: str, llm: FakeLLM | None = None):
        def open_engine(config, max_num_seqs):
            if llm is None:
                raise AssertionError("the engine was opened")
            return llm

        monkeypatch.setattr(engine, "open_engine", open_engine)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(args))
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)

    return run


class TestGenerate:
    def test_text_goes_to_stdout_and_figures_to_stderr(self, wingbeat):
        got = wingbeat("generate", "hi", llm=FakeLLM())
        assert (got.code, got.out) == (0, "one two three\n")
        assert "acceptance length 2.50" in got.err

    def test_json_has_the_fields_of_the_http_response(self, wingbeat):
        llm = FakeLLM()
        got = json.loads(wingbeat("generate", "hi", "--json", "--seed", "7", llm=llm).out)
        assert got["text"] == "one two three"
        assert llm.tokenizer.decode(got["token_ids"]) == "one two three"
        assert (got["finish_reason"], got["seed"]) == ("stop", 7)
        assert got["metrics"]["speculative_decoding"]["acceptance_length"] == 2.5

    def test_options_become_sampling_parameters(self, wingbeat):
        llm = FakeLLM()
        options = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed -3 --ignore-eos"
        wingbeat("generate", "--prompt-ids", "3,4,5", *options.split(), "--no-speculation", llm=llm)
        prompt, params = llm.seen[0]
        assert prompt == [3, 4, 5]
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 4)
        assert (params.min_p, params.seed, params.ignore_eos, params.speculation) == (0.1, -3, True, False)

    def test_the_default_is_greedy_and_speculative(self, wingbeat):
        llm = FakeLLM()
        wingbeat("generate", "hi", llm=llm)
        params = llm.seen[0][1]
        assert (params.temperature, params.speculation, params.ignore_eos) == (0.0, True, False)

    def test_a_stop_string_ends_text_and_engine(self, wingbeat):
        llm = FakeLLM()
        got = json.loads(wingbeat("generate", "hi", "--json", "--stop", "zero", "--stop", " three", llm=llm).out)
        assert (got["text"], got["finish_reason"]) == ("one two", "stop")
        assert llm.tokenizer.decode(got["token_ids"]) == "one two three"
        assert llm.num_closed == 1

    def test_a_model_without_tokenizer_takes_and_gives_token_ids(self, wingbeat):
        llm = FakeLLM()
        llm.tokenizer = None
        got = json.loads(wingbeat("generate", "--prompt-ids", "1,2", "--json", "--max-tokens", "4", llm=llm).out)
        assert (got["text"], len(got["token_ids"]), got["finish_reason"]) == ("", 4, "length")
        assert "--prompt-ids" in wingbeat("generate", "hi", llm=llm).err


@pytest.mark.parametrize(
    ("args", "hint"),
    [(["x" * 300], "--max-model-len"), (["x", "--max-tokens", "300"], "--max-tokens"), ([""], "empty")],
)
def test_prompts_that_do_not_fit_are_refused(wingbeat, args, hint):
    got = wingbeat("generate", *args, llm=FakeLLM())
    assert (got.code, got.err.count("\n")) == (2, 1)
    assert hint in got.err


def test_a_bad_checkpoint_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        engine.open_engine(LocalConfig(model=tmp_path, device="cpu"), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"speculation": False}])
def test_a_command_on_an_engine_has_limits_for_one(fields):
    config = GenerateConfig(device="cpu", **fields)
    assert config.engine_config(1).speculation == SpeculationConfig.default("cpu")


def test_limits_hold_exactly_the_sequences_asked_for(tmp_path):
    config = {"model_type": "llama", "max_position_embeddings": 96}
    Path(tmp_path / "config.json").write_text(json.dumps(config))
    limits = LocalConfig(model=tmp_path).engine_config(3)
    assert (limits.max_model_len, limits.max_num_seqs) == (96, 3)
    assert limits.num_kv_blocks == 3 * limits.max_blocks_per_seq + 1


def test_a_round_of_a_command_on_a_gpu_has_as_many_prompt_tokens_as_a_servers():
    assert LocalConfig(device="cuda").engine_config(1).max_num_batched_tokens == 2048


def test_every_setting_is_shown_once(wingbeat):
    text = wingbeat("generate", "--help").out
    shown = re.findall(r"^  (--[\w-]+)", text, re.M)
    assert len(shown) == len({*shown})
    assert {*map(option_name, GenerateConfig.model_fields)} <= {*shown}
    assert "org/name[@revision]" in text


@pytest.mark.parametrize("drafter", ["suffix", "none", "some.module.Class"])
def test_server_and_command_line_take_the_same_drafters(drafter: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert AppConfig(model=tmp_path, drafter=drafter).choice().source == drafter
    assert LocalConfig(model=tmp_path, drafter=drafter).choice().source == drafter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "eagel"}, "drafter is 'eagel': must be 'auto', 'none'"),
        ({"model": "/no/such/model"}, "model is '/no/such/model': there is no folder /no/such/model"),
        ({"draft_top_k": 0}, "draft_top_k is 0: use at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("options", [AppConfig, LocalConfig])
def test_server_and_command_line_refuse_the_same_in_the_same_words(options: type, values: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        options(**values)


def test_graphs_can_be_turned_off_without_a_server():
    assert LocalConfig(cuda_graphs="none").engine_config(1).may_capture is False
    assert LocalConfig().engine_config(1).may_capture is True
