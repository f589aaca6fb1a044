"""Hooks of parts: functions, or import paths of functions, imported on first use."""

import sys

from wingbeat.kernels.parts import hooks_of


def test_a_hook_is_a_function_or_the_path_of_one(tmp_path, monkeypatch):
    files = {
        "near/part.py": "def said():\n    return 1\n",
        "far/part.py": "said = 'parts_of_a_test.far.heavy:two'\n",
        "far/heavy.py": "def two():\n    return 2\n",
        "silent/part.py": "",
    }
    for name, source in files.items():
        file = tmp_path / "parts_of_a_test" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    parts = ("near", "far", "silent", "deleted")
    assert hooks_of("parts_of_a_test", parts, "nothing") == ()
    assert "parts_of_a_test.far.heavy" not in sys.modules
    assert [said() for said in hooks_of("parts_of_a_test", parts, "said")] == [1, 2]
