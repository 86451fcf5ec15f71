"""What control's core handles beside wire messages: past facts that the shell reports. Commands are in commands.py."""

from __future__ import annotations

import msgspec

from spot_runtime.messages import JobSpec
from spot_runtime.scheduler.expansion import JobInputs
from spot_runtime.types import JobId


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the core's own events."""


class JobSubmitted(Event, frozen=True, kw_only=True):
    job: JobSpec


class JobPolled(Event, frozen=True, kw_only=True):
    job_id: JobId


class JobCancelled(Event, frozen=True, kw_only=True):
    job_id: JobId
    reason: str = ""


class JobInputsRead(Event, frozen=True, kw_only=True):
    job_id: JobId
    inputs: JobInputs


class JobStepFailed(Event, frozen=True, kw_only=True):
    """Reading a job's inputs or writing its manifest failed for good."""

    job_id: JobId
    error_class: str
    error: str


class ManifestWritten(Event, frozen=True, kw_only=True):
    job_id: JobId
    key: str


class ControlAwoke(Event, frozen=True, kw_only=True):
    """Control's process stood still until now: who was not heard meanwhile may have spoken all along. Comes before the next TimePassed."""


class TimePassed(Event, frozen=True, kw_only=True):
    """Deadlines are looked at; sent several times a second."""
