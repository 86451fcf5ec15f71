"""Step caches: denoising steps of a sample without a forward of the transformer. For exploration only, never for what is trained on."""

from spot_runtime.diffusion.cache.step_cache import CachedSample, StepCache
from spot_runtime.diffusion.cache.teacache import TeaCache
from spot_runtime.diffusion.cache.velocity import predict_cached_velocity

__all__ = ["CachedSample", "StepCache", "TeaCache", "predict_cached_velocity"]
