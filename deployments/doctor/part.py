"""`wingbeat doctor` among the commands; every process that reads settings imports this, so that it loads no typer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.cli.local import OpenEngine


def add_commands(app: "typer.Typer", open_engine: "OpenEngine") -> None:
    """Add the command, which reads its own arguments once it runs."""
    import typer

    from wingbeat.deployments.cli.commands import READS_LATER, JsonOption, run_now

    def doctor(context: typer.Context) -> None:
        """Say what this machine can serve with, part by part."""
        from wingbeat.deployments.doctor.options import DoctorConfig

        def run(config: DoctorConfig, as_json: JsonOption = False) -> None:
            """Say what this machine can serve with, part by part; exit code 1 where a part has failed."""
            from wingbeat.deployments.doctor.command import doctor_command

            raise typer.Exit(doctor_command(config, as_json, open_engine))

        run_now(context, DoctorConfig, run, arguments=("model", "drafter"))

    app.command("doctor", context_settings=READS_LATER)(doctor)
