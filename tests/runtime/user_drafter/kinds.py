"""The worked example of a user's class, for tests of every kind of drafter."""

from functools import partial

from tests.runtime.loaded_kind import by_name

KINDS = {"bigram_drafter": partial(by_name, "bigram_drafter.BigramDrafter")}
