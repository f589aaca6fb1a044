"""Extracting: what is kept is what transformers computes, and a killed run loses no more than its current shard."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.demo_pair.training.train_base import train_tokenizer
from wingbeat.runtime.recordings.extract import ExtractConfig, extract
from wingbeat.runtime.recordings.format import INDEX_FILE, Record, RecordingError
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.recording_sources import CorpusSource, Sampling

VOCAB, HIDDEN, TAPS = 320, 32, (0, 2, 3)


@pytest.fixture(scope="module")
def verifier_path(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).save_pretrained(path)
    train_tokenizer(["def f(x):\n    return x\n" * 9, "class A:\n    y = [1, 2]\n" * 9], VOCAB, 64).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (root / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    return root


@pytest.fixture
def config(verifier_path, corpus, tmp_path) -> ExtractConfig:
    return ExtractConfig(
        model=verifier_path,
        output=tmp_path / "recording",
        corpus=corpus,
        sequences=20,
        sequence_length=24,
        tap_layers=TAPS,
        top_k=5,
        taps_dtype="float32",
        batch_size=4,
        shard_bytes=50_000,
        device="cpu",
        threads=1,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same_records(one: Path, other: Path) -> None:
    for ours, theirs in zip(RecordingReader(one).records(), RecordingReader(other).records(), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours.loss_mask, theirs.loss_mask)


def transformers_view(path: Path, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and logits of one sequence by nothing but transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(input_ids=token_ids[None].long(), output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in TAPS], dim=-1), out.logits[0]


@pytest.mark.slow
def test_taps_and_logits_are_those_of_a_plain_forward_pass(config, verifier_path):
    extract(config)
    for record in list(RecordingReader(config.output).records())[::5]:
        taps, logits = transformers_view(verifier_path, record.token_ids)
        torch.testing.assert_close(record.taps, taps, rtol=1e-4, atol=1e-5)
        top = logits.topk(5)
        assert torch.equal(record.top_ids.long(), top.indices)
        shares, wanted = record.top_logits - record.logsumexp[:, None], logits.log_softmax(-1).gather(-1, top.indices)
        torch.testing.assert_close(shares, wanted, rtol=1e-4, atol=1e-5)
        assert record.loss_mask.all()


def recorded(config: ExtractConfig, **changes: object) -> list[Record]:
    config = config.model_copy(update=changes)
    extract(config)
    return list(RecordingReader(config.output).records())


def test_greedy_answers_are_those_of_generate(config, tmp_path, verifier_path):
    texts = ["def f(x):", "class A:", "    return x + 1", "def f(x):\n    return"]
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": text} for text in texts))
    records = recorded(config, prompts=prompts, sequence_length=60, greedy_fraction=1.0)
    tokenizer = AutoTokenizer.from_pretrained(verifier_path)
    model = AutoModelForCausalLM.from_pretrained(verifier_path, dtype=torch.float32).eval()
    for text, record in zip(texts, records, strict=True):
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        answer = model.generate(
            prompt,
            max_new_tokens=61 - prompt.shape[1],
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )[0]
        # The last token has no row: nothing was computed behind it.
        assert record.token_ids.tolist() == answer[:-1].tolist()


def test_a_sampled_text_does_not_depend_on_its_batch(config, tmp_path):
    sampled = {"greedy_fraction": 0.0, "own_share": 1.0, "sequences": 6}
    alone = recorded(config, **sampled, batch_size=1, output=tmp_path / "alone")
    together = recorded(config, **sampled, batch_size=6, output=tmp_path / "together")
    assert [record.token_ids.tolist() for record in alone] == [record.token_ids.tolist() for record in together]
    other = recorded(config, **sampled, seed=1, output=tmp_path / "other")
    assert [record.token_ids.tolist() for record in other] != [record.token_ids.tolist() for record in together]


def test_the_corpus_is_shared_out_between_its_own_text_and_the_verifiers():
    documents = [torch.arange(5000)]
    source = CorpusSource(documents, 64, own_share=0.75, sampling=Sampling(0.5, 0.8, seed=0))
    starts = [source.start(number) for number in range(400)]
    own = [start for start in starts if len(start.token_ids) < 64]
    # Four standard deviations of a binomial of 400.
    assert abs(len(own) - 300) < 4 * (400 * 0.75 * 0.25) ** 0.5
    assert {len(start.token_ids) for start in own} == {4, 8, 16, 32}
    assert abs(sum(start.temperature == 0 for start in starts) - 200) < 40
    assert len({start.seed for start in starts}) == 400


@pytest.mark.slow
def test_a_second_run_finds_nothing_to_do(config):
    first = extract(config)
    before = files(config.output)
    again = extract(config)
    assert files(config.output) == before
    assert (first.stopped, again.stopped) == (None, None)
    assert (again.index.num_sequences, again.index.complete) == (20, True)


@pytest.mark.slow
def test_a_longer_run_goes_on_where_a_shorter_one_ended(config):
    extract(config)
    before = files(config.output)
    extract(config.model_copy(update={"sequences": 30}))
    after = files(config.output)
    assert RecordingReader(config.output).num_sequences == 30
    assert all(after[name] == content for name, content in before.items() if name != INDEX_FILE)


@pytest.mark.slow
def test_other_settings_do_not_continue_a_recording(config):
    extract(config)
    with pytest.raises(RecordingError, match="sequence_length 24, not 32"):
        extract(config.model_copy(update={"sequence_length": 32}))
    with pytest.raises(RecordingError, match="text_digest"):
        extract(config.model_copy(update={"corpus": Path(json.__file__).parent}))


@pytest.mark.slow
def test_the_bound_of_bytes_is_kept_and_what_is_there_can_be_read(config):
    whole = extract(config).index
    bounded = config.model_copy(
        update={"output": config.output.with_name("bounded"), "max_bytes": whole.num_bytes // 2 + 20_000}
    )
    result = extract(bounded)
    assert 0 < len(result.index.shards) < len(whole.shards)
    assert not result.index.complete
    assert "max_bytes" in result.stopped
    assert sum(path.stat().st_size for path in bounded.output.glob("shard-*")) <= bounded.max_bytes
    assert RecordingReader(bounded.output).num_sequences == result.index.num_sequences
    # With more room the same command goes on, to the same sequences.
    extract(bounded.model_copy(update={"max_bytes": config.max_bytes}))
    assert_same_records(bounded.output, config.output)


SCRIPT = """
import sys
from wingbeat.runtime.recordings.extract import ExtractConfig, extract
extract(ExtractConfig.model_validate_json(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_loses_only_its_current_shard(config, tmp_path):
    config = config.model_copy(update={"sequences": 160, "shard_bytes": 12_000, "output": tmp_path / "whole"})
    killed = config.model_copy(update={"output": tmp_path / "killed"})
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, killed.model_dump_json()],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    try:
        while len(list(killed.output.glob("shard-*.safetensors"))) < 3 and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = json.loads((killed.output / INDEX_FILE).read_text())["shards"]
    assert 2 <= len(kept) < 160 // kept[0]["num_sequences"]
    inodes = {shard["file"]: (killed.output / shard["file"]).stat().st_ino for shard in kept}
    extract(killed)
    extract(config)
    assert_same_records(killed.output, config.output)
    # Complete shards were not computed again.
    assert all((killed.output / name).stat().st_ino == inode for name, inode in inodes.items())


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_prompts_are_answered_and_not_learnt(config, tmp_path, verifier_path):
    question = {"role": "user", "content": "f(x)?"}
    entries = (
        {"prompt": "def f(x):"},
        {"messages": [question, {"role": "assistant", "content": "not the verifier's words"}]},
        {"prompt": "x" * 300},
    )
    prompts = write_lines(tmp_path / "prompts.jsonl", *entries)
    result = extract(config.model_copy(update={"prompts": prompts, "sequence_length": 60}))
    assert (result.index.num_sequences, result.num_prompts_left_out) == (2, 1)
    tokenizer = AutoTokenizer.from_pretrained(verifier_path)
    wanted = [
        tokenizer("def f(x):")["input_ids"],
        tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False),
    ]
    for record, prompt in zip(RecordingReader(config.output).records(), wanted, strict=True):
        assert record.token_ids[: len(prompt)].tolist() == prompt
        assert not record.loss_mask[: len(prompt)].any()
        assert record.loss_mask[len(prompt) :].all()
        assert len(prompt) < len(record.token_ids) <= 60


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', r'line 2: must be {"prompt": text}'),
        ("{", "line 2: "),
        ('{"messages": [{"role": "user"}]}', "line 2: no 'content' given"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages hold nothing"),
    ],
)
def test_a_bad_line_of_prompts_is_named(config, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        extract(config.model_copy(update={"prompts": path}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 100}, "the verifier supports 64 positions"),
        ({"top_k": 1000}, "the verifier's vocabulary has 320 tokens"),
        ({"tap_layers": (1, 9)}, r"tap_layers \[9\] do not exist"),
    ],
)
def test_settings_beyond_the_verifier_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        extract(config.model_copy(update=changes))
    assert not config.output.exists()
