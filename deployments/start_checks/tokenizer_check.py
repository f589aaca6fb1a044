"""Checks a checkpoint's tokenizer.json without transformers."""

from pathlib import Path

from tokenizers import Tokenizer

from wingbeat.runtime.folder_kinds import VOCABULARIES, pointer_problem
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.tokenizer_file import FILE, SETTINGS, no_tokenizer


def check_tokenizer_file(folder: Path, vocab_size: int | None) -> None:
    """Refuses a tokenizer that cannot be read, or that produces tokens without an embedding in the model.

    Added tokens may be beyond the model's vocabulary, unless every prompt contains such a token. Many checkpoints have
    such tokens for padding or images; only requests that contain such a token are refused. A folder without
    tokenizer.json is left to transformers, which reads other formats.

    Args:
        vocab_size: number of rows of the model's embedding; None if the config does not define the number.

    Raises:
        ModelCheckpointError: the tokenizer is refused; the message is one line that names the file.
    """
    file = folder / FILE
    # Some tokenizers have files with other names, or need only a settings file.
    if not any((folder / name).is_file() for name in (*VOCABULARIES, SETTINGS)) and not any(folder.glob("*.model")):
        raise ModelCheckpointError(no_tokenizer(folder))
    if not file.exists():
        return
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        if (pointer := pointer_problem(file)) is not None:
            raise ModelCheckpointError(pointer) from error
        reason = " ".join(str(error).split())[:200]
        raise ModelCheckpointError(f"tokenizer {file} cannot be read: {reason}") from error
    last = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if vocab_size is not None and last >= vocab_size:
        raise ModelCheckpointError(
            f"tokenizer {file} has token ids up to {last}, the model's embedding has {vocab_size} rows: the two do not "
            "belong together"
        )
    around = [token_id for token_id in tokenizer.encode("").ids if vocab_size is not None and token_id >= vocab_size]
    if around:
        raise ModelCheckpointError(
            f"tokenizer {file} puts token id {around[0]} around every prompt, the model's embedding has {vocab_size} "
            "rows"
        )
