"""Times on disk that real passes contradict are corrected there, and so is the next start."""

import json
from dataclasses import replace

import pytest

from tests.runtime.models import CHAIN, Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.scripted import ScriptedDrafter, right_chain
from wingbeat.kernels.disk_cache import keep
from wingbeat.runtime.engine import calibration
from wingbeat.runtime.engine.calibration import VerifierTimes
from wingbeat.runtime.engine.kept_times import KeptTimes

TIMES = VerifierTimes((1, 4), (0, 3), ((1.0, 2.0), (2.0, 8.0)), (0.001, 0.002))
WINDOW = 16


@pytest.fixture
def path(tmp_path):
    keep(tmp_path / "verifier.json", TIMES._asdict())
    return tmp_path / "verifier.json"


def kept(path):
    return calibration._from_dict(json.loads(path.read_text()))


def watch(times, factor, rows, passes=WINDOW):
    for _ in range(passes):
        times.observe(factor * 3.0, 3.0, rows)


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.18])
def test_what_minutes_differ_by_changes_nothing(path, factor):
    watch(KeptTimes(path, TIMES), factor, 1)
    assert kept(path) == TIMES


@pytest.mark.parametrize("factor", [0.4, 1.5])
def test_a_contradicted_file_has_what_passes_take(path, factor):
    watch(KeptTimes(path, TIMES), factor, 1)
    assert kept(path).verify_s[0] == pytest.approx((factor, 2 * factor))
    assert kept(path).verify_s[1] == pytest.approx((2 * factor, 8 * factor))
    assert kept(path).context_s == pytest.approx((0.001 * factor, 0.002 * factor))


def test_rows_are_corrected_by_what_passes_of_about_as_many_take(path):
    times = KeptTimes(path, TIMES)
    watch(times, 0.5, 1)
    watch(times, 1.0, 16)
    (one, four), (roots, most) = kept(path).verify_s
    assert (one, most) == pytest.approx((0.5, 8.0))
    assert four == roots == pytest.approx(1.5), "4 rows lie half way"


def test_of_all_windows_the_quickest_counts(path):
    times = KeptTimes(path, TIMES)
    watch(times, 3.0, 1)
    assert kept(path).verify_s[0][0] == pytest.approx(3.0)
    watch(times, 1.0, 1)
    assert kept(path).verify_s[0][0] == pytest.approx(1.0), "other work had run beside it"
    watch(times, 3.0, 1)
    assert kept(path).verify_s[0][0] == pytest.approx(1.0)


def test_single_interruptions_contradict_nothing(path):
    times = KeptTimes(path, TIMES)
    for _ in range(4):
        watch(times, 50.0, 1, WINDOW // 4)
        watch(times, 1.0, 1, WINDOW - WINDOW // 4)
    assert kept(path) == TIMES


def test_what_was_not_kept_is_not_written(tmp_path):
    watch(KeptTimes(tmp_path / "none.json", TIMES), 0.1, 1)
    assert not list(tmp_path.iterdir())


def test_the_next_start_does_not_read_a_bad_minute(tmp_path, monkeypatch):
    """Ten seconds for every pass: no machine needs them for a tiny model."""
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    ref = reference("llama")
    config = engine_config(replace(CHAIN, adaptive=True))
    bad = VerifierTimes((1, 8), (0, 5), ((10.0, 10.0), (10.0, 10.0)), (0.0, 0.0))
    path = calibration.times_path(ref.loaded, config, captured=False)
    keep(path, bad._asdict())
    engine = new_engine(ref.loaded, config, ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size))
    for _ in range(10):
        if kept(path) == bad:
            Run(engine, ref.prompts[:1], greedy_params()).finish()
    engine.model.remove_taps()
    assert max(kept(path).verify_s[0]) < 5.0
