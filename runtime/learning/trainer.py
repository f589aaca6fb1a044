"""Trains a head step by step on recorded rounds on disk, while rounds are added and removed."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wingbeat.runtime.heads.files import read_shapes
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.learning.heads import family_name, load_head, training_config
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.recordings.format import RecordingError
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import HELD, TRAIN
from wingbeat.runtime.recordings.stored_files import make_private_folder
from wingbeat.runtime.tensor_files import SAFETENSORS
from wingbeat.runtime.training.families import FAMILIES
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.loop import autocast
from wingbeat.runtime.training.optimizers import build_optimizers
from wingbeat.runtime.training.parallel import Part
from wingbeat.runtime.training.sources import RecordedSource
from wingbeat.runtime.training.state import STATE_FILE, TrainingState

_WHOLE = Part(0, 1)
_GRADIENT_NORM = 1.0
_LENT = ("embed_tokens.weight", "lm_head.weight")
AVERAGE_STEP = 0.03
"""Weight of the latest parameters in the moving average, which therefore covers about the last 30 steps."""
LEAST_PACE = 1 / 16
_CPU = torch.device("cpu")


class OnlineTrainer:
    """Trains one head with the loss of its family.

    Raises:
        CheckpointError: the head cannot be read, or belongs to another verifier.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.target = TargetDescription.from_checkpoint(settings.verifier)
        self._fingerprint = checkpoint_fingerprint(settings.verifier)
        self.name = family_name(settings.configured_head)
        self.family = FAMILIES[self.name]
        self.source: RecordedSource | None = None
        self.held: RecordingReader | None = None
        there = read_shapes(settings.configured_head)
        self._own = {part for part in _LENT if any(name.endswith(part) for name in there)}
        """Matrices that the files of this head contain, although files of its family usually omit them because they
        equal the verifier's.
        """
        self.pace = 1.0
        """Factor of the learning rate. The factor is adapted because large steps improve an untrained head, but worsen
        a well-trained head.
        """
        self._start(settings.configured_head)
        self.chain = self.family.chain(self.config)

    def _start(self, folder: Path) -> None:
        self.head: TrainedHead = self.family.free(load_head(folder, self.target))
        self.config = training_config(self.settings, self.name, self.head)
        self._loss: nn.Module = self.family.loss(self.head, self.config)
        self._optimizers = build_optimizers(self.head, self.config.learning_rate)
        self.state = TrainingState(self.head, self._optimizers)
        # Moving average of the parameters, which is what is exported: the learning rate does not decay, so the latest
        # parameters are noisy.
        self._average = {name: part.detach().clone() for name, part in self._trained()}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, part) for name, part in self.head.named_parameters() if part.requires_grad]

    def restart(self, folder: Path) -> None:
        """Restarts training from the head in `folder`, and discards all progress."""
        self._start(folder)

    def change_pace(self, better: bool) -> None:
        """Doubles the learning rate if the last candidate was better, and halves it if the candidate was not better."""
        self.pace = min(max(self.pace * (2.0 if better else 0.5), LEAST_PACE), 1.0)

    def resume(self) -> int | None:
        """Continues from the last checkpoint.

        Returns the version from which its training started, or None if there is no checkpoint.
        """
        path = self.settings.work / STATE_FILE
        if not path.is_file():
            return None
        try:
            own = self.state.load(path, self.config, _CPU)
            self.pace, self._average, base = own["pace"], own["average"], own["base"]
        # any exception is caught; if another version of Wingbeat wrote the checkpoint, its training progress is lost
        except Exception:
            path.unlink(missing_ok=True)
            raise
        return base

    def save(self, base: int) -> None:
        """Writes a checkpoint of training that started from version `base`."""
        make_private_folder(self.settings.work)
        own = {"base": base, "pace": self.pace, "average": self._average}
        self.state.save(self.settings.work / STATE_FILE, self.config, own)

    def refresh(self) -> None:
        """Opens the recorded rounds again; if there are none, `source` or `held` is None."""
        self.source, self.held = self._open_train(), self._open_held()

    def _open_train(self) -> RecordedSource | None:
        folder = self.settings.rounds / TRAIN
        try:
            return RecordedSource(self.config, folder, self.settings.verifier, self.head.tap_layers, _CPU, True)
        except RecordingError:  # there are no shards, or a shard was removed while the folder was read
            return None

    def _open_held(self) -> RecordingReader | None:
        try:
            reader = RecordingReader(self.settings.rounds / HELD)
        except RecordingError:
            return None
        reader.check_verifier(self._fingerprint)
        return reader

    def step(self) -> float:
        """Runs one optimizer step; returns its CPU seconds.

        Raises:
            FloatingPointError: the loss is not finite.
            RecordingError: a shard was removed; call `refresh`.
        """
        began, state, config = time.process_time(), self.state, self.config
        found = self.source.inputs(state.step, _WHOLE)
        inputs = self.family.inputs(config, found, state.step, _WHOLE)
        with autocast(config):
            loss = self._loss(*inputs.tensors)
        loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {state.step}")
        nn.utils.clip_grad_norm_(self.head.parameters(), _GRADIENT_NORM)
        rate = self.pace * config.learning_rate * min(1.0, (state.step + 1) / (config.warmup_steps + 1))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, part in self._trained():
                self._average[name].lerp_(part, AVERAGE_STEP)
        seconds = time.process_time() - began
        state.record(value, inputs.num_tokens, state.seconds + seconds, config.log_interval_steps)
        return seconds

    def export(self, folder: Path) -> None:
        """Writes the head with its averaged weights, in the format that drafters load."""
        with self.averaged():
            self._write(folder)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the averaged weights into the head while the `with` block runs."""
        latest = {name: part.detach().clone() for name, part in self._trained()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(latest)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, part in self._trained():
            part.copy_(values[name])

    def _write(self, folder: Path) -> None:
        self.family.export(self.head, self.config, self.settings.verifier, folder)
        file = folder / SAFETENSORS
        tensors = load_file(file)
        for name in self._own - tensors.keys():
            tensors[name] = self.head.get_parameter(name).detach().to(torch.bfloat16).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
