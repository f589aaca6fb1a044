"""Engines that keep prefixes, and the ways in which one is saved, loaded and hit."""

import logging
from pathlib import Path

from tests.optional import kept
from tests.runtime.models import Run, engine_config, greedy_params, new_engine
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
from wingbeat.runtime.prefixes.prefix_store import PrefixStore
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Variant

IDENTITY = {"weights": "w1", "dtype": "float32", "block_size": "4"}
SMALL = kept({"block_size": 4, "num_kv_blocks": 200, "state_interval": 8})


def store_of(folder: Path, tokenizer: str = "t1", **identity: str) -> PrefixStore:
    """Store of these tests' engines, unless the identity is overridden."""
    return PrefixStore(folder, IDENTITY | identity, tokenizer)


def finish(engine: Engine, keeper: PrefixKeeper) -> None:
    """Run what there is to run."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            keeper.take(output)


def save(engine: Engine, keeper: PrefixKeeper, prefix: SavedPrefix) -> None:
    """Pin a prefix and keep it on disk."""
    done = keeper.save(prefix)
    finish(engine, keeper)
    assert done.result(0) is None
    keeper.keep([(prefix.name, prefix.version, prefix)]).result(10)


def prefix_of(tokens: list[int], name: str = "system", version: int = 1, variant: Variant | None = None):
    """A prefix of plain tokens."""
    return SavedPrefix(name, version, tuple(tokens), variant)


class Kept:
    """An engine with a keeper over a model of `tests.runtime`; close it before the next one of that model."""

    def __init__(self, loaded, folder: Path | None, drafter=None, identity=None, on_host=None, **limits) -> None:
        speculation, most = limits.pop("speculation", None), limits.pop("max_pinned_tokens", None)
        given = {} if speculation is None else {"speculation": speculation}
        self.engine = new_engine(loaded, engine_config(**given, **(SMALL | limits)), drafter, on_host)
        store = None if folder is None else store_of(folder, **(identity or {}))
        self.keeper = PrefixKeeper(self.engine, store, most)

    def save(self, prefix: SavedPrefix) -> None:
        save(self.engine, self.keeper, prefix)

    def run(self, prompts, num_tokens: int, **fields) -> tuple[list[list[int]], list[int]]:
        """Texts, and how much of each prompt was cached."""
        run = Run(self.engine, prompts, greedy_params(num_tokens, **fields))
        tokens = run.finish()
        return tokens, [run.last[index].num_cached_tokens for index in range(len(prompts))]

    @property
    def names(self) -> list[str]:
        return [prefix["name"] for prefix in self.keeper.describe()["prefixes"]]

    def close(self) -> None:
        self.keeper.close()
        self.engine.check_integrity()
        self.engine.model.remove_taps()


def warnings_of(caplog) -> list[str]:
    """The lines that were logged."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
