"""Resources of container tasks; the only place with any. Jobs need none: the runtime's own pods hold the GPUs."""

from __future__ import annotations

from flytekit import Resources

JOIN_REQUESTS = Resources(cpu="500m", mem="1Gi")
"""Joins and dynamics read manifests and write small tables."""
JOIN_LIMITS = Resources(cpu="2", mem="4Gi")
