"""Prompt rows, detectors, scoring rules, and the reward service with its client. Never imports torch, never touches policy or latents."""
