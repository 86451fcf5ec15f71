"""Prompt rows, detectors, scoring rules, and the reward service with its client. Never touches policy or latents.

torch only inside the optional engines.
"""
