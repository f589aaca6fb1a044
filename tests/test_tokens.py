"""Tokens are what is left of a source without words for people and without layout."""

from tests.tokens import is_optional, num_tokens, sizes

SOURCE = '''"""A module."""

# A comment.
def f(x):
    """What it does."""
    return (
        x + 1  # why
    )
'''


def test_layout_and_prose_count_for_nothing():
    assert num_tokens(SOURCE) == num_tokens("def f(x):\n  return (x + 1)\n") == 12


def test_files_count_for_their_rooms():
    files = [
        ("runtime/engine/a.py", "x"),
        ("runtime/engine/b.py", "y"),
        ("runtime/c.py", "z"),
        ("kernels/cpu/a.h", "\n\n"),
    ]
    tokens, lines = sizes(iter(files))
    assert (dict(tokens), lines) == ({"runtime/engine": 2, "runtime/c": 1}, 2)


def test_the_core_has_no_file_of_a_feature():
    assert is_optional("deployments/page/part.py")
    assert not is_optional("deployments/parts.py")
