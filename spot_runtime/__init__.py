"""Spotlight's runtime: schedulers, workers, trainer and store. It never imports flytekit."""

__version__ = "0.1.0"
