"""Noise, stochastic denoising steps, advantages, loss and KL: tensors in, tensors out. Never loads a model, never does I/O."""
