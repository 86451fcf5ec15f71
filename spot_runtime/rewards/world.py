"""Names and colours of the shapes world. Owns constants only, so that who reads prompts need not load a detector."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PALETTE: Final[Mapping[str, tuple[int, int, int]]] = MappingProxyType(
    {
        "red": (220, 40, 40),
        "green": (40, 170, 60),
        "blue": (50, 80, 220),
        "yellow": (235, 205, 40),
        "purple": (150, 50, 170),
        "black": (20, 20, 20),
    }
)
"""sRGB of every colour a prompt may name."""
BACKGROUND: Final = (237, 237, 237)
"""sRGB of the empty canvas."""
SHAPES: Final = ("square", "circle", "triangle", "cross")
"""Upright outlines; `shapes.coverage` is their exact geometry."""
OTHER: Final = "other"
"""Class of a coloured blob that is none of the shapes."""
