"""Seeded requests of every kind: `draw(seed, index)` is the same request wherever and whenever it is drawn."""

from random import Random

from .bodies import chat_body, completion_body, mutate
from .case import Case, dump
from .contract import CHAT, COMPLETIONS, KEY
from .headers import HOSTS, KEYS, METHODS, ORIGINS, PATHS, REQUEST_IDS, TYPES
from .values import string

GOOD_HEADERS = {
    "Host": "127.0.0.1",
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
}


def draw(seed: int, index: int) -> Case:
    """Request number `index` of a seed."""
    rng = Random(f"{seed}:{index}")
    kind = rng.random()
    if kind < 0.08:
        return _other_path(rng)
    target = rng.choice((COMPLETIONS, COMPLETIONS, CHAT))
    fields = completion_body(rng) if target == COMPLETIONS else chat_body(rng)
    headers = dict(GOOD_HEADERS)
    if kind < 0.3:
        pass
    elif kind < 0.75:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate(rng, fields, target)
    body = dump(fields, ascii_only=rng.random() < 0.7).encode()
    if 0.75 <= kind < 0.87:
        body = _spoil(rng, body)
    if kind >= 0.87 or rng.random() < 0.05:
        for _ in range(rng.choice((1, 1, 2))):
            _change_header(rng, headers)
    if rng.random() < 0.03:
        target = rng.choice(PATHS)
    method = "POST" if rng.random() < 0.97 else rng.choice(METHODS)
    return Case(method, target, tuple(headers.items()), body)


def _other_path(rng: Random) -> Case:
    """A method and a path, without a body; now and then a preflight."""
    headers: dict[str, str] = {name: GOOD_HEADERS[name] for name in ("Host", "Authorization")}
    method, target = rng.choice(METHODS), rng.choice((*PATHS, "/health", "/v1/models", COMPLETIONS, CHAT))
    if rng.random() < 0.3:
        method, target = "OPTIONS", rng.choice((COMPLETIONS, CHAT, "/health", "/v1/models", "/nowhere"))
        headers |= {"Origin": rng.choice(ORIGINS), "Access-Control-Request-Method": rng.choice(("POST", "GET", "X"))}
        if rng.random() < 0.7:
            del headers["Authorization"]
    if rng.random() < 0.3:
        _change_header(rng, headers)
    if method in ("POST", "PUT", "PATCH"):
        return Case(method, target, (*headers.items(), ("Content-Type", "application/json")), b"{}")
    return Case(method, target, tuple(headers.items()))


def _change_header(rng: Random, headers: dict[str, str]) -> None:
    name, values = rng.choice(
        (
            ("Host", HOSTS),
            ("Origin", ORIGINS),
            ("Authorization", KEYS),
            ("Content-Type", TYPES),
            ("X-Request-Id", REQUEST_IDS),
        )
    )
    if name in ("Authorization", "Content-Type") and rng.random() < 0.2:
        headers.pop(name, None)
    elif name != "Content-Type" or name in headers:
        headers[name] = rng.choice(values)


def _spoil(rng: Random, body: bytes) -> bytes:
    """The body with damage in its bytes, some of which JSON can bear."""
    place = rng.randrange(len(body))
    flipped = bytes((body[place] ^ (1 << rng.randrange(8)),))
    return rng.choice(
        (
            body[:place],
            body[:place] + flipped + body[place + 1 :],
            body[:place]
            + rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x82\x82\xac", b"\x80"))
            + body[place:],
            body[:place] + b"\x00" + body[place:],
            body + rng.choice((b"}", b"{}", b"\x00", b"x", b",", b"/* */", b"\xef\xbb\xbf")),
            b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"),
            body.decode().encode("utf-32-le"),
            rng.choice((b"", b" ", b"null", b"[]", b"1", b'"x"', b"true", b"[" + body + b"]", b"{", b"NaN", b"\x00")),
            body.replace(b'"', b"'"),
            body[:-1] + b",}",
            b" \t\r\n" * rng.randint(1, 300) + body + b"\n" * rng.randint(1, 300),
            b"// comment\n" + body,
            b"model=wingbeat-demo&prompt=hi",
            b"--x\r\nContent-Disposition: form-data\r\n\r\n" + body + b"\r\n--x--",
            dump(string(rng)).encode(),
        )
    )
