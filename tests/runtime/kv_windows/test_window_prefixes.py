"""Saved prefixes of models whose layers keep windows alone: pinned, written to disk, read again."""

import pytest

from tests.runtime.kv_windows.window_world import finish, windowed
from tests.runtime.models import Run, greedy_params, reference
from tests.runtime.prefix_world import Kept, prefix_of

LIMITS = {"num_kv_blocks": 400, "max_num_seqs": 2}
LENGTH = 48


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("keeps_windows", [True, False])
def test_a_prefix_comes_back_from_disk_with_its_last_window(tmp_path, name, keeps_windows):
    ref, index = reference(name), 4
    prefix = prefix_of(ref.prompts[index][:50])
    with windowed(ref.loaded) as loaded:
        first = Kept(loaded, tmp_path, **LIMITS)
        first.save(prefix)
        first.close()
        limits = LIMITS if keeps_windows else LIMITS | {"num_window_blocks": 0}
        second = Kept(loaded, tmp_path, **limits)
        (found,) = second.keeper.open()
        assert found.token_ids == prefix.token_ids
        is_computed_again = second.engine.has_unfinished_requests()
        while second.engine.has_unfinished_requests():
            for output in second.engine.step():
                second.keeper.take(output)
        try:
            assert second.run([ref.prompts[index]], 30) == ([ref.continuations[index][:30]], [LENGTH])
        finally:
            second.close()
    assert is_computed_again != keeps_windows, "files of windows and of whole contexts are told apart"


def test_a_pinned_prefix_is_found_whatever_else_runs():
    ref = reference("gemma3")
    with windowed(ref.loaded) as loaded:
        one = Kept(loaded, None, **LIMITS, num_window_blocks=130)
        done = one.keeper.save(prefix_of(ref.prompts[4][:50]))
        while one.engine.has_unfinished_requests():
            for output in one.engine.step():
                one.keeper.take(output)
        assert done.result(0) is None
        finish(Run(one.engine, ref.prompts, greedy_params(80)))
        assert one.run([ref.prompts[4]], 30) == ([ref.continuations[4][:30]], [LENGTH])
        one.close()
