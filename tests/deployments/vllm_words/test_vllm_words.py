"""A `vllm serve` line, word for word, behind `wingbeat serve`: the settings it makes, or the line that refuses it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs
from tests.optional import is_gone
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.cli.options import UserError, build_config, option_name
from wingbeat.deployments.vllm_words import foreign_names
from wingbeat.deployments.vllm_words.vllm_options import VLLM
from wingbeat.deployments.vllm_words.words import COMMANDS_OWN, without_vllm
from wingbeat.runtime.config import BENCHMARK_VARIABLE

MODEL = str(Path(__file__).parents[3] / "examples" / "demo_pair" / "verifier")
HEAD = str(Path(__file__).parents[3] / "examples" / "demo_pair" / "drafter")
DOCUMENT = Path(__file__).parents[3] / "docs" / "ray_serve_llm.md"


def settings_of(line: str) -> tuple[dict[str, Any], list[str]]:
    """Settings that `wingbeat serve` would use for a command line, by field, and the notes that it prints."""
    seen: dict[str, Any] = {}
    words = without_vllm(shlex.split(line), AppConfig)

    def run(config: AppConfig, host: str = "", port: int = 0) -> None:
        seen.update({name: getattr(config, name) for name in config.model_fields_set}, host=host, port=port)

    import typer

    from wingbeat.deployments.cli.options import model_command

    app = typer.Typer()
    app.command()(model_command(AppConfig, run, arguments=("model", "drafter")))
    app(words.args, standalone_mode=False)
    return seen, words.notes


@pytest.mark.parametrize(
    ("words", "names", "drafter"),
    [
        (f"{MODEL} --served-model-name a b", "a,b", None),
        (f"{MODEL} --served-model-name a b --max-model-len 64", "a,b", None),
        (f"--model {MODEL} --served-model-name a b", "a,b", None),
        (f"{MODEL} --served-model-name a {HEAD}", "a", HEAD),
        (f"--served-model-name a {MODEL} {HEAD}", "a", HEAD),
        (f"{MODEL} {HEAD} --served-model-name=a", "a", HEAD),
    ],
)
def test_a_model_may_have_several_names(words: str, names: str, drafter: str | None):
    found, _ = settings_of(words)
    assert (found["served_model_name"], found.get("drafter")) == (names, drafter)


@needs("parsing")
@needs("ranks")
def test_a_script_of_vllm_serves_the_same_model():
    found, notes = settings_of(
        f"{MODEL} --host 0.0.0.0 --port 9000 --served-model-name demo --api-key secret --dtype float "
        "--max-model-len 1k "
        "--max-num-seqs 8 --max-num-batched-tokens 512 --gpu-memory-utilization 0.8 --enable-prefix-caching -tp 1 "
        "--kv-cache-dtype auto --enforce-eager --seed 0 --disable-log-requests --enable-auto-tool-choice "
        "--tool-call-parser hermes --reasoning-parser qwen3 "
        f"""--speculative-config '{{"method": "eagle3", "model": "{HEAD}", "num_speculative_tokens": 3}}'"""
    )
    assert (found.pop("host"), found.pop("port")) == ("0.0.0.0", 9000)
    assert [key.get_secret_value() for key in found.pop("api_key")] == ["secret"]
    assert found == {
        "model": Path(MODEL),
        "served_model_name": "demo",
        "dtype": "float32",
        "max_model_len": 1000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.8,
        "enable_prefix_caching": True,
        "tensor_parallel_size": 1,
        "kv_cache_dtype": "auto",
        "cuda_graphs": False,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "drafter": HEAD,
        "draft_steps": 3,
    }
    assert [note.partition(" ")[0] for note in notes] == [
        "--seed",
        "--disable-log-requests",
        "--enable-auto-tool-choice",
    ]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--speculative-config.method ngram --speculative-config.num_speculative_tokens 4", ("ngram", 4)),
        ("""--speculative_config '{"method": "suffix"}'""", ("suffix", None)),
        ("""-sc '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'""", ("mtp", 1)),
        ("""--speculative-config '{"num_speculative_tokens": 2}'""", ("mtp", 2)),
        (f"""--speculative-config '{{"model": "{HEAD}"}}'""", (HEAD, None)),
        (f"""--speculative-config={json.dumps({"method": "draft_model", "model": HEAD})!r}""", (HEAD, None)),
        (f"""--speculative-config='{{"method": "dflash", "model": "{HEAD}"}}'""", (HEAD, None)),
        ("""--speculative-config '{"model": "[ngram]"}'""", ("ngram", None)),
        (
            f"""--speculative-config '{{"model": "{HEAD}", "method": "eagle3", "prompt_lookup_max": 4}}'""",
            (HEAD, None),
        ),
        (
            """--speculative-config '{"method": "eagle", "model": "org/head", "revision": "v2"}'""",
            ("org/head@v2", None),
        ),
    ],
)
def test_speculative_config_names_the_drafter(words: str, settings: tuple[str, int | None]):
    args = without_vllm([MODEL, *shlex.split(words)], AppConfig).args
    steps = [] if settings[1] is None else ["--draft-steps", str(settings[1])]
    assert sorted(args) == sorted([MODEL, "--drafter", settings[0], *steps])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--trust-remote-code", "--trust-remote-code True: code of a checkpoint is never run; leave it out"),
        ("--enable-lora", "--enable-lora True: give --lora-modules, or --lora-update-dir to load adapters later"),
        ("--quantization awq", "--quantization awq: the checkpoint's quantization_config says nothing"),
        ("--chat-template x.jinja", "--chat-template x.jinja: there is no such file; give one, or 'request'"),
        ("--trust-request-chat-template --chat-template x", "mean request and x for --chat-template: give one"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2: use --tensor-parallel-size"),
        ("--data-parallel-size 2", "--data-parallel-size 2: use --num-replicas"),
        ("--tokenizer org/other", "--tokenizer org/other: put its files into the model's folder"),
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill False: long prompts are always prefilled"),
        (
            "--compilation-config 4",
            "--compilation-config 4: layers are not compiled: a level from 0 to 3 is passed over",
        ),
        ("--ssl-keyfile k", "--ssl-keyfile k: serve behind a proxy that speaks HTTPS"),
        ("--seed", "--seed needs a value"),
        ("--speculative-config x", "speculative_config is not valid JSON"),
        ("--speculative-config 3", "speculative_config is 3: must be an object"),
        (
            """--speculative-config '{"method": "medusa", "model": "d"}'""",
            "--speculative-config.method medusa: there is no",
        ),
        (
            """--speculative-config '{"method": "eagle3"}'""",
            "--speculative-config.method eagle3: this method needs `model`",
        ),
        ("""--speculative-config '{"methd": "ngram"}'""", "--speculative-config.methd is unknown: did you mean"),
        ("""--speculative-config '{"method": "mtp", "model": "d"}'""", "leave `model` out"),
        (
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 0}'""",
            "must be a whole number from 1",
        ),
        ("""--drafter none --speculative-config.method ngram""", "--drafter none: another option says ngram; give one"),
        ("--num-kv-blocks 9 --num-gpu-blocks-override 7", "--num-kv-blocks 9: another option says 7; give one"),
        ("--lora-modules 'a{b}'", "--lora-modules a{b}: must read name=folder"),
        (
            """--speculative-config '{"method": "suffix", "sa_config": "{"}'""",
            "--speculative-config.sa_config {: must be an object, such as {}, or true",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(words: str, line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", MODEL, *shlex.split(words)])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ({"method": "ngram", "prompt_lookup_max": 5}, {"prompt_lookup_max": 5}),
        ({"model": "ngram", "prompt_lookup_min": 3}, {"prompt_lookup_min": 3}),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 1.5,
                "suffix_decoding_min_token_prob": 0.1,
            },
            {
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 1.5,
                "suffix_decoding_min_token_prob": 0.1,
            },
        ),
    ],
    ids=str,
)
def test_settings_of_drafters_that_copy_have_vllms_names(said, settings):
    found, notes = settings_of(f"{MODEL} --speculative-config '{json.dumps(said)}'")
    assert {name: found[name] for name in settings} == settings
    assert not notes


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"synthetic_acceptance_length": 3.24}, (1.0, 1.0, 0.24, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0)),
        # vLLM's are shares of all rounds; ours are given the level above.
        ({"synthetic_acceptance_rates": [0.8, 0.4, 0.1]}, (0.8, 0.5, 0.25, 0.0)),
        ({"synthetic_acceptance_rates": [0.5, 0, 0]}, (0.5, 0.0, 0.0, 0.0)),
    ],
    ids=str,
)
def test_synthetic_acceptance_is_drawn_as_by_vllm(fields, rates, monkeypatch: pytest.MonkeyPatch):
    given = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    line = f"{MODEL} --speculative-config '{json.dumps(given | fields)}'"
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")
    found, _ = settings_of(line)
    assert found["forced_acceptance"] == pytest.approx(rates)
    monkeypatch.delenv(BENCHMARK_VARIABLE)
    with pytest.raises(UserError, match="the model's, so this is for benchmarks only"):
        settings_of(line)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rejection_sample_method": "synthetic"}, "synthetic needs synthetic_acceptance_length or"),
        ({"rejection_sample_method": "lenient"}, "must be standard, block or synthetic"),
        ({"synthetic_acceptance_length": 2}, "needs rejection_sample_method synthetic"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5}, "use at least 1"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": "2"}, "must be a number from 1 on"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.4, 0.8]},
            "none above the one before",
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5]}, "rates from 0 to 1"),
        (
            {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [1],
                "synthetic_acceptance_length": 2,
            },
            "both given",
        ),
    ],
    ids=str,
)
def test_synthetic_acceptance_that_is_none_is_refused(fields, message):
    given = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3} | fields
    with pytest.raises((UserError, ValueError), match=message):
        settings_of(f"{MODEL} --speculative-config '{json.dumps(given)}'")


@needs("drawn_trees")
@pytest.mark.parametrize("paths", ["[(0,), (0, 0), (1,)]", [[0], [0, 0], [1]]], ids=str)
def test_a_tree_that_is_drawn_is_drawn_here_too(paths: str | list[list[int]]):
    said = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3, "speculative_token_tree": paths}
    args = without_vllm([MODEL, "--speculative-config", json.dumps(said)], AppConfig).args
    assert sorted(args) == sorted([MODEL, "--drafter", HEAD, "--draft-top-k", "[[0], [0, 0], [1]]"])
    assert build_config(AppConfig, {"drafter": HEAD, "draft_top_k": args[-1]}).draft_top_k == ((0,), (1,), (0, 0))


def test_a_quantised_checkpoint_may_be_named_as_what_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    for kernel in ("awq", "awq_marlin"):
        assert without_vllm([str(tmp_path), "--quantization", kernel], AppConfig).args == [str(tmp_path)]


def test_a_model_that_is_to_be_rounded_to_int8_has_that_as_its_dtype(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert without_vllm([str(tmp_path), "-q", "int8"], AppConfig).args == [str(tmp_path), "--dtype", "int8"]


@needs("lora")
def test_adapters_stand_one_word_after_the_other_as_in_vllm():
    words = """--enable-lora --lora-modules a=/a '{"name": "b", "path": "/b"}' --max-loras 4"""
    args = without_vllm([MODEL, *shlex.split(words)], AppConfig).args
    assert args[args.index("--lora-modules") + 1] == '{"a": "/a", "b": "/b"}'
    assert args[-2:] == ["--max-loras", "4"]


def test_words_that_only_wingbeat_has_stay_as_they_are():
    args = [MODEL, "none", "--threads", "2", "--no-adaptive", "--draft-steps=3", "--host", "::1", "--nonsense", "x"]
    assert without_vllm(args, AppConfig) == (
        [MODEL, "none", "--threads", "2", "--no-adaptive", "--draft-steps", "3", "--host", "::1", "--nonsense", "x"],
        [],
    )
    assert without_vllm(["--num_kv_blocks", "9"], AppConfig).args == ["--num-kv-blocks", "9"]


@pytest.mark.parametrize("name", [name for name, row in VLLM.items() if row.kind == "left out"])
def test_what_nothing_needs_is_left_out_or_refused_and_never_silent(name: str):
    row = VLLM[name]
    assert row.read(row.values[0] if row.values else "x", {}) == {}
    if row.values:
        with pytest.raises(ValueError, match=r"\w"):
            row.read("something else", {})


@pytest.mark.parametrize("name", [name for name, row in VLLM.items() if row.kind == "refused"])
def test_what_is_refused_says_so_and_asks_for_nothing_when_off(name: str):
    assert VLLM[name].read(False, {}) == {}
    if name not in COMMANDS_OWN and "." not in name:
        with pytest.raises(UserError, match=f"^{option_name(name)} "):
            without_vllm([MODEL, *([option_name(name)] if VLLM[name].flag else [option_name(name), "7"])], AppConfig)


@pytest.mark.parametrize("name", [name for name, row in VLLM.items() if row.kind == "same"])
def test_options_of_the_same_name_are_settings(name: str):
    assert name in AppConfig.model_fields


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--cuda-graphs", True),
        ("--cuda_graphs --seed 0", True),
        (f"--cuda-graphs {MODEL}", True),
        ("--no-cuda-graphs", False),
        ("--cuda-graphs true", True),
        ("--cuda-graphs=false", False),
        ("--cuda-graphs decode_only", "decode_only"),
        ("--cuda-graphs=full", "full"),
        ("--cuda-graphs none", "none"),
        ("--enforce-eager", False),
        ("", None),
    ],
)
def test_graphs_are_a_flag_and_a_word(words, value):
    assert settings_of(words)[0].get("cuda_graphs") == value


def test_an_unknown_mode_of_graphs_is_refused_by_those_there_are():
    with pytest.raises(UserError, match=r"--cuda-graphs piecewise: .*'full', 'decode_only' or 'none'"):
        settings_of("--cuda-graphs piecewise")


def test_help_and_completion_know_nothing_of_it():
    assert without_vllm(["--help"], AppConfig) == (["--help"], [])
    assert without_vllm([], AppConfig) == ([], [])
    assert build_config(AppConfig, {"drafter": "none"}).drafter == "none"


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        (0, {}),
        ("3", {}),
        ('{"cudagraph_mode": "FULL_DECODE_ONLY"}', {"cuda_graphs": "decode_only"}),
        ({"cudagraph_mode": "none"}, {"cuda_graphs": "none"}),
        ({"cudagraph_mode": "FULL"}, {"cuda_graphs": "full"}),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, {"cuda_graphs": "full"}),
        (
            {"cudagraph_mode": "PIECEWISE"},
            "CUDA graphs are not captured in pieces: cudagraph_mode must be one of NONE, FULL_DECODE_ONLY, "
            "FULL, FULL_AND_PIECEWISE",
        ),
        ({"level": 3}, {}),
        ({"mode": 3, "cudagraph_mode": "FULL"}, {"cuda_graphs": "full"}),
        ({"mode": 7}, "layers are not compiled: a level from 0 to 3"),
        ({"backend": "eager"}, "layers are not compiled: a level from 0 to 3"),
    ],
    ids=str,
)
def test_what_vllm_captures_is_read_by_its_mode(value, settings):
    read = VLLM["compilation_config"].read
    if isinstance(settings, dict):
        assert read(value, {}) == settings
        return
    with pytest.raises(ValueError, match="^" + re.escape(settings)):
        read(value, {})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}),
        (
            "--limit-mm-per-prompt.image=2 --limit_mm_per_prompt.audio 0",
            {"limit_mm_per_prompt": {"image": 2, "audio": 0}},
        ),
        ("--limit-mm-per-prompt.image.count 2", {"limit_mm_per_prompt": {"image": 2}}),
        (
            "--limit-mm-per-prompt '{\"audio\": 1}' --limit-mm-per-prompt.image 2",
            {"limit_mm_per_prompt": {"audio": 1, "image": 2}},
        ),
        ("--limit-mm-per-prompt '{\"image\": 2}'", {"limit_mm_per_prompt": {"image": 2}}),
        ("--compilation-config.cudagraph_mode FULL", {"cuda_graphs": "full"}),
        ("--compilation-config.cudagraph-mode=NONE", {"cuda_graphs": "none"}),
        ("--speculative-config.method ngram --speculative-config.num_speculative_tokens 3", {"drafter": "ngram"}),
        ('--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'', {"drafter": "ngram"}),
        ("--allowed-origins '[\"*\"]'", {"allowed_origins": ("*",)}),
        (
            '--allowed-origins \'["http://a.example", "http://b.example"]\'',
            {"allowed_origins": ("http://a.example", "http://b.example")},
        ),
        (
            "--allowed-origins http://a.example,http://b.example",
            {"allowed_origins": ("http://a.example", "http://b.example")},
        ),
        ("--allowed-hosts '[\"[::1]\"]'", {"allowed_hosts": ("[::1]",)}),
        ("--allowed-hosts [::1],localhost", {"allowed_hosts": ("[::1]", "localhost")}),
        ("--allowed-media-domains '[\"a.example\"]'", {"allowed_media_domains": ("a.example",)}),
    ],
)
def test_nested_options_and_lists_are_read_in_each_of_vllms_spellings(words: str, settings: dict[str, Any]):
    found, _ = settings_of(f"{MODEL} {words}")
    assert {name: found[name] for name in settings} == settings


def test_a_field_of_an_option_that_changes_nothing_is_a_note():
    _, notes = settings_of(f"{MODEL} --structured-outputs-config.backend xgrammar")
    assert [note.partition(" ")[0] for note in notes] == ["--structured-outputs-config"]


@pytest.mark.parametrize("words", ["-O3", "-O 3", "-O=3", "--optimization-level 3"])
def test_a_level_of_compilation_is_a_note(words):
    _, notes = settings_of(f"{MODEL} {words}")
    assert [note.partition(" ")[0] for note in notes] == ["--optimization-level"]


def test_short_names_take_fields_too():
    found, _ = settings_of(f"{MODEL} -cc.cudagraph_mode FULL")
    assert found["cuda_graphs"] == "full"


def test_an_option_and_its_field_that_do_not_fit_are_one_line():
    with pytest.raises(UserError, match="given beside one of its fields"):
        without_vllm(shlex.split("--limit-mm-per-prompt 4 --limit-mm-per-prompt.image 2"), AppConfig)


def test_hints_are_of_names_that_are_not_ours_and_lead_to_names_that_are():
    fields = set(AppConfig.model_fields)
    names = {foreign_names.PLACE, *(n for n, row in VLLM.items() if row.kind != "same")}
    assert not fields & names
    named = []
    for name in names:
        said = foreign_names.hint(name, fields, lambda setting: named.append(setting) or setting)
        assert said is not None
        assert is_gone(name) or "wingbeat serve has" not in said
    assert {name for name in named if not is_gone(name)} <= fields
    assert foreign_names.hint("--max-model-len", fields) is None


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("enforce_eager", "vLLM's option, here cuda_graphs none"),
        ("num_gpu_blocks_override", "vLLM's option, here num_kv_blocks; only wingbeat serve has num_kv_blocks"),
        ("gpu_memory_utilization", "only wingbeat serve has it"),
        ("seed", "vLLM's option, here left out: a request gives its own `seed`"),
        ("max_model_len", None),
        ("max_modle_len", None),
    ],
)
def test_hints_of_other_commands_name_no_setting_that_they_lack(option: str, said: str | None):
    assert foreign_names.hint(option, {"cuda_graphs", "max_model_len"}) == said


def test_the_document_names_every_option():
    named = set(re.findall(r"`([\w.]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert not [name for name in VLLM if not named & {name, name.removeprefix("speculative_config.")}]
