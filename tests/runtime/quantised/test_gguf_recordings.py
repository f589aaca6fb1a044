"""A verifier that is a GGUF file is recorded by the numbers that its weights stand for."""

import json

import pytest
import torch

from tests.runtime.quantised.gguf_world import write_model
from wingbeat.deployments.cli.main import main
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.reader import RecordingReader


def test_what_is_recorded_is_what_the_file_computes(tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", "Q4_1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "hell a12")))
    options = ["--sequence-length", "32", "--tap-layers", "0,2", "--taps-dtype", "float32", "--device", "cpu"]
    folder = tmp_path / "recording"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "extract",
                "--model",
                f"{tmp_path}/tiny.gguf",
                "--output",
                str(folder),
                "--prompts",
                str(prompts),
                *options,
            ]
        )
    assert ended.value.code == 0
    reader = RecordingReader(folder, 0)
    reader.check_verifier(checkpoint_fingerprint(tmp_path / "tiny.gguf"))
    batch = reader.batch(0, 1, 32)
    with torch.no_grad():
        states = meant(batch.token_ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(batch.taps, torch.cat((states[0], states[2]), dim=-1), rtol=1e-3, atol=1e-4)
