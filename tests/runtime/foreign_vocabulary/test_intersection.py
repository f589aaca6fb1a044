"""The tokens that two vocabularies share, and the draft token that represents each other token in a context."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, processors

from tests.runtime.draft_model.checkpoints import save, words
from tests.runtime.foreign_vocabulary import vocabularies
from tests.runtime.models import DEMO_PAIR, random_model
from wingbeat.runtime.foreign_vocabulary.intersection import Vocabulary, shared_tokens
from wingbeat.runtime.heads.vocabulary import VocabularyError

SIZES = {"byte_level": 600, "sentencepiece": 700}
WAYS = [("byte_level", "sentencepiece"), ("sentencepiece", "byte_level")]
IDS = ["sentencepiece verifier", "byte-level verifier"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: getattr(vocabularies, name)(tmp_path_factory.mktemp(name), size) for name, size in SIZES.items()}


def text_of(folder, token_id):
    """A token's text by the tokenizer's own decoder; None for part of a character."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The first space of a text is taken off by SentencePiece's decoder, so a letter comes before.
    before = tokenizer.token_to_id("a")
    text = tokenizer.decode([before, token_id], skip_special_tokens=False)
    assert text.startswith("a")
    return None if "\ufffd" in text else text[1:]


@pytest.mark.parametrize(("draft", "target"), WAYS, ids=IDS)
def test_shared_tokens_have_one_text_by_either_decoder(folders, draft, target):
    shared = shared_tokens(folders[draft], SIZES[draft], folders[target], SIZES[target])
    target_ids, columns = shared.target_ids.tolist(), shared.columns.tolist()
    assert target_ids == sorted(set(target_ids))
    assert len(set(columns)) == len(columns) > 350
    assert shared.draft_ids[shared.target_ids].tolist() == columns
    ours, theirs = (Vocabulary.read(folders[name], SIZES[name]) for name in (target, draft))
    special = {ours.special[our]: theirs.special[their] for our, their in zip(ours.roles, theirs.roles, strict=True)}
    special[ours.special["<|tool|>"]] = theirs.special["<|tool|>"]
    pairs = dict(zip(target_ids, columns, strict=True))
    assert special.items() <= pairs.items()
    with_space = 0
    for target_id, draft_id in list(pairs.items() - special.items())[::5]:
        text = text_of(folders[target], target_id)
        assert text == text_of(folders[draft], draft_id)
        with_space += bool(text and text.startswith(" "))
    assert with_space > 10


@pytest.mark.parametrize(("draft", "target"), WAYS, ids=IDS)
def test_another_token_is_represented_by_the_longest_one_that_ends_its_text(folders, draft, target):
    shared = shared_tokens(folders[draft], SIZES[draft], folders[target], SIZES[target])
    ours, theirs = (Vocabulary.read(folders[name], SIZES[name]) for name in (target, draft))
    known, longer = set(shared.target_ids.tolist()), 0
    for target_id in ours.texts.keys() - known:
        found, text = theirs.texts[int(shared.draft_ids[target_id])], ours.texts[target_id]
        assert text.endswith(found)
        assert found == max((each for each in theirs.texts.values() if each and text.endswith(each)), key=len)
        longer += len(found) > 1
    assert longer > 5
    boundary = theirs.special[theirs.roles[1]]
    assert all(shared.draft_ids[i] == boundary for i in set(ours.special.values()) - known)


def test_ids_without_an_embedding_are_never_used(folders):
    """Tokenizers may have tokens beyond the rows of a model's embedding, and models rows beyond the tokens."""
    draft, target = folders["sentencepiece"], folders["byte_level"]
    few, all_rows = (shared_tokens(draft, 500, target, size) for size in (550, 640))
    assert int(few.draft_ids.max()) < 500
    assert len(few.draft_ids) == 550
    assert int(few.target_ids.max()) < 550
    assert len(all_rows.draft_ids) == 640
    assert all_rows.draft_ids[600:].tolist() == [2] * 40, "padding is the end of a text"


def test_bos_that_a_tokenizer_writes_before_every_text_stands_before_contexts(folders, tmp_path):
    """Llama 2's tokenizer writes bos, others write nothing; a verifier's contexts begin as its own tokenizer does."""
    with_bos = shutil.copytree(folders["sentencepiece"], tmp_path / "bos")
    tokenizer = Tokenizer.from_file(str(with_bos / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(with_bos / "tokenizer.json"))
    firsts = [
        shared_tokens(draft, 700, folders["byte_level"], 600).first for draft in (with_bos, folders["sentencepiece"])
    ]
    assert firsts == [1, None]


@pytest.mark.parametrize("written", [["</s>"], {"content": ["</s>"]}, 3, None], ids=str)
def test_a_role_that_is_no_text_is_passed_over(folders, tmp_path, written):
    odd = shutil.copytree(folders["sentencepiece"], tmp_path / "odd")
    (odd / "tokenizer_config.json").write_text(json.dumps({"bos_token": written, "eos_token": written}))
    assert len(shared_tokens(odd, 700, folders["byte_level"], 600).columns) > 100


def test_too_small_an_intersection_is_refused_with_its_share(folders, tmp_path):
    other = save(random_model("llama"), tmp_path / "words", words(97, **{" ": 97, "s": 98}))
    with pytest.raises(
        VocabularyError,
        match=r"words has another vocabulary than the verifier .*: 2 of the verifier's 600 tokens \(0\.33 %\) are "
        r"among the draft model's 99, and drafting needs 5 %: give a draft model whose tokenizer has more of them",
    ):
        shared_tokens(other, 99, folders["byte_level"], 600)


def test_a_vocabulary_without_its_file_is_not_compared(folders, tmp_path):
    assert shared_tokens(tmp_path, 600, folders["byte_level"], 600) is None
    assert shared_tokens(folders["byte_level"], 600, tmp_path, 600) is None


def test_the_demo_tokenizer_and_its_spelling_by_pieces(tmp_path):
    """All of a published-style vocabulary is found again in the other spelling but for parts of characters."""
    verifier = DEMO_PAIR / "verifier"
    texts = Vocabulary.read(verifier, 4096).texts.values()
    shared = shared_tokens(vocabularies.spelled(tmp_path, texts), 5000, verifier, 4096)
    assert len(shared.target_ids) == 4096
