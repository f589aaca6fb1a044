"""Panel layouts of the number formats of group-quantized weights, as read by the C++ (`groups.h`)."""

from typing import NamedTuple

from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8, UINT4, UINT5, UINT6


class Layout(NamedTuple):
    """Storage of a number format in panels. A unit holds `inputs` inputs of a column in `rows` bytes."""

    kind: int
    """Value of the C++ enumeration in `matrices.h`."""
    inputs: int
    """Number of inputs per unit; `rows` is the number of bytes per unit and column."""
    rows: int


LAYOUTS = {
    INT8: Layout(6, 4, 4),
    UINT4: Layout(7, 8, 4),
    UINT5: Layout(8, 8, 5),
    UINT6: Layout(9, 8, 6),
    E4M3: Layout(10, 2, 2),
    E2M1: Layout(11, 8, 4),
}
