"""Curves of a training run: a PNG of loss and acceptance, and TensorBoard event files; both need optional packages."""

from pathlib import Path
from typing import Any, Self

from wingbeat.runtime.recordings.format import write_atomically
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.evaluation import HeadAcceptance
from wingbeat.runtime.training.state import TrainingState

CURVES_FILE = "curves.png"
EVENTS_FOLDER = "tensorboard"
_SMOOTHED_SHARE = 0.05


class Curves:
    """Writes the curves that the config requests; a context manager that closes the event file.

    Args:
        config: settings of the run.
        first_step: step at which this process starts; TensorBoard drops the events that a killed run wrote for this
            step and later steps.
        enabled: False writes nothing; False in all processes of a run except the first.
    """

    def __init__(self, config: TrainDrafterConfig, first_step: int, *, enabled: bool) -> None:
        self._image = config.output / CURVES_FILE if config.plot and enabled else None
        self._writer: Any = None
        if config.tensorboard and enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(config.output / EVENTS_FOLDER), purge_step=first_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def loss(self, step: int, loss: float, learning_rate: float) -> None:
        """Record the loss and learning rate of a step."""
        if self._writer is not None:
            self._writer.add_scalar("train/loss", loss, step)
            self._writer.add_scalar("train/learning_rate", learning_rate, step)

    def acceptance(self, step: int, acceptance: HeadAcceptance) -> None:
        """Record the acceptance that the engine measured before a step."""
        if self._writer is not None:
            self._writer.add_scalar("validation/tokens_per_round", acceptance.length, step)
            for depth, share in enumerate(acceptance.by_depth, 1):
                self._writer.add_scalar(f"validation/acceptance_depth_{depth}", share, step)

    def draw(self, state: TrainingState) -> None:
        """Draw the history so far as an image, and flush the event file."""
        if self._image is not None:
            write_atomically(self._image, lambda path: _draw(path, state))
        if self._writer is not None:
            self._writer.flush()


def _draw(path: Path, state: TrainingState) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if state.validations else 5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if state.validations else 1, squeeze=False)[0]
    steps, losses = zip(*state.losses, strict=True) if state.losses else ((), ())
    axes[0].plot(steps, losses, color="0.75", linewidth=1)
    axes[0].plot(steps, _smoothed(losses), color="C0", label="smoothed")
    axes[0].set(xlabel="step", ylabel="loss", title="training loss")
    if state.validations:
        _draw_acceptance(axes[1], state.validations)
    figure.savefig(path, format="png", dpi=120)


def _draw_acceptance(axis: Any, validations: list[tuple[int, HeadAcceptance]]) -> None:
    steps = [step for step, _ in validations]
    for depth in range(max(len(acceptance.by_depth) for _, acceptance in validations)):
        shares = [acceptance.by_depth[depth] for _, acceptance in validations]
        axis.plot(steps, shares, marker=".", label=f"depth {depth + 1}")
    length = axis.twinx()
    length.plot(steps, [acceptance.length for _, acceptance in validations], color="black", linestyle="--")
    length.set_ylabel("tokens per round (dashed)")
    axis.set(xlabel="step", ylabel="right, given those before", ylim=(0, 1), title="acceptance, measured by the engine")
    axis.legend(fontsize="small")


def _smoothed(losses: tuple[float, ...]) -> list[float]:
    """Exponential moving average of the losses, with a horizon of about a twentieth of the run."""
    rate = 1 / max(1.0, _SMOOTHED_SHARE * len(losses))
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else smooth[-1] + rate * (loss - smooth[-1]))
    return smooth
