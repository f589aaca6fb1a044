"""`wingbeat extract`: runs a verifier over a text, and writes its hidden states and predictions into a folder, as
training data.
"""

import sys

from transformers.utils import logging as transformers_logging

from wingbeat.deployments.cli.options import UserError
from wingbeat.runtime.recordings.extract import ExtractConfig, extract


def extract_command(config: ExtractConfig) -> None:
    """Record tokens, hidden states and top logits of a verifier for training a drafter.

    Raises:
        UserError: model, text or settings cannot be used.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        result = extract(config)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    index = result.index
    if result.num_prompts_left_out:
        print(f"{result.num_prompts_left_out} prompts leave no room for an answer: left out", file=sys.stderr)
    if result.stopped is not None:
        print(
            f"Stopped early: {result.stopped}. Run the same command again to continue once there is room.",
            file=sys.stderr,
        )
    print(
        f"{config.output}: {index.num_sequences} sequences, {index.num_tokens} tokens, {index.num_bytes} bytes in "
        f"{len(index.shards)} shards"
    )
