"""`wingbeat doctor` among the commands; every process that reads settings imports this, so that it loads no typer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.doctor.options import DoctorConfig


def add_commands(app: "typer.Typer") -> None:
    """Add the command, which reads its own arguments once it runs."""
    import typer

    from wingbeat.deployments.cli.commands import JsonOption, add_late_command

    def doctor(config: "DoctorConfig", as_json: JsonOption = False) -> None:
        """Say what this machine can serve with, part by part; exit code 1 where a part has failed."""
        from wingbeat.deployments.doctor.command import doctor_command
        from wingbeat.deployments.local.engine import open_engine

        raise typer.Exit(doctor_command(config, as_json, open_engine))

    options = "wingbeat.deployments.doctor.options:DoctorConfig"
    add_late_command(app, "doctor", options, doctor, arguments=("model", "drafter"))
