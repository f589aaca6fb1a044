"""Beginnings of recorded sequences: windows of a corpus, or prompts from a file.

The beginning of sequence n depends only on n.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.recordings.token_windows import WindowSampler
from wingbeat.runtime.tokenizer import Tokenizer

_PREFIX_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Possible shares of a sequence that come from the corpus if the verifier generates the rest.

There are only a few values, so that many rows of a batch have equal lengths.
"""


class Sampling(NamedTuple):
    """Sampling settings of the verifier's texts."""

    greedy_fraction: float
    """Share of the texts that the verifier writes greedily."""
    temperature: float
    """Temperature of the texts that are not greedy."""
    seed: int


class Start(NamedTuple):
    """Beginning of a sequence, and the settings for continuing it."""

    token_ids: Tensor
    """Tokens of the beginning, int64 [num_tokens]."""
    length: int
    """Maximum number of tokens of the whole sequence; equals `num_tokens` if nothing is to be generated."""
    temperature: float
    """Sampling temperature; 0 means greedy."""
    seed: int
    """Seed of the sampling noise."""
    num_unlearnt: int
    """Number of leading tokens whose prediction is not trained."""


class TextSource(Protocol):
    """Beginnings of sequences, by number."""

    digest: str
    """Digest of all text of the source. A comparison of digests prevents that a recording is continued with another
    text.
    """
    num_starts: int | None
    """Number of beginnings; None for unlimited."""
    stops: bool
    """Whether a text ends at an end-of-text token; if False, the tokens after it form a new document."""

    def start(self, number: int) -> Start:
        """The beginning with this number."""
        ...


class CorpusSource:
    """Windows of a corpus. Some windows are recorded as they are; of each other window only the beginning is kept, and
    the verifier generates the rest.

    Args:
        documents: int64 [length] each, from `encode_documents`.
        length: tokens of every sequence.
        own_share: share of the sequences whose rest the verifier generates.
    """

    num_starts = None
    stops = False

    def __init__(self, documents: list[Tensor], length: int, own_share: float, sampling: Sampling) -> None:
        self._windows = WindowSampler(documents, sampling.seed)
        self._length = length
        self._own_share = own_share
        self._sampling = sampling
        self.digest = _digest(documents)

    def start(self, number: int) -> Start:
        """The beginning with this number.

        Raises:
            ValueError: the corpus is shorter than one sequence.
        """
        window = self._windows.batch(number, 1, self._length)[0]
        rng, temperature, seed = _draws(self._sampling, number)
        given = self._length
        if rng.random() < self._own_share:
            given = max(1, int(self._length * rng.choice(_PREFIX_SHARES)))
        return Start(window[:given], self._length, temperature, seed, num_unlearnt=0)


class PromptSource:
    """Prompts in the order of the file. The verifier answers each prompt up to an end-of-text token.

    Args:
        prompts: token ids; prompts that leave fewer than `min_answer` tokens for the answer are skipped and counted.
        length: maximum number of tokens of prompt and answer together.

    Raises:
        ValueError: no prompt is left.
    """

    stops = True

    def __init__(self, prompts: Iterable[list[int]], length: int, min_answer: int, sampling: Sampling) -> None:
        given = list(prompts)
        self._prompts = [torch.tensor(ids) for ids in given if 0 < len(ids) <= length - min_answer]
        self.num_left_out = len(given) - len(self._prompts)
        if not self._prompts:
            raise ValueError(f"none of {len(given)} prompts leaves room for {min_answer} tokens within {length}")
        self._length = length
        self._sampling = sampling
        self.num_starts = len(self._prompts)
        self.digest = _digest(self._prompts)

    def start(self, number: int) -> Start:
        """The beginning with this number."""
        prompt = self._prompts[number]
        _, temperature, seed = _draws(self._sampling, number)
        return Start(prompt, self._length, temperature, seed, num_unlearnt=len(prompt))


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the prompts in a JSON Lines file.

    Each line is `{"prompt": text}` or `{"messages": [{"role", "content"}, ...]}`. Messages are formatted by the chat
    template. Assistant messages at the end are dropped, because the verifier writes the answers.

    Raises:
        ValueError: a line has another form, or the template raises an error for it; the message names file and line.
    """
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                prompts.append(_encode(json.loads(line), tokenizer))
            except (ValueError, KeyError, TypeError) as error:
                reason = f"no {error} given" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}, line {number}: {reason}") from error
    return prompts


def _encode(entry: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return tokenizer.encode(entry["prompt"])
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list):
        raise ValueError('must be {"prompt": text} or {"messages": [...]}')
    messages = [{"role": message["role"], "content": message["content"]} for message in entry["messages"]]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("messages hold nothing to answer")
    return tokenizer.encode_chat(messages)


def _draws(sampling: Sampling, number: int) -> tuple[np.random.Generator, float, int]:
    """Random generator, temperature and noise seed of a sequence."""
    rng = np.random.default_rng((sampling.seed, number))
    greedy = rng.random() < sampling.greedy_fraction
    return rng, 0.0 if greedy else sampling.temperature, int(rng.integers(2**62))


def _digest(token_ids: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for ids in token_ids:
        digest.update(len(ids).to_bytes(8, "big"))
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()[:20]
