"""A scripted pool whose engine keeps prefixes."""

from tests.deployments.http_world import FakeCaches, FakePool
from wingbeat.deployments.prefixes.fleet import FleetPrefixes
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix


class FakePrefixes(FakeCaches):
    """An engine that pins up to 40 tokens in blocks of 4; `files` are on its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[tuple[str, int], int] = {}
        self.dropped: list[str] = []
        self.files: dict[str, SavedPrefix] = {}

    def save_prefix(self, prefix: SavedPrefix) -> tuple[str, str] | None:
        if len(prefix.token_ids) > 40:
            return "pinned_memory_exceeded", "needs more than 40"
        self.pinned[prefix.name, prefix.version] = len(prefix.token_ids) // 4
        return None

    def drop_prefix(self, name: str, version: int) -> None:
        self.dropped.append(name)

    def stored_prefix(self, name: str) -> SavedPrefix | None:
        return self.files.get(name)

    def describe_prefixes(self) -> dict:
        figures = [
            {"name": name, "version": version, "blocks": blocks, "bytes": 100 * blocks, "saved": f"/kept/{name}"}
            for (name, version), blocks in self.pinned.items()
        ]
        return {"pinned_tokens": 4 * sum(self.pinned.values()), "max_pinned_tokens": 40, "prefixes": figures}


class PrefixPool(FakePool):
    """A `FakePool` with such an engine."""

    def __init__(self, *given, **more) -> None:
        super().__init__(*given, **more)
        self.prefix_engine = FakePrefixes()
        self.every_engine = self.prefix_engine.engines
        self.prefixes = FleetPrefixes(self)
