"""`wingbeat drafter`: manages versions of the draft head of a running server, over HTTP."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.deployments.cli.commands import new_app
from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.cli.server_calls import LOCAL, AsJson, Key, Url, call_server

PATH = "/v1/drafter"
COLUMNS = ("version", "state", "source", "tokens per round", "95 %", "rounds", "why")


def add_commands(app: typer.Typer) -> None:
    """Add `wingbeat drafter`."""
    drafter = new_app("Versions of the draft head of a server that learns.")
    app.add_typer(drafter, name="drafter")

    @drafter.command("list")
    def list_versions(url: Url = LOCAL, operator_key: Key = None, as_json: AsJson = False) -> None:
        """Show all versions, the acceptance of each version's drafts, and which version is served."""
        _show(call_server(url, operator_key, "GET", PATH), as_json)

    @drafter.command()
    def promote(
        version: Annotated[
            int | None, typer.Argument(help="Number of an existing version.", show_default=False)
        ] = None,
        folder: Annotated[str | None, typer.Option(help="Add a head from this folder below `incoming`.")] = None,
        reason: Annotated[str | None, typer.Option(help="Reason, shown with the version.")] = None,
        url: Url = LOCAL,
        operator_key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        """Serve a version from now on."""
        if (version is None) == (folder is None):
            raise UserError("give a version or --folder")
        body = {"version": version, "folder": folder, "reason": reason}
        _show(call_server(url, operator_key, "POST", PATH + "/promote", body), as_json)

    @drafter.command()
    def rollback(
        reason: Annotated[str | None, typer.Option(help="Reason, shown with the version.")] = None,
        url: Url = LOCAL,
        operator_key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        """Serve the version before the current one."""
        _show(call_server(url, operator_key, "POST", PATH + "/rollback", {"reason": reason}), as_json)

    @drafter.command()
    def repair(url: Url = LOCAL, operator_key: Key = None, as_json: AsJson = False) -> None:
        """Replace a ledger that cannot be read by a new one, built from the heads on disk."""
        _show(call_server(url, operator_key, "POST", PATH + "/repair", {}), as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table(box=None)
    for name in COLUMNS:
        table.add_column(name, no_wrap=name != COLUMNS[-1])
    for version in answer["versions"]:
        found = version["acceptance"]
        name = f"{version['number']} (served)" if version["number"] == answer["served"] else str(version["number"])
        measured = ("-", "-", "-")
        if found is not None:
            between = "-" if found["low"] is None else f"{found['low']:.3f} to {found['high']:.3f}"
            measured = (f"{found['length']:.3f}", between, str(found["rounds"]))
        table.add_row(name, version["state"], version["source"], *measured, version["reason"] or "-")
    Console(soft_wrap=True).print(table)
    learner, last = answer["learner"], answer["last_decision"]
    if learner is not None:
        print(f"learner: {learner['state']}, {learner['steps']} steps, {learner['samples']} requests held")
    for engine_id, recording in answer["recording"].items():
        if recording is not None and recording["stopped"] is not None:
            print(f"{engine_id} records nothing for now: {recording['stopped']}")
    if last is not None:
        print(f"last decision: {last['what']}: {last['reason']}")
