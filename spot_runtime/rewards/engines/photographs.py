"""GenEval over photographs (arXiv 2310.11513): Mask2Former finds objects, CLIP names their colours. Owns both models.

Never judges: `geneval` has the rules. Models are local folders or hub ids; one image at a time goes through them, whoever asks.

The colour of an object is the one whose phrases are nearest, in CLIP's space, to its box with all but the object painted grey.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spot_runtime.rewards.coco import COLORS, check_coco
from spot_runtime.rewards.detection import Box, Detection, Image
from spot_runtime.rewards.engines.pretrained import check_model_name, device_name, loaded, model_name
from spot_runtime.rewards.geneval import OFFICIAL_THRESHOLDS, Rule, score
from spot_runtime.rewards.prompts import OBJECTS_MAX, GenevalRow
from spot_runtime.rewards.scorer import Verdict, require_objects

DETECTOR_VARIABLE: Final = "SPOTLIGHT_DETECTOR"
CLIP_VARIABLE: Final = "SPOTLIGHT_CLIP"
DETECTOR_DEFAULT: Final = "facebook/mask2former-swin-small-coco-instance"
CLIP_DEFAULT: Final = "openai/clip-vit-large-patch14"
"""OpenAI's ViT-L/14: the weights that GenEval loads through OpenCLIP."""
GREY: Final = 0x99
"""What GenEval paints around an object before its colour is named."""
LAST: Final = "channels_last"
"""Processors guess it otherwise, and wrongly for a crop of three rows."""
PHRASES: Final = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
COLOURED_MAX: Final = 64
"""Colours are named for so many detections of an image, most confident first."""

GENEVAL_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mouse": "computer mouse",
        "remote": "tv remote",
        "keyboard": "computer keyboard",
        "aeroplane": "airplane",
        "motorbike": "motorcycle",
        "sofa": "couch",
        "pottedplant": "potted plant",
        "diningtable": "dining table",
        "tvmonitor": "tv",
    }
)
"""Names of detectors that GenEval calls otherwise."""

Masks = NDArray[np.bool_]


class PhotographJudge:
    """GenEval's rules over two models of any size.

    Args:
        rule: which reward.
        find: all detections of an image, without colours, each with its mask.
        name_colors: one of COLORS for each object of an image, given class names, boxes and masks.
    """

    def __init__(self, rule: Rule, find: Finder, name_colors: ColorNamer) -> None:
        self._rule: Rule = rule
        self._find = find
        self._name_colors = name_colors
        self._lock = threading.Lock()

    def __call__(self, row: GenevalRow, image: Image) -> Verdict:
        """Raises InputError for a text row, or a class or colour that is not GenEval's."""
        require_objects(row)
        check_coco(row)
        with self._lock:
            found = self._find(image)
            if any(clause.color for clause in row.include):
                found = self._colored(image, found)
        judged = score(row, [detection for detection, _ in found], self._rule, OFFICIAL_THRESHOLDS)
        return Verdict(reward=judged.reward, correct=judged.correct, reason=judged.reason)

    def _colored(self, image: Image, found: Sequence[Found]) -> list[Found]:
        chosen = sorted(found, key=lambda item: -item[0].score)[:COLOURED_MAX]
        colors = self._name_colors(image, chosen)
        return [
            (Detection(item.class_name, color, item.box, item.score, item.area), mask)
            for (item, mask), color in zip(chosen, colors, strict=True)
        ]


Found = tuple[Detection, Masks]
"""An object and which pixels it covers."""
Finder = Callable[[Image], list[Found]]
ColorNamer = Callable[[Image, Sequence[Found]], list[str]]


class Mask2Former:
    """Instances above the official threshold, by GenEval's class names."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        """Raises InputError where the model cannot be loaded."""
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        self._processor = loaded(AutoImageProcessor, model)
        self._model = loaded(Mask2FormerForUniversalSegmentation, model).eval().to(device)
        self._names = {index: _geneval_name(name) for index, name in self._model.config.id2label.items()}

    def __call__(self, image: Image) -> list[Found]:
        import torch

        inputs = self._processor(images=image, return_tensors="pt", input_data_format=LAST).to(self._model.device)
        with torch.inference_mode():
            outputs = self._model(**inputs)
        (instances,) = self._processor.post_process_instance_segmentation(
            outputs,
            threshold=OFFICIAL_THRESHOLDS.found,
            target_sizes=[image.shape[:2]],
            return_binary_maps=True,
        )
        masks = np.asarray(instances["segmentation"].cpu()) > 0.5 if instances["segments_info"] else ()
        found = [
            _found(self._names[info["label_id"]], float(info["score"]), mask)
            for info, mask in zip(instances["segments_info"], masks, strict=True)
            if mask.any()
        ]
        return _best_of_each(found)


class ClipColors:
    """Colours by zero-shot classification. Text features are computed once a class."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        """Raises InputError where the model cannot be loaded."""
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        self._processor = loaded(AutoImageProcessor, model)
        self._tokenizer = loaded(AutoTokenizer, model)
        self._model = loaded(CLIPModel, model).eval().to(device)
        self._classifiers: dict[str, Any] = {}

    def __call__(self, image: Image, found: Sequence[Found]) -> list[str]:
        import torch

        if not found:
            return []
        crops = [cut_out(image, item.box, mask) for item, mask in found]
        pixels = self._processor(images=crops, return_tensors="pt", input_data_format=LAST).to(self._model.device)
        with torch.inference_mode():
            image_ND = unit(self._model.get_image_features(**pixels))
            logits_NK = torch.stack(
                [
                    self._classifier(item.class_name) @ feature_D
                    for (item, _), feature_D in zip(found, image_ND, strict=True)
                ]
            )
        return [COLORS[index] for index in logits_NK.argmax(-1).tolist()]

    def _classifier(self, name: str) -> Any:
        """K x D, a row a colour: the mean of its phrases' unit vectors, unit length again."""
        if name not in self._classifiers:
            phrases = [phrase.format(color=color, name=name) for color in COLORS for phrase in PHRASES]
            tokens = self._tokenizer(phrases, padding=True, truncation=True, return_tensors="pt").to(self._model.device)
            text_PD = unit(self._model.get_text_features(**tokens))
            self._classifiers[name] = unit(text_PD.view(len(COLORS), len(PHRASES), -1).mean(1))
        return self._classifiers[name]


def unit(features: Any) -> Any:
    """Unit vectors; transformers returns either a tensor or an output that holds it."""
    tensor = getattr(features, "pooler_output", features)
    return tensor / tensor.norm(dim=-1, keepdim=True)


def cut_out(image: Image, box: Box, mask: Masks) -> Image:
    """The box of an image, GREY where the object is not."""
    x0, y0, x1, y1 = map(int, box)
    painted = np.where(mask[..., None], image, np.uint8(GREY))
    return painted[y0:y1, x0:x1]


def _found(name: str, confidence: float, mask: Masks) -> Found:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
    return Detection(name, "", box, confidence, float(mask.sum())), mask


def _best_of_each(found: Sequence[Found]) -> list[Found]:
    """At most OBJECTS_MAX of a class, most confident first: more are never judged."""
    kept: dict[str, list[Found]] = {}
    for item in sorted(found, key=lambda item: -item[0].score):
        of_class = kept.setdefault(item[0].class_name, [])
        if len(of_class) < OBJECTS_MAX:
            of_class.append(item)
    return [item for of_class in kept.values() for item in of_class]


def _geneval_name(name: str) -> str:
    plain = name.lower().replace("_", " ")
    return GENEVAL_NAMES.get(plain, plain)


def check_photographs(environment: Mapping[str, str]) -> None:
    """Raises InputError for a model that is not to be had."""
    check_model_name(DETECTOR_VARIABLE, DETECTOR_DEFAULT, environment)
    check_model_name(CLIP_VARIABLE, CLIP_DEFAULT, environment)


def load_photographs(rule: Rule, environment: Mapping[str, str]) -> PhotographJudge:
    """Raises InputError where a model cannot be loaded."""
    device = device_name(environment)
    detector = Mask2Former(model_name(DETECTOR_VARIABLE, DETECTOR_DEFAULT, environment), device)
    return PhotographJudge(rule, detector, ClipColors(model_name(CLIP_VARIABLE, CLIP_DEFAULT, environment), device))
