"""An HTTP request as data, and a JSON writer that can also write invalid JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any

ESCAPED = re.compile("[\ud800-\udfff]")

Header = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A request as it goes over the wire, less the headers that frame it."""

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes | None = None

    def header(self, name: str) -> str | None:
        """The value of the first header of that name."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def wire(self, prefix: str = "") -> bytes:
        """The whole request of a connection that it ends; `prefix` goes before the target."""
        lines = [f"{self.method} {prefix}{self.target} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers)]
        if self.body is not None:
            lines.append(f"Content-Length: {len(self.body)}")
        lines.append("Connection: close")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (self.body or b"")


class Raw(str):
    """Text that goes into a body as it is: numbers that Python would change, and what is no JSON."""


class Object(list):
    """A JSON object as pairs, so that a key can stand twice."""

    def set(self, name: str, value: Any) -> None:
        """Replace the field, or append it."""
        self[:] = [pair for pair in self if pair[0] != name] + [(name, value)]

    def get(self, name: str) -> Any:
        """The field's value, None without one."""
        return dict(self).get(name)

    def drop(self, name: str) -> None:
        """Leave the field out."""
        self[:] = [pair for pair in self if pair[0] != name]


def dump(value: Any, ascii_only: bool = True) -> str:
    """JSON of a value; a lone surrogate is always escaped, as UTF-8 has none."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Object | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ",".join(f"{dump(key, ascii_only)}:{dump(item, ascii_only)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return json.dumps(value, separators=(",", ":"))
        return "[" + ",".join(dump(item, ascii_only) for item in value) + "]"
    text = json.dumps(value, ensure_ascii=ascii_only)
    return text if ascii_only else ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
