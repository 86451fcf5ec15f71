"""HPS v2 on tiny random weights: a checkpoint with OpenCLIP's names scores as OpenCLIP's own architecture does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

from spot_runtime.errors import InputError
from spot_runtime.rewards.catalog import check_reward, load_judge
from spot_runtime.rewards.prompts import GenevalRow
from spot_runtime.rewards.scorer import Verdict

WIDTH, HEADS, LAYERS, POSITIONS, SIDE_PX, PATCH_PX, JOINT = 16, 2, 2, 12, 32, 8, 8
WORDS = ["<pad>", "a", "red", "blue", "dog", "<eos>"]
EOS = WORDS.index("<eos>")
SCENE = np.random.default_rng(3).integers(0, 256, (48, 64, 3), dtype=np.uint8)
ROW = GenevalRow(tag="text", include=(), prompt='a red dog "a"')


class Block(nn.Module):
    """Pre-norm attention and MLP, with OpenCLIP's names."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(WIDTH, 4 * WIDTH))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        patches = (SIDE_PX // PATCH_PX) ** 2
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH_PX, PATCH_PX, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(torch.randn(patches + 1, WIDTH))
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.transformer = Transformer()
        self.proj = nn.Parameter(torch.randn(WIDTH, JOINT))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(1, 1, WIDTH), patches], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """The architecture that HPS v2 was trained in, by its parameter names."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.transformer = Visual(), Transformer()
        self.token_embedding = nn.Embedding(len(WORDS), WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, JOINT))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def cosine(self, pixels: torch.Tensor, tokens: torch.Tensor) -> float:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.token_embedding(tokens) + self.positional_embedding[:length]
        text = self.ln_final(self.transformer(x, mask))[0, tokens[0].argmax()] @ self.text_projection
        return float(torch.cosine_similarity(self.visual(pixels)[0], text, dim=0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Architecture, tokenizer and image processor in transformers' format; its weights are not the ones that count."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    part = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "hidden_act": "gelu"}
    part |= {"num_attention_heads": HEADS}
    text = part | {"vocab_size": len(WORDS), "max_position_embeddings": POSITIONS, "eos_token_id": EOS}
    vision = part | {"image_size": SIDE_PX, "patch_size": PATCH_PX}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=JOINT)).save_pretrained(folder)
    size = {"shortest_edge": SIDE_PX}
    CLIPImageProcessorPil(size=size, crop_size={"height": SIDE_PX, "width": SIDE_PX}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def published() -> OpenClip:
    torch.manual_seed(7)
    return OpenClip().eval()


def cosine_by(model: OpenClip, base: Path) -> float:
    pixels = CLIPImageProcessorPil.from_pretrained(base)(images=SCENE, return_tensors="pt")["pixel_values"]
    tokens = PreTrainedTokenizerFast.from_pretrained(base)(ROW.prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.cosine(pixels, tokens)


def test_a_published_checkpoint_scores_as_in_the_architecture_it_was_trained_in(
    published: OpenClip, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": published.state_dict()}, path)
    judge = load_judge("hpsv2", {"SPOTLIGHT_HPSV2": str(path), "SPOTLIGHT_HPSV2_BASE": str(base)})
    verdict = judge(ROW, SCENE)
    assert isinstance(verdict, Verdict)
    assert verdict.reward == pytest.approx(100 * cosine_by(published, base) / 35, abs=1e-4)
    assert verdict.correct == (verdict.reward >= 1)


def test_a_folder_needs_no_base_and_has_weights_of_its_own(published: OpenClip, base: Path) -> None:
    verdict = load_judge("hpsv2", {"SPOTLIGHT_HPSV2": str(base)})(ROW, SCENE)
    assert isinstance(verdict, Verdict)
    assert abs(verdict.reward - 100 * cosine_by(published, base) / 35) > 1e-2


def test_weights_that_cannot_be_used_are_one_line(published: OpenClip, base: Path, tmp_path: Path) -> None:
    def fault(path: Path | str) -> str:
        with pytest.raises(InputError) as caught:
            load_judge("hpsv2", {"SPOTLIGHT_HPSV2": str(path), "SPOTLIGHT_HPSV2_BASE": str(base)})
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 4)
    torch.save(nn.Linear(1, 1), tmp_path / "code.pt")
    torch.save({"state_dict": {"logit_scale": torch.tensor(1.0)}}, tmp_path / "short.pt")
    wide = {name: torch.cat([tensor, tensor]) if tensor.ndim == 2 else tensor for name, tensor in state(published)}
    torch.save(wide, tmp_path / "wide.pt")
    for name in ("torn.pt", "torn.safetensors", "code.pt"):
        assert "no checkpoint" in fault(tmp_path / name)
    assert "not a checkpoint of OpenCLIP: lacks 'visual.proj'" in fault(tmp_path / "short.pt")
    assert "weights do not fit model" in fault(tmp_path / "wide.pt")
    assert "no such file" in fault(tmp_path / "nowhere.pt")
    assert "must be a folder with config.json, or a hub id" in fault(tmp_path / "nowhere")


def state(model: OpenClip) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def test_without_weights_one_line_says_which_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTLIGHT_HPSV2", raising=False)
    with pytest.raises(InputError, match=r"SPOTLIGHT_HPSV2 = '': must be the checkpoint of HPS v2 \(HPS_v2\.1"):
        check_reward("hpsv2")
