"""Resources of container tasks; the only place with any. Jobs need none: the runtime's own pods hold the GPUs."""

from __future__ import annotations

from flytekit import Resources

JOIN_REQUESTS = Resources(cpu="500m", mem="1Gi")
"""Joins and dynamics read manifests and write small tables."""
JOIN_LIMITS = Resources(cpu="2", mem="4Gi")
PROFILE_REQUESTS = Resources(cpu="2", mem="8Gi")
"""A calibration runs the model itself; for one that needs a GPU add `gpu="1"` to both."""
PROFILE_LIMITS = Resources(cpu="8", mem="32Gi")
