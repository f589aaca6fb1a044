"""What `make docs` adds to the documents: the README and CONTRIBUTING as pages, settings, commands and the Python API.

A hook of mkdocs. The pages of settings and commands are generated from the code that reads them, so that no copy of a
default or an option stands in a document.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index": "README.md", "contributing": "CONTRIBUTING.md"}
"""Pages made of files of the root."""
API = {
    "The package": ("deployments.app.build", "deployments.offline.llm.LLM"),
    "The engine": ("runtime.engine.engine.Engine", "runtime.scheduling.request"),
    "A drafter of your own": ("runtime.drafters.base",),
    "Messages between verifier and drafter": ("runtime.protocol.messages",),
    "Channels": ("cluster.channels.channel",),
}
"""Modules and names of the API reference, by heading."""


def on_config(config: Any) -> Any:
    """Fill the navigation with the documents that exist: a deleted feature has none."""
    generated = {*PAGES, "settings", "cli", "api"}
    sections = config["extra"].pop("sections")
    there = {path.stem for path in (ROOT / "docs").glob("*.md")} | generated
    titles = {"api": "Python API", "cli": "Command line"}
    entry = lambda name: {titles[name]: f"{name}.md"} if name in titles else f"{name}.md"  # noqa: E731
    nav = {title: [entry(name) for name in names if name in there] for title, names in sections.items()}
    config["nav"] = [
        "index.md",
        *({title: pages if len(pages) > 1 else pages[0]} for title, pages in nav.items() if pages),
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, source in PAGES.items():
        files.append(File.generated(config, f"{name}.md", content=_moved(source, config["repo_url"])))
    files.append(File.generated(config, "settings.md", content=settings()))
    files.append(File.generated(config, "cli.md", content=commands()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the root into links to their page, or to the repository."""
    del files
    made_here = page.file.src_uri.removesuffix(".md") in PAGES
    return markdown if made_here else _outside(markdown, "../", config["repo_url"])


def _moved(source: str, repository: str | None) -> str:
    """A document of the root, as a page of docs/."""
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    return _outside(text, "", repository)


def _outside(text: str, above: str, repository: str | None) -> str:
    """A page whose links to the root's files lead to their page, or to the repository; without its address, nowhere."""
    for page, source in PAGES.items():
        text = re.sub(rf"\]\({re.escape(above + source)}(#[^)]*)?\)", rf"]({page}.md\1)", text)

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        path = target.partition("#")[0].removeprefix(above)
        if not target.startswith(above) or (ROOT / "docs" / path).exists() or not (ROOT / path).exists():
            return match[0]
        return f"[{words}]({repository.rstrip('/')}/blob/main/{path})" if repository else words

    return re.sub(r"(?<!!)\[([^]]*)\]\(((?![a-z]+:|#)[^)\s]+)\)", link, text)


def settings() -> str:
    """A table of every setting of the application: name, default, meaning, by the panels of `wingbeat serve --help`."""
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.parts import first_result

    panel = first_result("option_panel", AppConfig) or (lambda name: None)
    by_panel: dict[str, list[str]] = {}
    for name, field in AppConfig.model_fields.items():
        default = field.get_default(call_default_factory=False)
        shown = "" if default is None or default in ("", ()) or repr(default) == "PydanticUndefined" else f"`{default}`"
        row = f"| `{name}` | {shown} | {_cell(field.description or '')} |"
        by_panel.setdefault(panel(name) or "The most used", []).append(row)
    tables = (
        f"## {title}\n\n| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        for title, rows in by_panel.items()
    )
    introduction = (
        "Each setting is an option of `wingbeat serve` (`max_num_seqs` is `--max-num-seqs`), a key of the arguments of "
        "`wingbeat.build`, and a key of the YAML of `serve deploy`. An empty default is explained beside it."
    )
    return f"# Settings\n\n{introduction}\n\n" + "\n".join(tables)


def _cell(text: str) -> str:
    """Text within a table: angle brackets and bars are characters."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def commands() -> str:
    """The help of every command of `wingbeat`."""
    env = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}

    def shown(*words: str) -> str:
        program = "import sys; from wingbeat.deployments.cli.main import main; main(sys.argv[1:])"
        command = (sys.executable, "-P", "-c", program, *words, "--help")
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.rstrip()

    top = shown()
    names = re.findall(r"^  ([\w-]+) {2,}\S", top.partition("Commands:")[2], re.M)
    # Settings have a page of their own.
    parts = [f"## wingbeat {name}\n\n```text\n{shown(name)}\n```\n" for name in names if name != "serve"]
    return (
        f"# Command line\n\n```text\n{top}\n```\n\nOptions of `wingbeat serve` are the [settings](settings.md).\n\n"
        + ("\n".join(parts))
    )


def api() -> str:
    """Directives of mkdocstrings for the names of `API`."""
    parts = (f"## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in API.items())
    return "# Python API\n\n" + "\n\n".join(parts) + "\n"
