"""Decodes one still image with the video VAE of Qwen-Image. Owns the shortcut for single frames; never encodes.

The VAE is causal in time: the first frame meets only zero padding before it, so of each 3-D kernel only the last time slice acts. A 2-D
convolution with that slice gives the same numbers for a third of the work and memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageCausalConv3d
from torch import Tensor, nn
from torch.nn import functional

from spot_runtime.diffusion.geometry import PATCH_SIZE

CPU_IMAGES_MIN: Final = 2
CPU_IMAGES_MAX: Final = 8
"""Between these, oneDNN's convolutions gave one result and the best speed (measured on AVX-512)."""


class FrameConv(nn.Module):
    """A causal 3-D convolution applied to a first frame [B, C, 1, H, W], as the 2-D convolution that it is."""

    def __init__(self, conv: QwenImageCausalConv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight[:, :, -1].detach().contiguous(), requires_grad=False)
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach(), requires_grad=False)
        self.stride = (conv.stride[1], conv.stride[2])
        self.padding = (conv._padding[2], conv._padding[0])

    def forward(self, frame: Tensor) -> Tensor:
        planes = functional.conv2d(frame[:, :, 0], self.weight, self.bias, self.stride, self.padding)
        return planes.unsqueeze(2)


class FrameDecoder:
    """Packed latents to an image. Takes `vae` over: its convolutions are replaced, its encoder dropped.

    Its parameters may still be on the meta device, without values.
    """

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        vae.encoder = None
        vae.quant_conv = None
        _replace_convolutions(vae)
        self.vae = vae.eval().requires_grad_(False)
        dtype = next(vae.parameters()).dtype
        self._mean = torch.tensor(vae.config.latents_mean, dtype=dtype).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(vae.config.latents_std, dtype=dtype).view(1, -1, 1, 1, 1)

    def decode(self, latents: Tensor, grid: tuple[int, int]) -> np.ndarray:
        """[B, L, C] normalised packed latents to [B, H, W, 3] uint8, rounded as diffusers' image processor rounds.

        On the CPU an image is the same whatever it is decoded with: convolutions over one image or over many sum in other orders (one alone
        is slower, too), so a lone image gets a blank beside it and many go in parts.
        """
        if latents.device.type != "cpu":
            return self._decode(latents, grid)
        parts = []
        for part in torch.split(latents, CPU_IMAGES_MAX):
            blanks = max(CPU_IMAGES_MIN - len(part), 0)
            parts.append(self._decode(functional.pad(part, (0, 0, 0, 0, 0, blanks)), grid)[: len(part)])
        return np.concatenate(parts)

    @torch.inference_mode()
    def _decode(self, latents: Tensor, grid: tuple[int, int]) -> np.ndarray:
        planes = unpack(latents, grid).to(self._mean.dtype)
        planes = planes * self._std.to(planes.device) + self._mean.to(planes.device)
        image = self.vae.decoder(self.vae.post_quant_conv(planes))[:, :, 0]
        unit = (image.float() / 2 + 0.5).clamp(0, 1)
        pixels = (unit.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)
        result: np.ndarray = pixels.cpu().numpy()
        return result


def unpack(latents: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, rows * columns, 4 z] tokens of 2 x 2 patches to latent planes [B, z, 1, 2 rows, 2 columns]."""
    rows, columns = grid
    patches = latents.view(len(latents), rows, columns, -1, PATCH_SIZE, PATCH_SIZE)
    planes = patches.permute(0, 3, 1, 4, 2, 5)
    return planes.reshape(len(latents), -1, 1, rows * PATCH_SIZE, columns * PATCH_SIZE)


def _replace_convolutions(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, QwenImageCausalConv3d):
            setattr(module, name, FrameConv(child))
        else:
            _replace_convolutions(child)
