"""Tokenizers of the two ways to cover every byte, and one that covers words alone."""

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from wingbeat.runtime.tokenizer import Tokenizer

EOS = "<eos>"


def _wrap(backend: BackendTokenizer, **kwargs) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, **kwargs))


def byte_level_tokenizer(**kwargs) -> Tokenizer:
    """A tokenizer with a token per byte and a few merged ones, as GPT-2, Llama 3 and Qwen have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł")]
    entries = [EOS, *alphabet, *("".join(pair) for pair in merges)]
    backend = BackendTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return _wrap(backend, **kwargs)


def byte_fallback_tokenizer() -> Tokenizer:
    """Sentencepiece's way, as Llama 2 and Gemma have it: a metasymbol for spaces, bytes for unknown characters."""
    byte_entries = [f"<0x{value:02X}>" for value in range(256)]
    letters = ["▁", *"abcdefghilorstuvwx(),:'#!HT", "▁w", "ll"]
    entries = ["<unk>", EOS, "<s>", *byte_entries, *letters]
    vocab = {entry: i for i, entry in enumerate(entries)}
    backend = BackendTokenizer(models.BPE(vocab, [("▁", "w"), ("l", "l")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.add_special_tokens([EOS, "<s>"])
    return _wrap(backend)


def metaspace_tokenizer() -> Tokenizer:
    """T5's way: a metasymbol for spaces, dropped where a text begins; what it does not know has no bytes."""
    letters = ["▁", *"abcdefghilmnorstuvwxEN漢字😀é́שלום", "▁w", "ll"]
    vocab = {entry: i for i, entry in enumerate(["<unk>", EOS, *dict.fromkeys(letters)])}
    backend = BackendTokenizer(models.BPE(vocab, [("▁", "w"), ("l", "l")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    backend.add_special_tokens([EOS])
    return _wrap(backend)
