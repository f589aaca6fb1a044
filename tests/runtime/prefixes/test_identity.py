"""Saved prefixes are read by engines that compute keys and values alike, and by no others."""

from tests.near_ties import FLIPPED, check_same_texts
from tests.runtime.engine.test_fp8_kv import FP8, plainly
from tests.runtime.models import engine_config, greedy_params, reference
from tests.runtime.prefix_world import Kept, finish, prefix_of
from wingbeat.runtime.prefixes.identity import identity_of


def test_a_saved_prefix_is_read_by_engines_that_round_alike(tmp_path, caplog):
    ref = reference("llama")
    system = ref.prompts[4][:40]
    prompts = [system + prompt for prompt in ref.prompts[:2]]
    expected = plainly(ref.loaded, engine_config(**FP8), prompts, [greedy_params(12)] * 2)
    first = Kept(ref.loaded, tmp_path, **FP8)
    first.save(prefix_of(system))
    first.close()
    for limits in (FP8, {}):
        one = Kept(ref.loaded, tmp_path, **limits)
        one.keeper.open()
        assert one.engine.has_unfinished_requests() == (not limits), "read, or computed again"
        finish(one.engine, one.keeper)
        tokens, cached = one.run(prompts, 12)
        one.close()
        if limits:
            check_same_texts(tokens, expected, FLIPPED)
        else:
            assert tokens != [text.token_ids for text in expected]
        assert cached == [40, 40]
    assert "of torch.uint8, not" in caplog.text


def test_the_identity_of_saved_prefixes_says_how_keys_are_rounded(tmp_path):
    loaded = reference("llama").loaded
    wide, rounded = (identity_of(tmp_path, loaded, 4, name) for name in ("auto", "fp8"))
    assert (wide["dtype"], rounded["dtype"]) == ("float32", "float32 with fp8 KV")
