"""`wingbeat weights`: manages the weights of a running server, over HTTP."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.deployments.cli.commands import new_app
from wingbeat.deployments.cli.server_calls import LOCAL, AsJson, Key, Url, call_server

PATH = "/v1/weights"
UPDATE_S = 6 * 3600.0
"""Maximum seconds until all replicas, one after the other, have finished their requests and loaded the new weights."""
COLUMNS = ("model", "engine", "state", "weights", "folder")


def add_commands(app: typer.Typer) -> None:
    """Add `wingbeat weights`."""
    weights = new_app("The verifier's weights on a running server.")
    app.add_typer(weights, name="weights")

    @weights.command()
    def show(url: Url = LOCAL, operator_key: Key = None, as_json: AsJson = False) -> None:
        """Show which weights each replica serves."""
        answer = call_server(url, operator_key, "GET", PATH)
        _show(answer, answer["data"], as_json)

    @weights.command()
    def update(
        folder: Annotated[
            Path,
            typer.Argument(help="Checkpoint of the same model, on the machine of each replica.", show_default=False),
        ],
        model: Annotated[str | None, typer.Option(help="Model to update, if several are served.")] = None,
        drain_s: Annotated[
            float | None,
            typer.Option(
                min=0, max=600, help="Seconds that running requests of a replica have to finish; 60 by default."
            ),
        ] = None,
        url: Url = LOCAL,
        operator_key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        """Have all replicas, one after the other, load and serve the weights in a folder; no request is lost."""
        # The path is not resolved here, because symbolic links must be resolved on the machines of the replicas.
        body = {"folder": str(folder.absolute()), "model": model, "drain_s": drain_s}
        answer = call_server(url, operator_key, "POST", PATH + "/update", body, UPDATE_S)
        _show(answer, [answer], as_json)


def _show(answer: dict[str, Any], cards: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table(box=None)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    for card in cards:
        for engine_id, said in card["engines"].items():
            shown = said or {"state": "does not answer", "weights": "-", "folder": "-"}
            weights = shown["weights"] or "of the settings"
            table.add_row(card["model"], engine_id, shown["state"], weights, shown["folder"])
    Console(soft_wrap=True).print(table)
