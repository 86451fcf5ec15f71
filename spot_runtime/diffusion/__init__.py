"""The diffusion model: geometry, denoising engine, adapter, trainer. Importing this package alone imports no torch."""
