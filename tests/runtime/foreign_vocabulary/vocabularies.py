"""Tokenizers of two shapes: byte-level BPE as GPT-2's and Llama 3's, SentencePiece as Llama 2's and Gemma's."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (Path(__file__).parents[3] / "README.md").read_text()
SPACE = "\u2581"
PLAIN_SPECIALS = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def byte_level(folder: Path, vocab_size: int = 600) -> Path:
    """Train on `TEXT`; <|begin|> and <|end|> begin and end a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials, alphabet = ["<|begin|>", "<|end|>", "<|tool|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    return write(folder, tokenizer, "<|begin|>", "<|end|>")


def sentencepiece(folder: Path, vocab_size: int = 700) -> Path:
    """Train on `TEXT`, with a token for every byte."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = [*PLAIN_SPECIALS, "<|tool|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*specials, *BYTES])
    tokenizer.train_from_iterator([TEXT], trainer)
    made = json.loads(tokenizer.to_str())
    return _spelled(folder, {token: i for token, i in made["model"]["vocab"].items()}, specials)


def spelled(folder: Path, texts: Iterable[bytes]) -> Path:
    """A vocabulary that spells texts as SentencePiece does; ids ascend behind those of specials and bytes."""
    pieces = (text.decode(errors="replace").replace(" ", SPACE) for text in texts)
    tokens = dict.fromkeys([*PLAIN_SPECIALS, *BYTES, *(piece for piece in pieces if "\ufffd" not in piece)])
    return _spelled(folder, {token: i for i, token in enumerate(tokens)}, PLAIN_SPECIALS)


def _spelled(folder: Path, vocabulary: dict[str, int], specials: Iterable[str]) -> Path:
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in specials])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return write(folder, tokenizer, "<s>", "</s>")


def write(folder: Path, tokenizer: Tokenizer, bos: str, eos: str) -> Path:
    """Save a tokenizer as transformers does; newer files write a token with its flags."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": bos, "eos_token": {"content": eos, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
