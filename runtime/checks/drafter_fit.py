"""Whether a drafter fits its verifier, told from configs, names and shapes alone: no weights are read."""

from pathlib import Path

from wingbeat.runtime.drafters.choice import CHECKPOINT, USER, DrafterChoice
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.load import check_head
from wingbeat.runtime.heads.one_pass.check import check_one_pass_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files, check_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config


def check_drafter_fits(choice: DrafterChoice, target: TargetDescription) -> int:
    """Refuse a drafter that could not be loaded beside this verifier.

    Returns:
        Values per position that it taps of the verifier, as far as that is known: 0 for a class of the user's own.

    Raises:
        ValueError: a file, a tensor or a size is wrong, or there is no such class; one line that names it.
    """
    if choice.kind == USER:
        from wingbeat.runtime.drafters.user import find_class

        find_class(str(choice.source))
        return 0
    if choice.kind == "mtp":
        from wingbeat.runtime.heads.mtp_loader import num_mtp_modules, why_no_modules

        if not num_mtp_modules(target):
            raise CheckpointError(why_no_modules(target))
        return target.hidden_size
    if choice.kind != CHECKPOINT:
        return 0
    kind = kind_of(choice.source)
    if kind in ("eagle", "one_pass"):
        return _check_head(kind, Path(choice.source), target)
    return _check_model(Path(choice.source), target)


def _check_head(kind: str, folder: Path, target: TargetDescription) -> int:
    embeds = any(name.endswith("embed_tokens.weight") for name in target.tensor_files)
    lends_head = (
        embeds if target.config.tie_word_embeddings else any(n.endswith("lm_head.weight") for n in target.tensor_files)
    )
    try:
        if kind == "one_pass":
            tap_layers = check_one_pass_head(folder, target, lends_embedding=embeds, lends_lm_head=lends_head)
        else:
            tap_layers = check_head(
                folder,
                target_hidden_size=target.hidden_size,
                target_num_layers=target.num_layers,
                target_vocab_size=target.vocab_size,
                lends_embedding=embeds,
                lends_lm_head=lends_head,
            ).tap_layers
    except CheckpointError as error:
        raise CheckpointError(f"drafter {folder}: {error}") from error
    return len(tap_layers) * target.hidden_size


def _check_model(folder: Path, target: TargetDescription) -> int:
    from wingbeat.runtime.drafters.shared_kv import MODEL_TYPES
    from wingbeat.runtime.heads.vocabulary import check_same_vocabulary

    file = ConfigFile.read(folder)
    if file.fields["model_type"] in MODEL_TYPES:
        check_files(file)
        return target.hidden_size
    config = load_config(file).get_text_config()
    check_same_vocabulary(folder, config.vocab_size, target.path, target.vocab_size)
    check_files(file)
    check_weights(file)
    return 0
