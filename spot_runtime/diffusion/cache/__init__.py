"""Step caches: denoising steps of a sample without a forward of the transformer. For exploration only, never for what is trained on."""

from spot_runtime.diffusion.cache.step_cache import CachedSample, StepCache, StepCacheMaker
from spot_runtime.diffusion.cache.teacache import TeaCache, teacache
from spot_runtime.diffusion.cache.velocity import predict_cached_velocity

__all__ = ["CachedSample", "StepCache", "StepCacheMaker", "TeaCache", "predict_cached_velocity", "teacache"]
