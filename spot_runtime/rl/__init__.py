"""Tensors in, tensors out: noise, SDE step, advantages, loss. Never a model, a file or a socket."""
