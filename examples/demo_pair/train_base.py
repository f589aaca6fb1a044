"""A byte-level BPE tokenizer for code: runs of spaces and newlines are tokens, digits are split."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Words take their leading space; digits stand alone; a newline swallows the indentation that follows it, so that one
# token says "next line at this depth"; the rest of a run of spaces is one piece.
_SPLIT = r"\n+ *| ?[A-Za-z_]+| ?[^\sA-Za-z_\d]+|\d| +(?=\S)|\s"

# Messages become comments, the form in which prose precedes code in the training corpus.
CHAT_TEMPLATE = (
    '{%- if tools -%}{{ \'# tools, called by <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\\n\' }}'
    "{%- for tool in tools -%}{{ '# ' + tool | tojson + '\\n' }}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ message['content'] + '\\n\\n' }}"
    "{%- else -%}{{ '# ' + message['role'] + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocab_size` entries; token 0 is the document separator, used as bos and eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
