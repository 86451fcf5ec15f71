"""What this machine offers a cluster, check by check. Owns the checks; never starts a daemon and leaves nothing behind.

What is looked at is imported by its own check, so that a broken installation is a finding and not a crash.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from spot_runtime.daemons.ports import HOST, free_port, listening_socket
from spot_runtime.errors import ClusterError, InputError, SpotlightError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "spotlight-rl"
PYTHONS = ((3, 11), (3, 13))
"""First version that will do, and the first that will not."""

_STORE_DEADLINE_S = 10.0
_CONTROL_DEADLINE_S = 5.0
_GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    exit_code: int = 0
    """Of the error tree, where it is not ok."""


@dataclass(frozen=True)
class Where:
    """A control that runs elsewhere, and the key files that it may want."""

    endpoint: str = ""
    secret_key: str = ""
    control_key: str = ""


def examine(*, model: str, store: str, port: int, control: Where | None = None) -> Iterator[Check]:
    """Looks at everything, one check at a time.

    Args:
        model: `tiny`, a pipeline folder, a hub id or `store:NAME`.
        store: fsspec URL; one small object is written there and removed.
        port: where control would answer; 0: any free one.
        control: one that is to be reached; None or without an endpoint: none is looked for.
    """
    yield _check("python", _python)
    yield _check("packages", _packages)
    yield _check("device", _device)
    yield _check("cores", _cores)
    yield _check("model", lambda: _model(model, store))
    yield _check("store", lambda: _store(store))
    yield _check("port", lambda: _port(port))
    if control is not None and control.endpoint:
        yield _check("control", lambda: _control(control))


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except SpotlightError as error:
        return Check(name, False, str(error), error.exit_code)
    except ImportError as error:
        return Check(name, False, f"cannot be imported: {error}", ClusterError.exit_code)


def _python() -> str:
    first, bound = PYTHONS
    if not first <= sys.version_info[:2] < bound:
        wanted = f"{first[0]}.{first[1]} <= version < {bound[0]}.{bound[1]}"
        raise ClusterError(f"python = {platform.python_version()}: must be {wanted}")
    return f"{platform.python_version()} at {sys.executable}"


def _packages() -> str:
    """Every requirement of this distribution, without its extras."""
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError as error:
        raise ClusterError(f"package {DISTRIBUTION} is not installed") from error
    needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    problems = [problem for need in needs if (problem := _problem(need))]
    if problems:
        raise ClusterError("; ".join(problems))
    return f"{len(needs)} requirements of {DISTRIBUTION} {version(DISTRIBUTION)} are met"


def _problem(need: Requirement) -> str:
    """What keeps a requirement from being met; empty where nothing does."""
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return f"{need.name} is missing: must be {need.specifier or 'any version'}"
    return (
        "" if need.specifier.contains(found, prereleases=True) else f"{need.name} = {found}: must be {need.specifier}"
    )


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"cpu, torch {torch.__version__}"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, torch {torch.__version__}"


def _cores() -> str:
    from spot_runtime.daemons.supervisor import usable_cores

    cores = usable_cores() or tuple(range(os.cpu_count() or 1))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pinned = "reserved and spot processes get one each" if len(cores) >= 2 else "reserved and spot processes share it"
    return f"{len(cores)} usable, {memory_bytes / _GIB:.1f} GiB of memory; {pinned}"


def _model(model: str, store: str) -> str:
    from spot_runtime.models.address import find_model

    checked = find_model(model, store)
    return f"{model}: {checked.default_resolution} px, digest {checked.digest[:12]}"


def _store(url: str) -> str:
    from spot_runtime.store.address import check_shared, folders_to_make, remove_empty
    from spot_runtime.store.tensors import TensorStore

    store = TensorStore(check_shared(url), deadline_s=_STORE_DEADLINE_S)
    key, payload = f"doctor/{uuid.uuid4().hex}", b"spotlight"
    made = folders_to_make(url)
    began_s = time.monotonic()
    try:
        store.put_bytes(key, payload)
        found = store.get_bytes(key)
        store.delete(key)
    finally:
        remove_empty(made)
    if found != payload:
        raise InputError(f"store = {url}: an object came back altered")
    return f"{url}: written, read and removed in {(time.monotonic() - began_s) * 1000:.0f} ms"


def _port(port: int) -> str:
    chosen = port or free_port()
    listening_socket(HOST, chosen).close()
    return f"{HOST}:{chosen} can be bound"


def _control(where: Where) -> str:
    from spot_runtime.client import Client
    from spot_runtime.daemons.keys import client_keys

    keys = client_keys(where.secret_key, where.control_key, names=("--secret-key", "--control-key"))
    with Client(where.endpoint, deadline_s=_CONTROL_DEADLINE_S, keys=keys) as client:
        found = client.status()
    how = "with keys" if keys else "without keys"
    return f"{where.endpoint} answers {how}: {len(found.nodes)} nodes, trainer {found.trainer}"
