"""Whether a drafter fits its verifier, told from configs, names and shapes alone: no weights are read."""

from wingbeat.kernels.parts import load_function
from wingbeat.runtime.drafters.choice import CHECKPOINT, KINDS, DrafterChoice
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.load import check_head
from wingbeat.runtime.heads.target import TargetDescription


def check_drafter_fits(choice: DrafterChoice, target: TargetDescription) -> int:
    """Refuse a drafter that could not be loaded beside this verifier.

    Returns:
        Values per position that it taps of the verifier, as far as that is known: 0 for a class of the user's own.

    Raises:
        ValueError: a file, a tensor or a size is wrong, or there is no such class; one line that names it.
    """
    if not choice.drafts:
        return 0
    check = KINDS[kind_of(choice.source) if choice.kind == CHECKPOINT else choice.kind].check
    return 0 if check is None else load_function(check)(str(choice.source), target)


def check_eagle_head(source: str, target: TargetDescription) -> int:
    """Refuse an EAGLE head that could not be loaded beside a verifier; values per position that it taps.

    Raises:
        CheckpointError: as `check_head`, with the folder.
    """
    try:
        config = check_head(
            source,
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            lends_embedding=target.holds_embedding,
            lends_lm_head=target.holds_lm_head,
        )
    except CheckpointError as error:
        raise CheckpointError(f"drafter {source}: {error}") from error
    return len(config.tap_layers) * target.hidden_size
