import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusion_rollouts import MODEL, PROMPTS

from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import model_folder


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(MODEL)


def test_embeddings_are_the_pipelines_without_its_padding(encoder: PromptEncoder) -> None:
    pipeline = QwenImagePipeline.from_pretrained(model_folder(MODEL))
    with torch.no_grad():
        padded, mask = pipeline.encode_prompt(list(PROMPTS))
    assert mask is not None
    for row, got in enumerate(encoder.encode(PROMPTS)):
        assert got.dtype == np.float32
        assert len(got) == int(mask[row].sum())
        np.testing.assert_allclose(got, padded[row, : len(got)].numpy(), rtol=0, atol=1e-5)


def test_an_embedding_does_not_depend_on_the_other_prompts(encoder: PromptEncoder) -> None:
    together = encoder.encode(PROMPTS)
    for prompt, want in zip(PROMPTS, together, strict=True):
        assert np.array_equal(encoder.encode([prompt])[0], want)


def test_prompts_differ_in_their_embeddings(encoder: PromptEncoder) -> None:
    red, blue = encoder.encode(["a photo of a red square", "a photo of a blue square"])
    assert red.shape == blue.shape
    assert np.abs(red - blue).max() > 0.01
