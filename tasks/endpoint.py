"""Where control answers: SPOTLIGHT_ENDPOINT if set, else the cluster that a local run embeds, else an error.

Never starts a process itself.
"""

from __future__ import annotations

from spot_runtime.client import Client
from spot_runtime.daemons.keys import given_client_keys
from spot_runtime.errors import UnreachableError
from spot_runtime.messages import ClusterStatus
from spot_runtime.variables import ENDPOINT, given_endpoint
from tasks.local_run import current_run
from tasks.models import State

PROBE_DEADLINE_S = 5.0
CALL_DEADLINE_S = 30.0


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


def connect(where: str, *, deadline_s: float = CALL_DEADLINE_S) -> Client:
    """A client of the control at `where`, with the environment's keys where the environment names the endpoint too: an embedded cluster
    has none. Raises InputError for an endpoint or keys that cannot be used.
    """
    return Client(where, deadline_s=deadline_s, keys=given_client_keys() if given_endpoint() else None)


def probe(given: str) -> ClusterStatus:
    """What answers there. Raises UnreachableError where nobody does, AuthenticationError where the key is refused, InputError where either
    cannot be used.
    """
    try:
        with connect(given, deadline_s=PROBE_DEADLINE_S) as client:
            return client.status()
    except UnreachableError as error:
        raise UnreachableError(f"{ENDPOINT} = {given}: nobody answered within {PROBE_DEADLINE_S:g} s") from error
