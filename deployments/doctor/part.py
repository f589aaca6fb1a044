"""Registers `wingbeat doctor`.

Typer is not imported here, because every process that reads settings imports this file.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.doctor.options import DoctorConfig


def add_commands(app: "typer.Typer") -> None:
    """Add the command, which parses its arguments when it runs."""
    import typer

    from wingbeat.deployments.cli.late_commands import JsonOption, add_late_command

    def doctor(config: "DoctorConfig", as_json: JsonOption = False) -> None:
        """Check part by part whether this machine can serve; exit code 1 if a part has failed."""
        from wingbeat.deployments.doctor.command import doctor_command
        from wingbeat.deployments.local.engine import open_engine

        raise typer.Exit(doctor_command(config, as_json, open_engine))

    options = "wingbeat.deployments.doctor.options:DoctorConfig"
    add_late_command(app, "doctor", options, doctor, arguments=("model", "drafter"))
