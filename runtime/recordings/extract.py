"""Implementation of `wingbeat extract`: runs texts through an engine, and records the data on which a drafter is
trained.

The serving engine generates the answers and computes the hidden states in the same passes. Each text is therefore
computed only once, with the weights in the form in which they are served.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.corpus import split_files
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.pair import PairSettings, engine_of_pair, most_threads
from wingbeat.runtime.recordings.extract_config import MIN_ANSWER, ExtractConfig
from wingbeat.runtime.recordings.format import DTYPES, Record, RecordingIndex, RecordingSpec
from wingbeat.runtime.recordings.live import FinishedSequence, LiveRecording
from wingbeat.runtime.recordings.live_writer import record_of
from wingbeat.runtime.recordings.progress import RunProgress
from wingbeat.runtime.recordings.recording_sources import (
    CorpusSource,
    PromptSource,
    Sampling,
    TextSource,
    read_prompts,
)
from wingbeat.runtime.recordings.token_windows import encode_documents
from wingbeat.runtime.recordings.writer import RecordingFull, RecordingWriter
from wingbeat.runtime.scheduling.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_TEXT_SETTINGS = ("sequence_length", "own_share", "greedy_fraction", "temperature", "dtype", "seed")
"""Settings that determine the recorded sequences, in addition to the fields of `RecordingSpec`."""
_HELD_SHARDS = 8
"""Maximum size, in shards, of the finished sequences that wait in memory. A finished sequence waits for all sequences
with lower numbers, because shards contain the sequences in order. At this limit no further sequence is begun.
"""


class ExtractResult(NamedTuple):
    """Result of a run."""

    index: RecordingIndex
    stopped: str | None
    """Reason for stopping before all sequences were recorded; None if all were recorded."""
    num_prompts_left_out: int


def extract(config: ExtractConfig) -> ExtractResult:
    """Records the missing sequences of `config.sequences`.

    A run that was killed and is started again continues with the same sequences.

    Raises:
        FileNotFoundError: the demo's checkpoint, or the checkpoint's weights, do not exist.
        ValueError: model, text and settings do not fit each other, or the folder holds another recording.
    """
    folder = config.model_folder()
    # if the model cannot be read, this raises the error before the texts are encoded
    TargetDescription.from_checkpoint(folder)
    source = _source(config, folder)
    engine = _engine(config, folder)
    loaded = engine.loaded
    spec = RecordingSpec(
        verifier=folder.resolve().name,
        fingerprint=checkpoint_fingerprint(folder),
        tap_layers=engine.needs.tap_layers,
        hidden_size=loaded.hidden_size,
        num_layers=len(loaded.layers),
        vocab_size=loaded.vocab_size,
        taps_dtype=config.taps_dtype,
        top_k=config.top_k,
        logits_dtype=config.dtype,
        settings=config.model_dump(mode="json", include=set(_TEXT_SETTINGS))
        | {"source": "prompts" if config.prompts else "corpus", "text_digest": source.digest},
    )
    writer = RecordingWriter(config.output, spec, config.max_bytes)
    total = min(config.sequences, source.num_starts or config.sequences)
    stopped = None
    try:
        _Extraction(config, engine, source, writer, total).run()
        writer.finish()
    except RecordingFull as full:
        stopped = str(full)
    return ExtractResult(writer.index, stopped, getattr(source, "num_left_out", 0))


class _Sequences:
    """Sink for the recorder; holds finished sequences by request id."""

    is_open = True

    def __init__(self) -> None:
        self.ended: dict[str, FinishedSequence] = {}

    def reserve(self, num_bytes: int) -> bool:
        """Always returns True, because the number of running and waiting sequences already limits the memory."""
        return True

    def give_back(self, num_bytes: int, dropped: bool) -> None:
        """Does nothing, because the recorder calls this method only for sequences without rows, which hold no
        memory.
        """

    def put(self, sequence: FinishedSequence) -> None:
        """Keeps the sequence until the engine has returned the sequence's last tokens."""
        self.ended[sequence.request_id] = sequence


class _Extraction:
    """Runs the missing sequences through an engine and writes them into shards, in order of the sequences' numbers."""

    def __init__(
        self, config: ExtractConfig, engine: Engine, source: TextSource, writer: RecordingWriter, total: int
    ) -> None:
        self.config, self.engine, self.source, self.writer, self.total = config, engine, source, writer, total
        self.begun = writer.num_sequences
        self.sequences = _Sequences()
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        """By request id of a running sequence: the log-probabilities of all tokens of the sequence but the first."""
        self.held: dict[int, Record] = {}
        """Finished sequences by number; a sequence is kept until all sequences before it are written."""

    def run(self) -> None:
        """Runs all missing sequences.

        Raises RecordingFull if the next shard exceeds the size limit; all earlier shards are then complete.
        """
        config, engine, writer = self.config, self.engine, self.writer
        spec = writer.index.spec
        kept = LiveRecording(self.sequences, 1.0, spec.taps_size, DTYPES[spec.taps_dtype], min_tokens=1)
        engine.observe(kept)
        flush_at, begun_at, num_tokens = time.monotonic() + config.shard_interval_s, time.monotonic(), 0
        with RunProgress("extract", self.total, writer.num_sequences) as progress:
            self._admit()
            while engine.has_unfinished_requests():
                for output in engine.step():
                    num_tokens += len(output.token_ids)
                    self._take(output)
                self._write()
                if writer.num_pending_bytes >= config.shard_bytes or time.monotonic() > flush_at:
                    writer.flush()
                    flush_at = time.monotonic() + config.shard_interval_s
                rate = num_tokens / (time.monotonic() - begun_at)
                progress.show(writer.num_sequences + writer.num_pending, f"{rate:,.0f} new tok/s")
                self._admit()
            writer.flush()

    def _admit(self) -> None:
        """Begins further sequences as long as slots are free."""
        waiting = sum(len(record.token_ids) for record in self.held.values()) * self.writer.index.spec.bytes_per_token
        if self.held and waiting >= _HELD_SHARDS * self.config.shard_bytes:
            return
        while self.begun < self.total and len(self.logprobs) < self.config.batch_size:
            start = self.source.start(self.begun)
            prompt = start.token_ids[: self.engine.config.max_model_len - 1].tolist()
            params = SamplingParams(
                # The last token of a text has no row of taps, so one extra token is generated and then dropped.
                max_tokens=min(start.length + 1, self.engine.config.max_model_len) - len(prompt),
                temperature=start.temperature,
                seed=start.seed,
                ignore_eos=not self.source.stops,
                logprobs=self.config.top_k,
                prompt_logprobs=self.config.top_k,
            )
            self.logprobs[str(self.begun)] = []
            self.engine.add_request(Request(str(self.begun), tuple(prompt), params))
            self.begun += 1

    def _take(self, output: RequestOutput) -> None:
        """Adds a round's output to its sequence; makes the record if the sequence has finished.

        Raises:
            RuntimeError: the engine could not compute the sequence.
        """
        if output.failure is not None or output.finish_reason is FinishReason.ABORT:
            raise RuntimeError(f"sequence {output.request_id}: {output.failure or 'it was aborted'}")
        logprobs = self.logprobs[output.request_id]
        logprobs += (*output.prompt_logprobs, *output.logprobs)
        if output.finish_reason is not None:
            number = int(output.request_id)
            sequence = self.sequences.ended.pop(output.request_id)
            start, record = self.source.start(number), record_of(sequence)
            learnt = torch.arange(len(record.token_ids)) >= start.num_unlearnt
            tops = self._tops(logprobs[: len(record.token_ids)])
            self.held[number] = record._replace(loss_mask=learnt, **tops)
            del self.logprobs[output.request_id]

    def _tops(self, logprobs: list[TokenLogprob]) -> dict[str, Tensor]:
        """The likeliest tokens of each row. Log-probabilities are stored as logits whose logsumexp is 0."""
        if not self.config.top_k:
            return {}
        top = torch.tensor([one.top[: self.config.top_k] for one in logprobs], dtype=torch.float64)
        return {
            "top_ids": top[..., 0].int(),
            "top_logits": top[..., 1].to(DTYPES[self.config.dtype]),
            "logsumexp": torch.zeros(len(top)),
        }

    def _write(self) -> None:
        """Passes finished records to the writer in order, up to the first sequence that has not finished."""
        while (record := self.held.pop(self.writer.num_sequences + self.writer.num_pending, None)) is not None:
            self.writer.add(record)


def _engine(config: ExtractConfig, folder: Path) -> Engine:
    """Engine of the verifier, without a drafter, that taps the recorded layers."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    limits = EngineConfig(
        max_num_seqs=config.batch_size,
        max_model_len=config.sequence_length + 1,
        lower_max_model_len=True,
        # no prefix caching, because tokens of cached prefixes are not computed, so their hidden states could not be
        # recorded
        enable_prefix_caching=False,
    )
    settings = PairSettings(
        model=folder,
        drafter=parse_drafter("none", folder),
        engine=limits,
        dtype=getattr(torch, config.dtype),
        most_threads=most_threads(config.threads),
    )

    def needs(_: object, loaded: LoadedModel) -> DrafterNeeds:
        _check_fits(config, loaded)
        return DrafterNeeds(tap_layers=config.tap_layers or default_tap_layers(len(loaded.layers)))

    return engine_of_pair(settings, device, needs).engine


def _source(config: ExtractConfig, folder: Path) -> TextSource:
    sampling = Sampling(config.greedy_fraction, config.temperature, config.seed)
    if config.prompts is not None:
        prompts = read_prompts(config.prompts, Tokenizer.load(folder))
        return PromptSource(prompts, config.sequence_length, MIN_ANSWER, sampling)
    tokenizer = Tokenizer.load(folder).hugging_face
    # Files that training runs hold out are not recorded.
    documents = encode_documents(tokenizer, split_files(config.corpus, config.suffixes).train)
    return CorpusSource(documents, config.sequence_length, config.own_share, sampling)


def _check_fits(config: ExtractConfig, loaded: LoadedModel) -> None:
    if config.sequence_length > loaded.max_position_embeddings:
        positions = loaded.max_position_embeddings
        raise ValueError(f"sequence_length={config.sequence_length}: the verifier supports {positions} positions")
    if config.top_k > loaded.vocab_size:
        raise ValueError(f"top_k={config.top_k}: the verifier's vocabulary has {loaded.vocab_size} tokens")
