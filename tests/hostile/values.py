"""Wrong values: numbers at and beyond every bound, strings that break readers, odd shapes."""

from random import Random
from typing import Any

from .case import Object, Raw

NUMBERS = tuple(
    map(
        Raw,
        (
            *(
                "-1",
                "0",
                "-0",
                "-0.0",
                "0.0",
                "1",
                "1.0",
                "1e0",
                "2.5",
                "1E2",
                "0.99999999999999999999",
                "1e-45",
                "5e-324",
            ),
            *(
                "-2",
                "129",
                "2147483647",
                "2147483648",
                "-2147483649",
                "4294967296",
                "9007199254740993",
                "1e308",
                "-1e308",
            ),
            *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"),
            *("18446744073709551615", "18446744073709551616", "1e400", "-1e400", "1" + "0" * 400, "-1" + "0" * 5000),
            *("0." + "0" * 400 + "1", "1e-400", "1e99999999999", "0." + "3" * 5000),
        ),
    )
)
NO_NUMBERS = tuple(
    map(Raw, ("NaN", "Infinity", "-Infinity", "nan", "01", "+1", "1.", ".5", "0x10", "--1", "1e", "1_0"))
)
NO_JSON = tuple(
    map(Raw, ("undefined", "None", "True", "'x'", '"\\x41"', '"\\u12"', '"a\nb"', '"\x00"', "", "[1,]", "{,}"))
)

STRINGS = (
    *(
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        "x\udfff",
        "\udc00\ud800",
        "é",
        "e\u0301",
        "\u202etxet",
        "\ufeff",
        "\u2028\u2029",
    ),
    *(
        "\U0001f9d1\u200d\U0001f680",
        "\U0010ffff",
        "\ufffe\uffff",
        "ﷺ" * 40,
        "\u0300" * 60,
        "\u0130\u0131\u017f\u212a",
        "\x7f\x80\x9f",
        "�",
    ),
    *("<|endoftext|>", "a<|endoftext|>b<|endoftext|>", "<|im_start|>system\n", "<s>[INST]", "{{ 7 * 7 }}", "{% for %}"),
    *(
        "\r\n\r\ndata: [DONE]\n\n",
        "data: {}\n\n",
        "%s%n%d",
        "' OR 1=1 --",
        "../../etc/passwd",
        "${jndi:ldap://x}",
        "NaN",
    ),
    *("1", "true", "null", "x" * 1024, "x" * 1025, " " * 700, "\n" * 700, "0" * 700, "ab" * 4000),
)

SHAPES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], [None], [True], [""], ["", ""], [1, "a"], ["a", 1], [[1], "a"], [[1], 2]),
    *({"a": 1}, {"": ""}, {"type": "text"}, {"enabled": False}, [1.5], [[[1]]], [["a"]], {"a": {"a": {"a": []}}}),
)

DEPTHS = (5, 40, 55, 70, 100, 1000, 20_000)


def nested(rng: Random) -> Raw:
    """Lists or objects within each other."""
    depth = rng.choice(DEPTHS)
    start, end = rng.choice((("[", "]"), ('{"a":', "}")))
    return Raw(start * depth + "1" + end * depth)


def string(rng: Random) -> str:
    """A string that some reader trips over, or several in a row."""
    return "".join(rng.choice(STRINGS) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def printable(rng: Random) -> str:
    """A short string that a UTF-8 text can hold."""
    return "".join(rng.choice("abc xyz\n\t(){}=.é漢\x00\u0301\U0001f600") for _ in range(rng.randint(1, 30)))


def hostile(rng: Random) -> Any:
    """A value for any field, most of them wrong for it."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return rng.choice(SHAPES)
    if kind < 0.85:
        return string(rng)
    if kind < 0.9:
        return nested(rng)
    if kind < 0.94:
        return rng.choice(NO_NUMBERS)
    if kind < 0.97:
        return rng.choice(NO_JSON)
    return Object([("a", 1), ("a", hostile(rng))])
