"""A head, and the folder it is saved in."""

from tests.runtime.heads.conftest import folder, head

__all__ = ["folder", "head"]
