"""Recording live traffic as configured: off by default, from taps that fit, of the requests that were sampled."""

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.recordings.families import recording_families
from wingbeat.deployments.recordings.live_recording import needs_with_recording, start_recording
from wingbeat.deployments.recordings.part import observe, tapped
from wingbeat.deployments.replica.engine.build import build_setup
from wingbeat.runtime.config import BENCHMARK_VARIABLE
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.choice import FALLBACK
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.scheduling.request import Request, SamplingParams

LIMITS = {"max_num_seqs": 2, "max_model_len": 64, "num_kv_blocks": 20, "threads": 1}


def app_config(tiny_model, **fields) -> AppConfig:
    return AppConfig(**{"model": tiny_model, "drafter": "none"} | LIMITS | fields)


def test_nothing_is_recorded_by_default(tiny_model):
    config = app_config(tiny_model)
    assert config.recording_dir is None
    assert tapped(config, DrafterNeeds(), 2) is None
    assert observe(config, object(), "engine1") is None


def test_the_command_line_can_say_none(tiny_model):
    assert app_config(tiny_model, recording_dir="none").recording_dir is None


def test_a_drafters_own_taps_are_recorded(tiny_model, tmp_path):
    config = app_config(tiny_model, recording_dir=tmp_path)
    needs = DrafterNeeds((0, 1), keeps_context=True)
    assert needs_with_recording(config, needs, 2) == needs


def test_without_taps_those_of_a_head_to_come_are_recorded(tiny_model, tmp_path):
    config = app_config(tiny_model, drafter=FALLBACK.kind, recording_dir=tmp_path)
    assert needs_with_recording(config, DrafterNeeds(), 32) == DrafterNeeds((2, 16, 29))


def test_a_drafter_that_has_no_taps_and_keeps_context_is_refused(tiny_model, tmp_path):
    config = app_config(tiny_model, recording_dir=tmp_path)
    with pytest.raises(ValueError, match="taps no hidden states to record"):
        needs_with_recording(config, DrafterNeeds((), keeps_context=True), 2)
    with pytest.raises(ValueError, match="taps keys and values beside the hidden states; serve with an EAGLE head"):
        needs_with_recording(config, DrafterNeeds((2,), keeps_context=True, kv_layers=(0, 1)), 2)


def test_an_engine_of_the_configuration_writes_what_it_served(tiny_model, tmp_path):
    config = app_config(tiny_model, recording_dir=tmp_path, recording_share=1.0, served_model_name="tiny")
    setup = build_setup(config, lambda convention=None: DrafterNeeds())
    recording = start_recording(config, setup.engine, "engine1")
    setup.engine.observe(recording.rounds)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt, tokens = (5, 6, 7, 8, 9), []
    setup.engine.add_request(Request("a:1", prompt, params))
    while setup.engine.has_unfinished_requests():
        tokens += [token for output in setup.engine.step() for token in output.token_ids]
    setup.engine.observe(None)
    recording.writer.close()
    reader = RecordingReader(tmp_path)
    reader.check_verifier(checkpoint_fingerprint(tiny_model))
    assert (reader.spec.verifier, reader.spec.top_k, reader.spec.settings["source"]) == ("tiny", 0, "live")
    [record] = reader.records()
    assert record.token_ids.tolist() == [*prompt, *tokens[:-1]]
    assert record.loss_mask.tolist() == [False] * 5 + [True] * 19
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(record.token_ids[None].long(), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in reader.spec.tap_layers], dim=-1)
    # Stored in bfloat16.
    torch.testing.assert_close(record.taps.float(), expected, rtol=1e-2, atol=1e-3)


def test_what_is_recorded_and_whether_anything_is_are_among_the_metrics():
    engines = {
        "a": {"recording": {"num_sequences": 5, "num_dropped": 2, "stopped": "OSError: no space"}},
        "b": {"recording": {"num_sequences": 1, "num_dropped": 0, "stopped": None}},
        "c": {"recording": None},
    }
    found = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in recording_families(FleetSnapshot("demo", engines))
        for sample in family.samples
    }
    assert found == {
        ("wingbeat_recorded_requests_total", "a"): 5,
        ("wingbeat_recorded_requests_total", "b"): 1,
        ("wingbeat_recording_dropped_total", "a"): 2,
        ("wingbeat_recording_dropped_total", "b"): 0,
        ("wingbeat_recording_stopped", "a"): 1,
        ("wingbeat_recording_stopped", "b"): 0,
    }


def test_an_engine_of_someone_else_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="Wingbeat's own engine"):
        start_recording(app_config(tiny_model, recording_dir=tmp_path), object(), "engine1")


def test_a_folder_that_cannot_be_is_named(tiny_model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"recording_dir is .*file': must be a directory"):
        app_config(tiny_model, recording_dir=tmp_path / "file")
    config = app_config(tiny_model, recording_dir=tmp_path / "file" / "below")
    engine = build_setup(config, lambda convention=None: DrafterNeeds()).engine
    with pytest.raises(ValueError, match=r"recording_dir is .*below': Not a directory"):
        start_recording(config, engine, "engine1")


def test_drawn_text_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")
    with pytest.raises(ValidationError, match="recording_dir and forced_acceptance"):
        AppConfig(forced_acceptance=0.8, recording_dir=tmp_path)
