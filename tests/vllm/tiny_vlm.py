"""A vision-language model with random weights, small enough that a server of it starts on a CPU: BLIP-2's architecture, a byte a token."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    OPTConfig,
    PreTrainedTokenizerFast,
)

SIDE_PX, PATCH_PX, QUERIES, WIDTH = 32, 8, 8, 64
PAD, EOS, BOS = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<bos>", "<image>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    words = {token: index for index, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(vocab=words, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(list(SPECIAL))
    bytewise.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=TEMPLATE, **names)


def build(folder: Path) -> None:
    """Writes model, tokenizer and processor. It says something about every image: special tokens are never the likeliest."""
    text = tokenizer()
    size = {"height": SIDE_PX, "width": SIDE_PX}
    Blip2Processor(BlipImageProcessorPil(size=size), text, num_query_tokens=QUERIES).save_pretrained(folder)
    part = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision = Blip2VisionConfig(**part, image_size=SIDE_PX, patch_size=PATCH_PX)
    former = Blip2QFormerConfig(**part, encoder_hidden_size=WIDTH, cross_attention_frequency=1, vocab_size=len(text))
    language = OPTConfig(
        vocab_size=len(text),
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )
    config = Blip2Config(
        vision_config=vision,
        qformer_config=former,
        text_config=language,
        num_query_tokens=QUERIES,
        image_token_index=text.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3)
    model.get_input_embeddings().weight.data[: len(SPECIAL)] = 0
    model.save_pretrained(folder)
