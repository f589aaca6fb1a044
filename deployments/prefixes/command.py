"""`wingbeat prefix`: manages saved prefixes of a running server, over HTTP."""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.deployments.cli.commands import new_app
from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.cli.server_calls import LOCAL, AsJson, Key, Url, call_server

PATH = "/v1/prefixes"
COLUMNS = ("name", "model", "tokens", "blocks", "bytes", "engines", "saved")

Name = Annotated[str, typer.Argument(help="Name of the prefix.", show_default=False)]


def add_commands(app: typer.Typer) -> None:
    """Add `wingbeat prefix`."""
    prefix = new_app("Saved prefixes, such as system prompts, of a running server.")
    app.add_typer(prefix, name="prefix")

    @prefix.command()
    def save(
        name: Name,
        system: Annotated[Path | None, typer.Option(help="File with the text of a system message.")] = None,
        messages: Annotated[
            Path | None,
            typer.Option(
                help="JSON file with a list of messages, or an object with messages, tools, chat_template_kwargs."
            ),
        ] = None,
        prompt: Annotated[Path | None, typer.Option(help="File with a text for completions.")] = None,
        model: Annotated[str | None, typer.Option(help="The model, or a LoRA adapter's name.")] = None,
        replace: Annotated[bool, typer.Option("--replace", help="Replace an existing prefix of that name.")] = False,
        url: Url = LOCAL,
        operator_key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        """Compute a prefix of prompts, pin its keys and values, and save the prefix on disk."""
        given = {"--system": system, "--messages": messages, "--prompt": prompt}
        files = [(option, file) for option, file in given.items() if file is not None]
        if len(files) != 1:
            raise UserError("give one of --system, --messages and --prompt")
        body = {"name": name, **_content(*files[0])}
        body |= {} if model is None else {"model": model}
        body |= {"replace": True} if replace else {}
        _show([call_server(url, operator_key, "POST", PATH, body)], as_json)

    @prefix.command()
    def load(
        name: Name,
        replace: Annotated[bool, typer.Option("--replace", help="Replace an existing prefix of that name.")] = False,
        url: Url = LOCAL,
        operator_key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        """Load a prefix from its files in the server's prefix_dir, and pin it."""
        body = {"name": name} | ({"replace": True} if replace else {})
        _show([call_server(url, operator_key, "POST", PATH, body)], as_json)

    @prefix.command("list")
    def list_prefixes(url: Url = LOCAL, operator_key: Key = None, as_json: AsJson = False) -> None:
        """Show all saved prefixes."""
        answer = call_server(url, operator_key, "GET", PATH)
        if as_json:
            print(json.dumps(answer))
            return
        _show(answer["data"], as_json)
        print(f"{answer['pinned_tokens']} of {answer['max_pinned_tokens']} tokens are pinned")

    @prefix.command()
    def delete(name: Name, url: Url = LOCAL, operator_key: Key = None) -> None:
        """Unpin a prefix and delete its files."""
        call_server(url, operator_key, "DELETE", f"{PATH}/{quote(name, safe='')}")
        print(f"{name} is deleted")


def _content(option: str, file: Path) -> dict[str, Any]:
    """Return the content of a file as fields of the request's body."""
    try:
        text = file.read_text(encoding="utf-8")
        if option == "--prompt":
            return {"prompt": text}
        if option == "--system":
            return {"messages": [{"role": "system", "content": text}]}
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {file} cannot be read: {error}") from error
    if isinstance(found, list):
        return {"messages": found}
    if not isinstance(found, dict) or "messages" not in found:
        raise UserError(f"{option} {file} holds neither a list of messages nor an object with messages")
    return found


def _show(prefixes: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(prefixes[0]))
        return
    table = Table(*COLUMNS, box=None)
    for prefix in prefixes:
        table.add_row(*(str(prefix[column] if prefix[column] is not None else "-") for column in COLUMNS))
    Console(soft_wrap=True).print(table)
