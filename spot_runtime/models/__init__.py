"""Tiny Qwen-Image pipelines made from nothing: the shipped base and the bench model. Never part of a training run."""
