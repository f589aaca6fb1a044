"""Folders of draft models whose tokens are words."""

from tokenizers import Tokenizer, models, pre_tokenizers


def save(model, folder, vocabulary=None):
    model.save_pretrained(folder)
    if vocabulary is not None:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def words(count, **changed):
    return {f"t{index}": index for index in range(count)} | changed
