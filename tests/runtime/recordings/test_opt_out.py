"""Nothing of a request that opts out, or whose cache is its own, is on disk: the files are read byte by byte."""

import pytest
import torch

from tests.runtime.models import Run, eagle_drafter, engine_config, greedy_params, new_engine, reference
from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import LiveRecording
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import HELD, TRAIN, RingWriter, RoundRing

TAPS = (1, 2, 3)
TOKENS = 24
KEPT, OPTED_OUT, SALTED = (0, 3), (1, 4), (2, 5)


@pytest.fixture
def stored(tmp_path):
    """Recording of six requests: the tokens of each by number, and the folder."""
    ref = reference("llama")
    spec = RecordingSpec(
        verifier="llama",
        fingerprint="f",
        tap_layers=TAPS,
        hidden_size=ref.loaded.hidden_size,
        num_layers=len(ref.loaded.layers),
        vocab_size=ref.loaded.vocab_size,
        taps_dtype="float32",
        top_k=0,
        logits_dtype="float32",
        settings={"source": "live"},
    )
    writer = RingWriter(RoundRing(tmp_path, 10**8, 1e6), spec)
    config = engine_config()
    engine = new_engine(ref.loaded, config, eagle_drafter(ref.loaded, config.speculation))
    engine.observe(LiveRecording(writer, 1.0, spec.taps_size, torch.float32))
    params = [
        greedy_params(TOKENS, learn=number not in OPTED_OUT, cache_salt="own" if number in SALTED else "")
        for number in range(6)
    ]
    tokens = Run(engine, ref.prompts[:6], params).finish()
    engine.model.remove_taps()
    writer.close()
    return [prompt + more for prompt, more in zip(ref.prompts[:6], tokens, strict=True)], tmp_path


def test_only_requests_that_may_be_learnt_from_are_in_the_files(stored):
    texts, folder = stored
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert files

    def is_there(text):
        return any(torch.tensor(text, dtype=torch.int32).numpy().tobytes() in content for content in files)

    for number, text in enumerate(texts):
        piece = text[-12:-4]  # of the answer, computed before its end
        assert is_there(piece) == (number in KEPT), f"request {number}"


def test_records_are_those_requests_and_no_others(stored):
    texts, folder = stored
    records = []
    for part in (TRAIN, HELD):
        if any((folder / part).glob("*/index.json")):
            records += [record.token_ids.tolist() for record in RecordingReader(folder / part).records()]
    assert len(records) == len(KEPT)
    for record in records:
        assert any(texts[number][: len(record)] == record for number in KEPT)
