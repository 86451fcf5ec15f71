"""Flow matching on packed latents: the loss, the ODE sampler, and the way to and from pixels. Owns no weights and keeps no state.

    x_s = (1 − s) x_0 + s ε        noise level s in (0, 1], ε ~ N(0, 1)
    v*  = ε − x_0                  what the transformer predicts from (x_s, s, prompt)
    x_{s'} = x_s + (s' − s) v      one ODE step of the sampler

Legend of shape suffixes: B samples, T image tokens, C packed channels, L text tokens, D text width, H and W latent sides.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

PATCH = 2


def velocity(
    transformer: QwenImageTransformer2DModel,
    x_BTC: torch.Tensor,
    noise_level_B: torch.Tensor,
    embeds_BLD: torch.Tensor,
    mask_BL: torch.Tensor,
) -> torch.Tensor:
    """The transformer's forward without host synchronisation, so that a CUDA graph can hold it; a test compares it with the stock one.

    Args:
        x_BTC: noisy packed latents of a square image.
        noise_level_B: noise level s in (0, 1].
        embeds_BLD: prompt embeddings, zero where padded.
        mask_BL: bool, True where a text token is real.
    """
    side = math.isqrt(x_BTC.shape[1])
    image = transformer.img_in(x_BTC)
    text = transformer.txt_in(transformer.txt_norm(embeds_BLD))
    time = transformer.time_text_embed(noise_level_B, image, None)
    rope = transformer.pos_embed([[(1, side, side)]], max_txt_seq_len=text.shape[1], device=image.device)
    for block in transformer.transformer_blocks:
        text, image = block(
            hidden_states=image,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask_BL,
            temb=time,
            image_rotary_emb=rope,
        )
    v_BTC: torch.Tensor = transformer.proj_out(transformer.norm_out(image, time))
    return v_BTC


def flow_loss(
    transformer: QwenImageTransformer2DModel,
    x0_BTC: torch.Tensor,
    noise_BTC: torch.Tensor,
    noise_level_B: torch.Tensor,
    embeds_BLD: torch.Tensor,
    mask_BL: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of the predicted velocity; a scalar."""
    s_B11 = noise_level_B[:, None, None]
    x_BTC = (1 - s_B11) * x0_BTC + s_B11 * noise_BTC
    v_BTC = velocity(transformer, x_BTC, noise_level_B, embeds_BLD, mask_BL)
    return (v_BTC - (noise_BTC - x0_BTC)).square().mean()


def sampler_noise_levels(noise_scheduler: FlowMatchEulerDiscreteScheduler, num_steps: int, tokens: int) -> torch.Tensor:
    """The `num_steps + 1` noise levels that QwenImagePipeline visits for an image of `tokens` tokens, from 1 down to 0."""
    config = noise_scheduler.config
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    own = FlowMatchEulerDiscreteScheduler.from_config(config)
    own.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps).tolist(), mu=mu)
    levels: torch.Tensor = own.sigmas
    return levels


@torch.no_grad()
def ode_sample(
    transformer: QwenImageTransformer2DModel,
    x_BTC: torch.Tensor,
    noise_levels: torch.Tensor,
    embeds_BLD: torch.Tensor,
    mask_BL: torch.Tensor,
) -> torch.Tensor:
    """Denoises x_BTC from the first to the last noise level by Euler steps, without guidance."""
    for now, after in zip(noise_levels[:-1].tolist(), noise_levels[1:].tolist(), strict=True):
        s_B = torch.full((len(x_BTC),), now, device=x_BTC.device)
        x_BTC = x_BTC + (after - now) * velocity(transformer, x_BTC, s_B, embeds_BLD, mask_BL)
    return x_BTC


@torch.no_grad()
def encode_images(vae: AutoencoderKLQwenImage, images_B3HW: torch.Tensor) -> torch.Tensor:
    """Packed, normalised latents of images in [-1, 1]; H and W are divisible by 8."""
    mean, std = _latent_statistics(vae, images_B3HW.device)
    z_BZHW = vae.encode(images_B3HW[:, :, None]).latent_dist.mode()[:, :, 0]
    return pack((z_BZHW - mean) / std)


@torch.no_grad()
def decode_latents(vae: AutoencoderKLQwenImage, x_BTC: torch.Tensor) -> torch.Tensor:
    """Images of packed, normalised latents: B x H x W x 3, uint8."""
    mean, std = _latent_statistics(vae, x_BTC.device)
    z_BZHW = unpack(x_BTC) * std + mean
    pixels_B3HW = vae.decode(z_BZHW[:, :, None]).sample[:, :, 0]
    return to_uint8(pixels_B3HW)


def to_uint8(images_B3HW: torch.Tensor) -> torch.Tensor:
    """Images in [-1, 1] as B x H x W x 3 bytes."""
    return ((images_B3HW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def pack(z_BZHW: torch.Tensor) -> torch.Tensor:
    """Each 2 x 2 patch of latents becomes one token with channels in the order (z, row, column)."""
    b, z, h, w = z_BZHW.shape
    patches = z_BZHW.view(b, z, h // PATCH, PATCH, w // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // PATCH) * (w // PATCH), z * PATCH * PATCH)


def unpack(x_BTC: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack` for a square image."""
    b, t, c = x_BTC.shape
    side = math.isqrt(t)
    patches = x_BTC.view(b, side, side, c // PATCH**2, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, c // PATCH**2, side * PATCH, side * PATCH)


def _latent_statistics(vae: AutoencoderKLQwenImage, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1)
    return mean, std
