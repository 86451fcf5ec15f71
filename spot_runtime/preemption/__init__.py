"""Preemption notices: one event for every cloud."""
