"""Latents in flight, in memory that a node shares with its workers. Owns the layout; never decides which slot belongs to whom.

A slot holds two copies of the latents, window latents and log-probs. The latents after i denoising steps lie in copy i mod 2: a step reads
one copy and writes the other, so a worker that dies in mid-step leaves the last finished step whole. Window latent j belongs to step
`sde_window[0] + j` and is only ever written with the same values again. The memory has no name: it goes with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ArenaShape:
    """`slots` slots of latents [tokens, channels] fp32 and windows of up to `window_max` stochastic steps."""

    slots: int
    tokens: int
    channels: int
    window_max: int

    @property
    def latent_floats(self) -> int:
        return self.tokens * self.channels

    @property
    def slot_floats(self) -> int:
        return (2 + self.window_max + 1) * self.latent_floats + self.window_max

    @property
    def size_bytes(self) -> int:
        return max(mmap.PAGESIZE, 4 * self.slots * self.slot_floats)


class LatentArena:
    """Views into one shared mapping. A node makes it; workers map the same descriptor."""

    def __init__(self, shape: ArenaShape, fd: int) -> None:
        self.shape = shape
        self.fd = fd
        self._memory = mmap.mmap(fd, shape.size_bytes)
        floats = np.frombuffer(self._memory, dtype=np.float32, count=shape.slots * shape.slot_floats)
        self._slots = floats.reshape(shape.slots, shape.slot_floats)

    @classmethod
    def create(cls, shape: ArenaShape) -> LatentArena:
        fd = os.memfd_create("spotlight-arena")
        os.ftruncate(fd, shape.size_bytes)
        return cls(shape, fd)

    def latents(self, slot: int, denoising_step: int) -> np.ndarray:
        """View [tokens, channels] of the latents after `denoising_step` steps."""
        size = self.shape.latent_floats
        copy = denoising_step % 2
        return self._slots[slot, copy * size : (copy + 1) * size].reshape(self.shape.tokens, self.shape.channels)

    def window_latents(self, slot: int) -> np.ndarray:
        """View [window_max + 1, tokens, channels]."""
        size, first = self.shape.latent_floats, 2 * self.shape.latent_floats
        flat = self._slots[slot, first : first + (self.shape.window_max + 1) * size]
        return flat.reshape(self.shape.window_max + 1, self.shape.tokens, self.shape.channels)

    def log_probs(self, slot: int) -> np.ndarray:
        """View [window_max]."""
        return self._slots[slot, self.shape.slot_floats - self.shape.window_max :]

    def close(self) -> None:
        os.close(self.fd)
