"""Rewards: prompts, detectors, rules, the service and its client."""
