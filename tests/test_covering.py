"""Rows that are left out have nothing that others lack."""

from itertools import combinations, product

from tests.covering import meeting, pairwise, spread

AXES = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3", "4"], "d": ["1", "2"]}


def allowed(row):
    return row["a"] != "3" or row["c"] in ("1", "2")


def test_all_values_that_may_meet_meet_in_few_rows():
    rows = pairwise(AXES, allowed)
    every = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    wanted = {pair for row in every if allowed(row) for pair in combinations(row.items(), 2)}
    assert {pair for row in rows for pair in combinations(row.items(), 2)} == wanted
    assert all(map(allowed, rows))
    assert len(rows) < 15 < sum(map(allowed, every))


def test_the_first_rows_bring_the_most():
    seen, new = set(), []
    for row in pairwise(AXES, allowed):
        pairs = set(combinations(row.items(), 2))
        new.append(len(pairs - seen))
        seen |= pairs
    assert new == sorted(new, reverse=True)
    assert new[-1] > 0


def test_as_few_rows_as_an_axis_has_values_have_each_value():
    rows = [set(zip("abc", values, strict=True)) for values in product(range(4), range(3), range(2))]
    chosen = [rows[index] for index in spread(rows, 4)]
    assert len(chosen) == 4
    assert set.union(*chosen) == set.union(*rows)
    assert spread(rows[:2], 4) == [0, 1]


def test_a_table_of_one_or_two_axes_is_kept_whole():
    assert sorted(meeting([{("a", value)} for value in range(3)])) == [0, 1, 2]
    rows = [set(zip("ab", values, strict=True)) for values in product(range(4), range(3))]
    assert sorted(meeting(rows)) == list(range(12))
