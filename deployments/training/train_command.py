"""`wingbeat train drafter`."""

import typer

from wingbeat.deployments.cli.commands import Command, new_app
from wingbeat.deployments.cli.options import UserError, model_command
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig


def train_app() -> typer.Typer:
    """Return the typer application `wingbeat train` with its subcommands."""
    app = new_app("Train a draft head for a verifier.")

    def drafter(config: TrainDrafterConfig) -> None:
        """Train a draft head for a verifier."""
        import torch
        from transformers.utils import logging as transformers_logging

        from wingbeat.cluster.channels.channel import InProcessChannel
        from wingbeat.runtime.training.drafter import train_drafter

        # Probabilities of unlikely tokens are often denormal, and CPUs compute with denormals up to 25 times as slowly.
        # torch's threads inherit this setting only if they start after it.
        torch.set_flush_denormal(True)
        transformers_logging.disable_progress_bar()
        try:
            train_drafter(config, channel_factory=InProcessChannel)
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error

    app.command("drafter", cls=Command)(model_command(TrainDrafterConfig, drafter))
    app.callback()(lambda: None)  # without a callback, typer would merge the only subcommand into the application
    return app
