"""How well an image goes with its whole prompt, by a model with CLIP's two towers. Owns model and scale; never reads a row's clauses.

    clip-score    100 cos(image, text) / 35, CLIP ViT-L/14 (arXiv 2104.08718 without its floor at 0)
    pickscore     logit scale * cos(image, text) / 26, PickScore v1 (arXiv 2305.01569)

The divisors bring good images near 1, as Flow-GRPO does for PickScore. There is no right and wrong: `correct` is a reward from 1 up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.engines.photographs import CLIP_DEFAULT, CLIP_VARIABLE, LAST, unit
from spot_runtime.rewards.engines.pretrained import check_model_name, device_name, loaded, model_name
from spot_runtime.rewards.prompts import GenevalRow
from spot_runtime.rewards.scorer import Verdict

PICKSCORE_VARIABLE: Final = "SPOTLIGHT_PICKSCORE"
PICKSCORE_DEFAULT: Final = "yuvalkirstain/PickScore_v1"
CLIP_SCALE: Final = 100.0
CLIP_GOOD: Final = 35.0
PICKSCORE_GOOD: Final = 26.0


class LikenessJudge:
    """scale * cos(image, text) / good; `scale` None takes the model's own. One image at a time goes through the model."""

    def __init__(
        self,
        model: str,
        *,
        scale: float | None,
        good: float,
        device: str = "cpu",
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """`weights` replace those of the model, all of them. Raises InputError where it cannot be loaded or they do not fit."""
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        self._processor = loaded(AutoImageProcessor, model)
        self._tokenizer = loaded(AutoTokenizer, model)
        self._model = loaded(CLIPModel, model).eval().to(device)
        if weights is not None:
            _replace(self._model, weights, model)
        self._scale = float(self._model.logit_scale.detach().exp()) if scale is None else scale
        self._good = good
        self._lock = threading.Lock()

    def __call__(self, row: GenevalRow, image: Image) -> Verdict:
        with self._lock:
            reward = self._scale * self._cosine(row.prompt, image) / self._good
        return Verdict(
            reward=reward, correct=reward >= 1, reason="" if reward >= 1 else f"{reward:.3f} of a good image"
        )

    def _cosine(self, prompt: str, image: Image) -> float:
        import torch

        pixels = self._processor(images=image, return_tensors="pt", input_data_format=LAST).to(self._model.device)
        positions = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(prompt, truncation=True, max_length=positions, return_tensors="pt")
        with torch.inference_mode():
            image_1D = unit(self._model.get_image_features(**pixels))
            text_1D = unit(self._model.get_text_features(**tokens.to(self._model.device)))
            cosine: Any = (image_1D * text_1D).sum()
        return float(cosine)


def _replace(model: Any, weights: Mapping[str, Any], name: str) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"weights do not fit model {name!r}: {str(error)[:300]}") from error


def check_clip_score(environment: Mapping[str, str]) -> None:
    """Raises InputError for a model that is not to be had. Loads nothing."""
    check_model_name(CLIP_VARIABLE, CLIP_DEFAULT, environment)


def load_clip_score(environment: Mapping[str, str]) -> LikenessJudge:
    """Raises InputError where the model cannot be loaded."""
    model = model_name(CLIP_VARIABLE, CLIP_DEFAULT, environment)
    return LikenessJudge(model, scale=CLIP_SCALE, good=CLIP_GOOD, device=device_name(environment))


def check_pickscore(environment: Mapping[str, str]) -> None:
    """Raises InputError for a model that is not to be had. Loads nothing."""
    check_model_name(PICKSCORE_VARIABLE, PICKSCORE_DEFAULT, environment)


def load_pickscore(environment: Mapping[str, str]) -> LikenessJudge:
    """Raises InputError where the model cannot be loaded."""
    model = model_name(PICKSCORE_VARIABLE, PICKSCORE_DEFAULT, environment)
    return LikenessJudge(model, scale=None, good=PICKSCORE_GOOD, device=device_name(environment))
