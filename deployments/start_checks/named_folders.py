"""Early check for missing folders on a command line, for commands whose options take seconds to import."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from wingbeat.deployments.cli.options import UserError
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.hub import HubName

_OPTIONS = ("--model", "--drafter")


def check_named_folders(args: Sequence[str], takes_folder: bool = False) -> None:
    """Raises an error if the value of a model or drafter option can only be a folder, and the folder does not exist.

    Values that may be something else, such as `mtp`, an import path or a name on the hub, are not checked here.

    Args:
        takes_folder: whether the first word of the arguments is a folder too.

    Raises:
        UserError: the message is one line that names the folder.
    """
    is_folder = takes_folder and bool(args) and not args[0].startswith("-") and not Path(args[0]).exists()
    if is_folder and (problem := folder_problem(args[0])) is not None:
        raise UserError(problem)
    for setting, word in _named(args):
        is_path = word.startswith((".", "~", "/")) or ("/" in word and HubName.parse(word) is None)
        if is_path and not Path(word).exists():
            raise UserError(f"{setting} is {word!r}: {folder_problem(word)}")


def _named(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(args):
        option, sign, value = word.partition("=")
        if option in _OPTIONS and (sign or index + 1 < len(args)):
            yield option.removeprefix("--"), value if sign else args[index + 1]
