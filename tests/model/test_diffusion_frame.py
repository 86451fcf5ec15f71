import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

from spot_runtime.diffusion.frame import FrameDecoder, unpack


def random_vae(temporal: list[bool]) -> AutoencoderKLQwenImage:
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=temporal,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.5, 1.0, 2.0],
    ).eval()


@pytest.mark.parametrize("temporal", [[False, False], [False, True], [True, True]])
def test_a_single_frame_decodes_as_the_video_decoder_does(temporal: list[bool]) -> None:
    """Also where the VAE upsamples in time, as Qwen-Image's does: a first frame skips that."""
    vae = random_vae(temporal)
    planes = torch.randn(2, 4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(v).view(1, 4, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        want = ((vae.decode(planes * std + mean).sample[:, :, 0] / 2 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 1)
    packed = QwenImagePipeline._pack_latents(planes.transpose(1, 2), 2, 4, 16, 16)
    got = FrameDecoder(vae).decode(packed, (8, 8))
    assert got.shape == (2, 64, 64, 3)
    assert got.dtype == np.uint8
    assert np.abs(got - want.numpy()).max() <= 0.501
    assert got.std() > 1


def test_an_image_is_the_same_whatever_it_is_decoded_with() -> None:
    decoder = FrameDecoder(random_vae([False, False]))
    latents = torch.randn(11, 64, 16, generator=torch.Generator().manual_seed(2))
    together = decoder.decode(latents, (8, 8))
    assert together.shape == (11, 64, 64, 3)
    for first, last in ((0, 1), (3, 5), (10, 11), (2, 9)):
        assert np.array_equal(decoder.decode(latents[first:last], (8, 8)), together[first:last])


def test_unpacking_inverts_the_pipelines_packing() -> None:
    planes = torch.randn(2, 1, 4, 12, 8)
    packed = QwenImagePipeline._pack_latents(planes, 2, 4, 12, 8)
    assert torch.equal(unpack(packed, (6, 4)), planes.transpose(1, 2))
