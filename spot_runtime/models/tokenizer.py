"""Byte-level BPE for the tiny pipelines. Owns the vocabulary; never sees a prompt at run time.

Qwen-Image drops the first 34 tokens of its prompt template by count, so a tokenizer of another vocabulary must cut the template
into exactly as many. Words of the domain become one token each; text to be drawn stays single characters, so that the model
can spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

TEMPLATE_PREFIX_TOKENS = 34
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The prompt template of Qwen-Image (arXiv 2508.02324); the pipeline holds its own copy, a test compares the two."""

REPEATS = 50
"""How often a word enters the training corpus: enough for every merge of it to pass `min_frequency`."""


def make_tokenizer(words: Iterable[str]) -> Qwen2Tokenizer:
    """A Qwen2 tokenizer whose one-token words are `words` and those of the prompt template, bare or after a space.

    Raises AssertionError if the template does not come to 34 tokens.
    """
    bare_template = re.sub(r"<\|im_(start|end)\|>", "", TEMPLATE.format(""))
    known = sorted({*re.findall(r"[A-Za-z]+", bare_template), *words})
    bpe = _train_bpe([form for word in known for form in (word, " " + word)] * REPEATS)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    prefix = len(tokenizer(TEMPLATE.split("{}")[0]).input_ids)
    assert prefix == TEMPLATE_PREFIX_TOKENS, f"template prefix is {prefix} tokens, must be {TEMPLATE_PREFIX_TOKENS}"
    return tokenizer


def _train_bpe(corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
