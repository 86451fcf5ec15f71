"""Images of container tasks; the only place with any. `pyflyte run --remote --image NAME` (or the config file) fills it in."""

from __future__ import annotations

RUNTIME_IMAGE = "{{.image.default.fqn}}:{{.image.default.version}}"
"""What the project's Dockerfile builds: the same environment as `make env`."""
