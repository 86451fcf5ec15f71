"""Where control answers: SPOTLIGHT_ENDPOINT if set, else the cluster that a local run embeds, else an error.

Never starts a process itself.
"""

from __future__ import annotations

from spot_runtime.client import Client
from spot_runtime.errors import UnreachableError
from spot_runtime.messages import ClusterStatus
from spot_runtime.variables import ENDPOINT, given_endpoint
from tasks.local_run import current_run
from tasks.models import State

PROBE_DEADLINE_S = 5.0


def endpoint(state: State) -> str:
    """Where jobs of this run go; the first call of a local run starts its cluster.

    Raises UnreachableError where there is neither a variable nor a local run, ClusterError or PortInUseError where the cluster fails.
    """
    if given := given_endpoint():
        return given
    run = current_run()
    if run is None:
        raise UnreachableError(f"{ENDPOINT} is not set: only a local run of the train workflow embeds a cluster")
    return run.cluster(state)


def probe(given: str) -> ClusterStatus:
    """What answers there. Raises UnreachableError where nobody answers at `given`, InputError where it is malformed."""
    client = Client(given, deadline_s=PROBE_DEADLINE_S)
    try:
        return client.status()
    except UnreachableError as error:
        raise UnreachableError(f"{ENDPOINT} = {given}: nobody answered within {PROBE_DEADLINE_S:g} s") from error
    finally:
        client.close()
