"""Bytes that are no well-framed request, by name."""

from .client import completion

CHUNKED = ("Transfer-Encoding", "chunked")
BODY = completion(prompt="x", max_tokens=1).body


def post(prefix: str, *headers: tuple[str, str], body: bytes = BODY, version: str = "1.1") -> bytes:
    """A completion whose framing headers are the given ones."""
    case = completion(prompt="x", max_tokens=1)
    lines = [f"POST {prefix}{case.target} HTTP/{version}", *(f"{name}: {value}" for name, value in case.headers)]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(prefix: str, *lines: bytes, request: bytes | None = None) -> bytes:
    """A question for health with more header lines."""
    first = request or b"GET " + prefix.encode() + b"/health HTTP/1.1"
    return b"\r\n".join((first, b"Host: 127.0.0.1", *lines)) + b"\r\n\r\n"


def chunks(*pieces: bytes) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def malformed(prefix: str) -> dict[str, bytes]:
    """Bytes that nobody has to serve: an error or a closed connection is the answer, and a success is wrong."""
    length = ("Content-Length", str(len(BODY)))
    health = prefix.encode() + b"/health"
    return {
        "no-length": post(prefix),
        "length-too-small": post(prefix, ("Content-Length", "5")),
        "length-negative": post(prefix, ("Content-Length", "-5")),
        "length-signed": post(prefix, ("Content-Length", f"+{len(BODY)}")),
        "length-hexadecimal": post(prefix, ("Content-Length", hex(len(BODY)))),
        "length-huge": post(prefix, ("Content-Length", "9" * 40)),
        "length-empty": post(prefix, ("Content-Length", "")),
        "two-lengths": post(prefix, length, ("Content-Length", "5")),
        "length-list": post(prefix, ("Content-Length", f"{len(BODY)}, 5")),
        "length-and-chunked": post(prefix, length, CHUNKED, body=chunks(BODY)),
        "unknown-encoding": post(prefix, ("Transfer-Encoding", "gzip, identity")),
        "chunked-twice-hidden": post(prefix, ("Transfer-Encoding", "xchunked"), length),
        "chunk-size-is-no-number": post(prefix, CHUNKED, body=b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk-size-negative": post(prefix, CHUNKED, body=b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk-size-huge": post(prefix, CHUNKED, body=b"f" * 20 + b"\r\n" + BODY),
        "chunk-longer-than-said": post(prefix, CHUNKED, body=b"2\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "http-3.0": get(prefix, request=b"GET " + health + b" HTTP/3.0"),
        "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
        "no-http": b"\x00\x01\x02\x03" * 100 + b"\r\n\r\n",
        "unknown-method": get(prefix, request=b"BREW " + health + b" HTTP/1.1"),
        "space-in-target": get(prefix, request=b"GET " + health + b" /x HTTP/1.1"),
        "control-character-in-target": get(prefix, request=b"GET " + health + b"\x01 HTTP/1.1"),
        "connect": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
        "header-without-colon": get(prefix, b"colonless"),
        "header-name-with-space": get(prefix, b"a b: c"),
        "header-name-empty": get(prefix, b": c"),
        "header-name-nul": get(prefix, b"a\x00b: c"),
        "header-value-nul": get(prefix, b"a: b\x00c"),
        "header-value-delete": get(prefix, b"X-Request-Id: id\x7f"),
        "header-bare-return": get(prefix, b"a: b\rc: d"),
        "target-of-a-megabyte": get(prefix, request=b"GET " + health + b"?" + b"a" * 2**20 + b" HTTP/1.1"),
        "host-of-a-stranger-in-the-target": get(prefix, request=b"GET http://evil.example/nowhere HTTP/1.1"),
        "no-host": b"GET " + health + b" HTTP/1.1\r\n\r\n",
        "a-strange-host-first": b"GET " + health + b" HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n",
        "a-strange-host-last": get(prefix, b"Host: evil.example"),
        "request-id-no-ascii": get(prefix, b"X-Request-Id: \xc3\xa9"),
    }


def unusual(prefix: str) -> dict[str, bytes]:
    """Bytes that a server may serve: well-formed, but nothing that the usual clients send."""
    health = prefix.encode() + b"/health"
    return {
        "http-0.9": b"GET " + health + b"\r\n\r\n",
        "header-of-a-megabyte": get(prefix, b"a: " + b"b" * 2**20),
        "http-1.0": get(prefix, request=b"GET " + health + b" HTTP/1.0"),
        "http-1.0-without-host": b"GET " + health + b" HTTP/1.0\r\n\r\n",
        "two-hosts": get(prefix, b"Host: localhost"),
        "blank-lines-first": b"\r\n\r\n" + get(prefix),
        "bare-line-feeds": get(prefix).replace(b"\r\n", b"\n"),
        "folded-header": get(prefix, b"a: b", b" c"),
        "space-before-colon": get(prefix, b"a : b"),
        "a-thousand-headers": get(prefix, *(b"a%d: b" % i for i in range(1000))),
        "absolute-target": get(prefix, request=b"GET http://127.0.0.1" + health + b" HTTP/1.1"),
        "expects-continue": post(prefix, ("Expect", "100-continue"), ("Content-Length", str(len(BODY)))),
        "upgrade": get(prefix, b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: eA=="),
        "upgrade-to-http-2": get(prefix, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: "),
        "small-chunks": post(prefix, CHUNKED, body=chunks(*(BODY[i : i + 1] for i in range(len(BODY))))),
        "chunk-extensions": post(prefix, CHUNKED, body=b"%x;a=%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"b" * 9000, BODY)),
        "trailers": post(prefix, CHUNKED, body=chunks(BODY)[:-2] + b"Host: evil.example\r\n\r\n"),
        "two-equal-lengths": post(prefix, *(("Content-Length", str(len(BODY))),) * 2),
        "body-with-get": get(prefix, b"Content-Length: 5") + b"hello",
    }
