"""Saved prefixes with images or audio in them: computed once, kept on disk, found by content, told to drafters."""

import json

import pytest

from tests.runtime.hybrids import needs_states
from tests.runtime.media.media_world import HYBRIDS, ShownRun, shown
from tests.runtime.media.test_drafter_sees import Dense, check, head_for, watched
from tests.runtime.models import CHAIN, greedy_params
from tests.runtime.prefix_world import Kept
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.prefixes import prefix_keeper
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

pytestmark = needs_states
NUM_TOKENS = 20
INDEX = 3
"""The prompt with three images or sounds."""
ALL = ("qwen3_vl", "llava", "qwen2_audio", *HYBRIDS)


def prefix_of(name, length=None, version=1):
    """A beginning of that prompt: all up to a few tokens behind the second of its media."""
    ref = shown(name)
    media = ref.media[INDEX][:2]
    length = media[-1].end + 3 if length is None else length
    tokens = tuple(ref.prompts[INDEX][:length])
    return SavedPrefix("shown", version, tokens, spans=tuple(one for one in media if one.end <= length))


def run(kept, name, **fields):
    """The text behind the whole prompt, and how much of the prompt was cached."""
    ref = shown(name)
    one = ShownRun(kept.engine, [ref.prompts[INDEX]], [ref.media[INDEX]], greedy_params(NUM_TOKENS, **fields))
    [text] = one.finish()
    assert text == ref.continuations[INDEX][:NUM_TOKENS]
    return one.last[0].num_cached_tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALL)
def test_a_prefix_with_media_is_hit_and_is_there_again_after_a_restart(name, tmp_path):
    prefix = prefix_of(name)
    first = Kept(shown(name).loaded, tmp_path)
    first.save(prefix)
    held = run(first, name)
    first.close()
    assert held >= prefix.num_blocks(4) * 4 - 8
    second = Kept(shown(name).loaded, tmp_path)
    before = second.engine.loaded.reader.encoder.figures.num_encoded
    assert second.keeper.open() == [prefix]
    assert second.names == ["shown"]
    assert not second.engine.has_unfinished_requests()  # it was read, and not computed
    assert run(second, name) == held
    assert second.engine.loaded.reader.encoder.figures.num_encoded - before <= 1  # the one behind the prefix
    second.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_prefix_whose_contents_are_lost_is_computed_from_its_record(name, tmp_path):
    prefix = prefix_of(name)
    first = Kept(shown(name).loaded, tmp_path)
    first.save(prefix)
    held = run(first, name)
    first.close()
    (tmp_path / "shown.safetensors").unlink()
    second = Kept(shown(name).loaded, tmp_path)
    second.keeper.open()
    while second.engine.has_unfinished_requests():
        for output in second.engine.step():
            second.keeper.take(output)
    assert second.names == ["shown"]
    assert run(second, name) == held
    second.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_another_image_under_equal_tokens_is_not_found(name, tmp_path):
    prefix = prefix_of(name)
    one = prefix.spans[0]
    other = one.of(one.start, one.length, {**one.arrays, "pixel_values": -one.arrays["pixel_values"]}, one.grid)
    kept = Kept(shown(name).loaded, tmp_path)
    kept.save(prefix._replace(spans=(other, *prefix.spans[1:])))
    assert run(kept, name) <= one.start // 4 * 4
    kept.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_audio"])
def test_a_drafter_is_told_of_the_media_of_a_recorded_prefix(name, tmp_path):
    """The drafts equal a dense pass over the whole prompt, though the verifier does not compute the prefix again."""
    prefix, head, ref = prefix_of(name), head_for(name), shown(name)
    first = Kept(ref.loaded, tmp_path, EagleDrafter(head, CHAIN), speculation=CHAIN)
    first.save(prefix)
    first.close()
    second = Kept(ref.loaded, tmp_path, EagleDrafter(head, CHAIN), speculation=CHAIN)
    second.keeper.open()
    drafts = watched(second.engine)
    assert run(second, name) > prefix.spans[-1].start
    drafted = {(INDEX, length): nodes for _, length, nodes in drafts if nodes}
    check(drafted, Dense(head, name), 4)
    second.close()


def test_a_prefix_ends_in_front_of_an_image_that_its_last_block_would_cut():
    prefix = prefix_of("llava")
    one = prefix.spans[0]
    within = prefix._replace(token_ids=prefix.token_ids[: one.start + 9])
    assert within.num_blocks(4) == one.start // 4
    assert prefix.num_blocks(4) == len(prefix.token_ids) // 4


def test_more_than_a_record_may_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_keeper, "MOST_SPAN_BYTES", 100)
    kept = Kept(shown("llava").loaded, tmp_path)
    refusal = kept.keeper.save(prefix_of("llava")).result(0)
    assert "its images or audio are" in refusal.reason
    kept.close()


def test_a_record_whose_pixels_were_changed_is_not_read(tmp_path):
    first = Kept(shown("llava").loaded, tmp_path)
    first.save(prefix_of("llava"))
    first.close()
    file = tmp_path / "shown.json"
    fields = json.loads(file.read_text())
    data = fields["media"][0]["arrays"]["pixel_values"][2]
    fields["media"][0]["arrays"]["pixel_values"][2] = data[4:] + data[:4]
    file.write_text(json.dumps(fields))
    second = Kept(shown("llava").loaded, tmp_path)
    assert second.keeper.open() == []
    second.close()
