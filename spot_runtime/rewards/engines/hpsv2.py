"""HPS v2 (arXiv 2306.09341): CLIP ViT-H/14, tuned to which of two images people prefer. Owns where its weights come from and their names.

    hpsv2    100 cos(image, text) / 35

The weights that its authors publish are a checkpoint with OpenCLIP's names; architecture, tokenizer and image processor then come from the
model that was tuned, in transformers' format. A folder in transformers' format needs nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spot_runtime.errors import InputError
from spot_runtime.rewards.engines.likeness import CLIP_GOOD, CLIP_SCALE, LikenessJudge
from spot_runtime.rewards.engines.pretrained import check_model_name, device_name, model_name

HPSV2_VARIABLE: Final = "SPOTLIGHT_HPSV2"
BASE_VARIABLE: Final = "SPOTLIGHT_HPSV2_BASE"
BASE_DEFAULT: Final = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
CHECKPOINT_SUFFIXES: Final = (".pt", ".safetensors")

_TOWERS: Final = (
    ("vision_model", "visual.", {"ln_pre": "pre_layrnorm", "ln_post": "post_layernorm"}),
    ("text_model", "", {"ln_final": "final_layer_norm"}),
)
_LAYER: Final = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}


def check_hpsv2(environment: Mapping[str, str]) -> None:
    """Raises InputError where no weights were named, or what was named cannot be any. Loads nothing."""
    name = environment.get(HPSV2_VARIABLE, "").strip()
    if not name:
        raise InputError(
            f"reward = 'hpsv2': {HPSV2_VARIABLE} = '': must be the checkpoint of HPS v2 (HPS_v2.1_compressed.pt of xswu/HPSv2), "
            "or a folder with it in the format of transformers"
        )
    if not name.endswith(CHECKPOINT_SUFFIXES):
        check_model_name(HPSV2_VARIABLE, "", environment)
        return
    if not Path(name).expanduser().is_file():
        raise InputError(f"{HPSV2_VARIABLE} = {name!r}: no such file")
    check_model_name(BASE_VARIABLE, BASE_DEFAULT, environment)


def load_hpsv2(environment: Mapping[str, str]) -> LikenessJudge:
    """Raises InputError where weights or base cannot be loaded, or do not fit each other."""
    check_hpsv2(environment)
    name, device = environment[HPSV2_VARIABLE].strip(), device_name(environment)
    if not name.endswith(CHECKPOINT_SUFFIXES):
        return LikenessJudge(name, scale=CLIP_SCALE, good=CLIP_GOOD, device=device)
    weights = clip_weights(read_checkpoint(Path(name).expanduser()))
    base = model_name(BASE_VARIABLE, BASE_DEFAULT, environment)
    return LikenessJudge(base, scale=CLIP_SCALE, good=CLIP_GOOD, device=device, weights=weights)


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Tensors by OpenCLIP's names; of a pickle nothing but tensors is read. Raises InputError."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
        return dict(found.get("state_dict", found))
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, AttributeError, SafetensorError) as error:
        raise InputError(f"{HPSV2_VARIABLE} = {str(path)!r}: no checkpoint: {type(error).__name__}: {error}") from error


def clip_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of OpenCLIP's two towers by the names of transformers' CLIPModel. Raises InputError for one that is missing."""
    try:
        return dict(_renamed(weights))
    except KeyError as error:
        raise InputError(f"{HPSV2_VARIABLE}: not a checkpoint of OpenCLIP: lacks {error}") from error


def _renamed(weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "logit_scale", weights["logit_scale"]
    yield "visual_projection.weight", weights["visual.proj"].T.contiguous()
    yield "text_projection.weight", weights["text_projection"].T.contiguous()
    yield "vision_model.embeddings.class_embedding", weights["visual.class_embedding"]
    yield "vision_model.embeddings.patch_embedding.weight", weights["visual.conv1.weight"]
    yield "vision_model.embeddings.position_embedding.weight", weights["visual.positional_embedding"]
    yield "text_model.embeddings.token_embedding.weight", weights["token_embedding.weight"]
    yield "text_model.embeddings.position_embedding.weight", weights["positional_embedding"]
    for ours, theirs, norms in _TOWERS:
        for old, new in norms.items():
            yield from _both(weights, f"{theirs}{old}", f"{ours}.{new}")
        blocks = f"{theirs}transformer.resblocks."
        for index in sorted({key[len(blocks) :].split(".")[0] for key in weights if key.startswith(blocks)}):
            yield from _layer(weights, f"{blocks}{index}.", f"{ours}.encoder.layers.{index}.")


def _layer(weights: Mapping[str, Any], theirs: str, ours: str) -> Iterator[tuple[str, Any]]:
    for old, new in _LAYER.items():
        yield from _both(weights, f"{theirs}{old}", f"{ours}{new}")
    for kind in ("weight", "bias"):
        parts = weights[f"{theirs}attn.in_proj_{kind}"].chunk(3)
        for letter, part in zip("qkv", parts, strict=True):
            yield f"{ours}self_attn.{letter}_proj.{kind}", part.contiguous()


def _both(weights: Mapping[str, Any], theirs: str, ours: str) -> Iterator[tuple[str, Any]]:
    for kind in ("weight", "bias"):
        yield f"{ours}.{kind}", weights[f"{theirs}.{kind}"]
