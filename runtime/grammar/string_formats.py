"""String formats of JSON schemas as regular expressions, for strings that stand outside JSON text."""

_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:[0-9]{{4}}-(?:{_DAYS})|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = r"[0-9A-Fa-f]"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OF_URI = rf"(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%{_HEX}{{2}})*"


def _ipv6() -> str:
    """Expression for IPv6 addresses: eight groups, or fewer groups with one `::`."""
    group = rf"{_HEX}{{1,4}}"
    with_gap = [rf"(?:{group}(?::{group}){{0,{before - 1}}})?::(?:{group}(?::{group}){{0,{6 - before}}})?"
                for before in range(1, 7)]  # fmt: skip
    return "|".join([rf"{group}(?::{group}){{7}}", *with_gap, rf"{group}(?::{group}){{6}}::"])


PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _ipv6(),
    "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_OF_URI}(?:#{_OF_URI})?",
    "unknown": r"(?:.|\n)*",
}
"""Expressions that match whole strings, by format (RFC 3339, 5321, 1123, 4291, 9562, 3986; URIs with hosts in
brackets are not supported).
"""
