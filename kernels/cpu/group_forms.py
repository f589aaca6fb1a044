"""Forms of the numbers of weights in groups: how they lie in panels that the C++ reads (`groups.h`)."""

from typing import NamedTuple

from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8, UINT4, UINT5, UINT6


class Layout(NamedTuple):
    """A form of numbers in panels, of which a unit of a few inputs takes some bytes of a column."""

    kind: int
    """As `matrices.h` has it."""
    inputs: int
    """Inputs of a unit; `rows` are bytes of its column."""
    rows: int


LAYOUTS = {
    INT8: Layout(6, 4, 4),
    UINT4: Layout(7, 8, 4),
    UINT5: Layout(8, 8, 5),
    UINT6: Layout(9, 8, 6),
    E4M3: Layout(10, 2, 2),
    E2M1: Layout(11, 8, 4),
}
