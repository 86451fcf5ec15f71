"""What tasks call: jobs of a control daemon. Owns deadlines and matching replies to requests; never decides anything about a job."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import uuid
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from spot_runtime.errors import AuthenticationError, ProtocolError, SpotlightError, UnreachableError, error_tree
from spot_runtime.messages import (
    CancelJob,
    ClusterStatus,
    Codec,
    FromClient,
    GetStatus,
    JobSpec,
    JobStatus,
    PollJob,
    Refused,
    SubmitJob,
    ToClient,
)
from spot_runtime.transport import ClientKeys, Dealer
from spot_runtime.types import BanditState, JobId, Op, PolicyRef, RunId

S = TypeVar("S", JobStatus, ClusterStatus)

NO_BANDIT = BanditState()
"""What the planner remembers before its first plan."""

_ASK_AGAIN_S = 2.0
_LOOK_S = 0.1
"""A refused connection is noticed within this."""
_DIGEST_CHARACTERS = 16
_NOT_WORK = ("iterations", "target_score", "store")
"""Fields of RunSettings that say when a run ends, and where it keeps its objects."""


class Client:
    """Talks to one control daemon; may be shared by threads, each request then has a connection of its own.

    Every request may be repeated without harm and is, while it is unanswered: control may restart in between.

    Args:
        endpoint: `tcp://HOST:PORT` or `ipc://@NAME` of control; nobody need answer there yet.
        deadline_s: how long one call waits for its answer.
        keys: CURVE, where control has keys.

    Raises (every call):
        AuthenticationError: control does not take this key, or wants one; without waiting for the deadline.
        UnreachableError: no answer within the deadline.
        SpotlightError: control refused; the class that it named.
    """

    def __init__(self, endpoint: str, *, deadline_s: float = 30.0, keys: ClientKeys | None = None) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._idle: list[Dealer[ToClient]] = []
        self._closed = False
        self._put_back(self._connection())

    def submit(self, job: JobSpec) -> JobStatus:
        """Hands a job to control, or attaches to it where control has it already."""
        return self._ask(SubmitJob(seq=next(self._numbers), job=job), JobStatus)

    def poll(self, job_id: str) -> JobStatus:
        """Where a job stands; renews its run's lease."""
        return self._ask(PollJob(seq=next(self._numbers), job_id=JobId(job_id)), JobStatus)

    def cancel(self, job_id: str, reason: str = "") -> JobStatus:
        """Ends a job; one that has ended stays as it is."""
        return self._ask(CancelJob(seq=next(self._numbers), job_id=JobId(job_id), reason=reason), JobStatus)

    def status(self) -> ClusterStatus:
        """Nodes, jobs and trainer."""
        return self._ask(GetStatus(seq=next(self._numbers)), ClusterStatus)

    def close(self) -> None:
        """Closes idle connections at once, and others when their call ends. May be called again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: FromClient, answer: type[S]) -> S:
        """A connection whose call failed is thrown away, and a late reply with it."""
        connection = self._take()
        try:
            reply = _reply(connection, request, self._deadline_s)
        except BaseException:
            connection.close()
            raise
        self._put_back(connection)
        if isinstance(reply, Refused):
            raise error_tree().get(reply.error_class, SpotlightError)(reply.error)
        if not isinstance(reply, answer):
            raise ProtocolError(f"control answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def _connection(self) -> Dealer[ToClient]:
        return Dealer(self.endpoint, Codec[ToClient](ToClient), f"client-{uuid.uuid4().hex}", keys=self._keys)

    def _take(self) -> Dealer[ToClient]:
        with self._lock:
            assert not self._closed, "the client is closed"
            if self._idle:
                return self._idle.pop()
        return self._connection()

    def _put_back(self, connection: Dealer[ToClient]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def _reply(connection: Dealer[ToClient], request: FromClient, deadline_s: float) -> ToClient:
    """The reply that carries the request's number; a refusal without one is of a frame that control could not read."""
    end_s = time.monotonic() + deadline_s
    while (left_s := end_s - time.monotonic()) > 0:
        connection.send(request)
        ask_again_s = time.monotonic() + min(left_s, _ASK_AGAIN_S)
        while (wait_s := ask_again_s - time.monotonic()) > 0:
            for reply in connection.receive(min(wait_s, _LOOK_S)):
                if reply.seq == request.seq or (isinstance(reply, Refused) and reply.seq == 0):
                    return reply
            if refusal := connection.refusal():
                raise AuthenticationError(f"control at {connection.endpoint} refuses the connection: {refusal}")
    raise UnreachableError(f"control at {connection.endpoint} did not answer within {deadline_s:g} s")


def job_spec(
    *,
    run_id: str,
    op: Op,
    iteration: int,
    policy: PolicyRef,
    settings_json: str,
    bank_key: str = "",
    manifest_key: str = "",
    bandit: BanditState = NO_BANDIT,
) -> JobSpec:
    """A job whose id is a digest of all that it is made of, `explore-12-0f3a…`: the same work always has the same id.

    When the run ends and where its store lies are no part of the work: one that is given more iterations, or a store that was moved,
    finds what it has done.
    """
    job = JobSpec(
        job_id=JobId(""),
        run_id=RunId(run_id),
        op=op,
        iteration=iteration,
        policy=policy,
        settings_json=settings_json,
        bank_key=bank_key,
        manifest_key=manifest_key,
        bandit=bandit,
    )
    work = msgspec.structs.replace(job, settings_json=_of_work(settings_json))
    digest = hashlib.sha256(msgspec.json.encode(work)).hexdigest()[:_DIGEST_CHARACTERS]
    return msgspec.structs.replace(job, job_id=JobId(f"{op.value}-{iteration}-{digest}"))


def _of_work(settings_json: str) -> str:
    """Settings without what is no part of the work."""
    settings: dict[str, object] = msgspec.json.decode(settings_json)
    kept = {name: value for name, value in settings.items() if name not in _NOT_WORK}
    return settings_json if len(kept) == len(settings) else msgspec.json.encode(kept).decode()
