"""Run a verifier over text and keep what a drafter learns from: the work behind `wingbeat extract`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from wingbeat.runtime.corpus import encode_documents, split_files
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.extract_config import MIN_ANSWER, ExtractConfig
from wingbeat.runtime.recordings.format import DTYPES, Record, RecordingIndex, RecordingSpec
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.own_text import continue_texts, read_texts
from wingbeat.runtime.recordings.recording_sources import (
    CorpusSource,
    PromptSource,
    Sampling,
    Start,
    TextSource,
    read_prompts,
)
from wingbeat.runtime.recordings.writer import RecordingFull, RecordingWriter
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import end_of_text_ids

_TEXT_SETTINGS = (
    "sequence_length",
    "own_share",
    "greedy_fraction",
    "temperature",
    "batch_size",
    "shard_bytes",
    "dtype",
    "seed",
)
"""What decides the shards' content, beside what `RecordingSpec` has fields for."""


class ExtractResult(NamedTuple):
    """A run's end."""

    index: RecordingIndex
    stopped: str | None
    """Why it ended before all was recorded; None where all is."""
    num_prompts_left_out: int


def extract(config: ExtractConfig) -> ExtractResult:
    """Record what is missing of `config.sequences`. A run that was killed is continued with the same shards.

    Raises:
        FileNotFoundError: the demo's checkpoint, or the checkpoint's weights, are not there.
        ValueError: model, text or settings do not fit each other, or the folder holds another recording.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = config.model_folder()
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    verifier = FrozenVerifier(str(folder), config.tap_layers, device, DTYPES[config.dtype])
    source = _source(config, folder)
    _check_fits(config, verifier)
    spec = RecordingSpec(
        verifier=folder.resolve().name,
        fingerprint=checkpoint_fingerprint(folder),
        tap_layers=verifier.tap_layers,
        hidden_size=verifier.hidden_size,
        num_layers=verifier.num_layers,
        vocab_size=verifier.embedding.shape[0],
        taps_dtype=config.taps_dtype,
        top_k=config.top_k,
        logits_dtype=config.dtype,
        settings=config.model_dump(mode="json", include=set(_TEXT_SETTINGS))
        | {"source": "prompts" if config.prompts else "corpus", "text_digest": source.digest},
    )
    writer = RecordingWriter(config.output, spec, config.max_bytes)
    total = min(config.sequences, source.num_starts or config.sequences)
    stopped = None
    with _progress_bar() as bar:
        task = bar.add_task("extract", total=total, completed=writer.num_sequences)
        try:
            _fill(config, verifier, source, writer, total, lambda count: bar.advance(task, count))
            writer.finish()
        except RecordingFull as full:
            stopped = str(full)
    return ExtractResult(writer.index, stopped, getattr(source, "num_left_out", 0))


def _fill(
    config: ExtractConfig,
    verifier: FrozenVerifier,
    source: TextSource,
    writer: RecordingWriter,
    total: int,
    on_sequences: Callable[[int], None],
) -> None:
    """Write shards until there are `total` sequences.

    A shard begins where the ones before it end and is computed from its sequences' numbers alone, so it does not matter
    in which run it was written.

    Raises:
        RecordingFull: the next shard does not fit.
    """
    per_shard = max(1, config.shard_bytes // (writer.index.spec.bytes_per_token * config.sequence_length))
    if per_shard > config.batch_size:
        per_shard -= per_shard % config.batch_size
    while writer.num_sequences < total:
        begin = writer.num_sequences
        starts = [source.start(number) for number in range(begin, min(total, begin + per_shard))]
        # Before anything is computed; answers of unknown length are looked at again when they are there.
        given = sum(len(start.token_ids) if source.stops else start.length for start in starts)
        writer.check_room(given, len(starts))
        for record in _record(config, verifier, starts, source.stops, on_sequences):
            writer.add(record)
        writer.flush()


def _record(
    config: ExtractConfig,
    verifier: FrozenVerifier,
    starts: list[Start],
    stops: bool,
    on_sequences: Callable[[int], None],
) -> list[Record]:
    """The sequences of one shard, in their order; computed in batches of like lengths."""
    eos_token_ids = end_of_text_ids(verifier.model) if stops else frozenset()
    by_length = sorted(range(len(starts)), key=lambda number: (len(starts[number].token_ids), number))
    records: dict[int, Record] = {}
    for first in range(0, len(starts), config.batch_size):
        numbers = by_length[first : first + config.batch_size]
        batch = [starts[number] for number in numbers]
        texts = continue_texts(verifier, batch, eos_token_ids)
        seen = read_texts(verifier, texts, config.top_k, DTYPES[config.taps_dtype], DTYPES[config.dtype])
        for number, start, text, one in zip(numbers, batch, texts, seen, strict=True):
            learnt = torch.arange(len(text)) >= start.num_unlearnt
            records[number] = Record(text.int(), one.taps, learnt, 0, one.top_ids, one.top_logits, one.logsumexp)
        on_sequences(len(numbers))
    return [records[number] for number in range(len(starts))]


def _source(config: ExtractConfig, folder: Path) -> TextSource:
    sampling = Sampling(config.greedy_fraction, config.temperature, config.seed)
    if config.prompts is not None:
        prompts = read_prompts(config.prompts, Tokenizer.load(folder))
        return PromptSource(prompts, config.sequence_length, MIN_ANSWER, sampling)
    tokenizer = Tokenizer.load(folder).hugging_face
    # The files held out of every training run are held out here as well.
    documents = encode_documents(tokenizer, split_files(config.corpus, config.suffixes).train)
    return CorpusSource(documents, config.sequence_length, config.own_share, sampling)


def _check_fits(config: ExtractConfig, verifier: FrozenVerifier) -> None:
    text_config = verifier.model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and config.sequence_length > positions:
        raise ValueError(f"sequence_length={config.sequence_length}: the verifier has {positions} positions")
    if config.top_k > verifier.embedding.shape[0]:
        raise ValueError(f"top_k={config.top_k}: the verifier has {verifier.embedding.shape[0]} tokens")


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
