"""Prompts for all benchmarks, cut from files that were not in any training run of the demo pair."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.corpus import read_text, split_files
from wingbeat.runtime.tokenizer import Tokenizer

PROMPT_TOKENS = (64, 128, 192, 256)
"""Target lengths in tokens that the prompts of one file cycle through; a prompt ends with the line that reaches its
length."""
GAP_TOKENS = 128
"""Tokens of text skipped between two prompts of one file, so that no prompt contains another's continuation."""


class Prompt(NamedTuple):
    """A piece of a held-out file, from the start of a line to the end of a line."""

    source: str
    """Path relative to the corpus, and the line at which the prompt starts."""
    text: str
    token_ids: list[int]


def held_out_prompts(
    tokenizer: Tokenizer, corpus: Path, count: int, suffixes: tuple[str, ...] = (".py",)
) -> list[Prompt]:
    """Returns the first prompts of every held-out file, then their second ones, and so on; deterministic.

    Raises:
        ValueError: the held-out files have fewer than `count` prompts.
    """
    files = split_files(corpus, suffixes).held_out
    waiting = [_prompts_of(tokenizer, path, corpus, first) for first, path in enumerate(files)]
    prompts: list[Prompt] = []
    while waiting and len(prompts) < count:
        going_on = []
        for source in waiting:
            prompt = next(source, None)
            if prompt is not None:
                prompts.append(prompt)
                going_on.append(source)
        waiting = going_on
    if len(prompts) < count:
        raise ValueError(
            f"the held-out files of {corpus} give {len(prompts)} prompts, {count} are wanted: lower --prompts"
        )
    return prompts[:count]


def fingerprint(prompts: list[Prompt]) -> str:
    """Eight hexadecimal digits that identify a set of prompts."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()[:8]


def describe(prompts: list[Prompt]) -> str:
    """Describes the prompts in one line for the report."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens from held-out files, "
        f"fingerprint {fingerprint(prompts)}"
    )


def _prompts_of(tokenizer: Tokenizer, path: Path, corpus: Path, number: int) -> Iterator[Prompt]:
    """Yields the prompts of a file; `number` selects the first length, so that files begin with different lengths."""
    text = read_text(path)
    lines = [] if text is None else text.splitlines(keepends=True)
    lengths = [len(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    start = 0
    while True:
        end = _reach(lengths, start, PROMPT_TOKENS[number % len(PROMPT_TOKENS)])
        if end is None:
            return
        piece = "".join(lines[start:end])
        if piece.strip():
            name = path.relative_to(corpus).as_posix()
            yield Prompt(f"{name}:{start + 1}", piece, tokenizer.encode(piece))
        number += 1
        following = _reach(lengths, end, GAP_TOKENS)
        if following is None:
            return
        start = following


def _reach(lengths: list[int], start: int, num_tokens: int) -> int | None:
    """Index past the line at which `num_tokens` are reached from `start`; None if the file ends before."""
    total = 0
    for index in range(start, len(lengths)):
        total += lengths[index]
        if total >= num_tokens:
            return index + 1
    return None
