"""Control's memory on disk: one row a job and two a request, in SQLite with a write-ahead log. Never decides anything.

What a request is, is written once; only the small row of its progress is written again, in place, so that what a turn writes does not
depend on how many requests wait.

Rows are written before any message that depends on them is sent, in one transaction a loop turn, so a kill at any instruction loses nothing
that somebody was told. What concerns a job (submitted, admitted, ended) is forced to the disk at once. Rows of requests alone survive the
death of the process at any instruction, and reach the disk with the next job or checkpoint: after a power cut some requests may be run
again, with the same samples.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import msgspec

from spot_runtime.errors import StoreError
from spot_runtime.messages import GenerationRequest
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestProgress, RequestRecord
from spot_runtime.types import JobId

FORMAT = 2
"""Of the rows; grows with every change that an earlier or later version could not read."""
LOG_BYTES_MAX = 64 * 1024 * 1024
"""A longer log is begun anew at the next checkpoint, which holds up writes while its last pages reach the file."""
LOG_PAGES_MAX = 65_536
"""The log is brought into the file by checkpoints, not by writes; a write does it itself only beyond this."""
CACHE_BYTES = 32 * 1024 * 1024

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (job_id TEXT PRIMARY KEY, sequence INTEGER, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, job_id TEXT NOT NULL, request BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS progress (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS requests_of_job ON requests (job_id);
"""
_LOAD = (
    "SELECT r.number, r.job_id, r.request, p.record FROM requests r JOIN progress p USING (number) ORDER BY r.number"
)
_FORGET = (
    "DELETE FROM progress WHERE number IN (SELECT number FROM requests WHERE job_id = ?)",
    "DELETE FROM requests WHERE job_id = ?",
    "DELETE FROM jobs WHERE job_id = ?",
)
_PROGRESS = RequestProgress.__struct_fields__
_progress_of = attrgetter(*_PROGRESS)


@dataclass(frozen=True)
class Rows:
    """What one transaction writes; `requests` are those that were never written before."""

    jobs: list[tuple[JobId, int, bytes]]
    requests: list[tuple[int, JobId, bytes]]
    progress: list[tuple[int, bytes]]
    gone: list[tuple[JobId]]


class Journal:
    """One file, one process. Raises StoreError when it cannot be opened or read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synchronous = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_job = msgspec.msgpack.Decoder(JobRecord).decode
        self._decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode
        self._decode_progress = msgspec.msgpack.Decoder(RequestProgress).decode
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._check_format()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES_MAX}")
            self._db.execute(f"PRAGMA cache_size=-{CACHE_BYTES // 1024}")
            self._db.executescript(_SCHEMA)
            self._newest: int = self._db.execute("SELECT coalesce(max(number), 0) FROM requests").fetchone()[0]
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(path)!r}: {error}") from error

    def _check_format(self) -> None:
        """Marks a new file; raises StoreError for one of another format, before anything is written to it."""
        found: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        is_new = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and found != FORMAT:
            raise StoreError(
                f"journal = {str(self.path)!r}: has format {found}, this version reads {FORMAT}:"
                " end its runs with the version that began them, or begin with a new file"
            )
        self._db.execute(f"PRAGMA user_version={FORMAT}")

    def load(self) -> list[tuple[JobRecord, list[RequestRecord]]]:
        """All jobs in submission order, each with its requests in the order of their numbers."""
        try:
            jobs = [self._decode_job(row[0]) for row in self._db.execute("SELECT record FROM jobs ORDER BY sequence")]
            requests: dict[JobId, list[RequestRecord]] = {job.job_id: [] for job in jobs}
            for number, job_id, request, progress in self._db.execute(_LOAD):
                requests[job_id].append(self._record(number, request, progress))
        except (sqlite3.Error, msgspec.MsgspecError, KeyError) as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error
        return [(job, requests[job.job_id]) for job in jobs]

    def _record(self, number: int, request: bytes, progress: bytes) -> RequestRecord:
        known = dict(zip(_PROGRESS, _progress_of(self._decode_progress(progress)), strict=True))
        record = RequestRecord(request=self._decode_request(request), number=number, **known)
        if record.changed_policy is not None:
            record.change_policy(record.changed_policy)
        return record

    def write(
        self, jobs: Iterable[JobRecord], requests: Iterable[RequestRecord], forgotten: Iterable[JobId] = ()
    ) -> None:
        """Puts all rows down in one transaction, or none. Raises StoreError.

        What is forgotten goes first: a job that was submitted again in the same turn stays.

        A request is new here if its number is above all that were written before: queues number upwards and what they number is written.
        """
        changed, encode = list(requests), self._encode
        rows = Rows(
            jobs=[(job.job_id, job.sequence, encode(job)) for job in jobs],
            requests=[(r.number, r.request.job_id, encode(r.request)) for r in changed if r.number > self._newest],
            progress=[(r.number, encode(_progress(r))) for r in changed],
            gone=[(job_id,) for job_id in forgotten],
        )
        if not (rows.jobs or rows.progress or rows.gone):
            return
        try:
            self._commit(rows)
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error
        self._newest = max((number for number, _, _ in rows.requests), default=self._newest)

    def checkpoint(self) -> None:
        """Brings the log into the file and both to the disk. From any thread, beside writes; raises StoreError."""
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=0.0)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error

    def begin_log_anew(self) -> None:
        """After a checkpoint, on the writing thread: brings the rest over and starts the log at its beginning, if it is long."""
        log = self.path.with_name(f"{self.path.name}-wal")
        try:
            if log.stat().st_size > LOG_BYTES_MAX:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error

    def _commit(self, rows: Rows) -> None:
        self._sync("FULL" if rows.jobs else "NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement in _FORGET if rows.gone else ():
                self._db.executemany(statement, rows.gone)
            if rows.jobs:
                self._db.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", rows.jobs)
            if rows.requests:
                self._db.executemany("INSERT INTO requests VALUES (?, ?, ?)", rows.requests)
            self._db.executemany("INSERT OR REPLACE INTO progress VALUES (?, ?)", rows.progress)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _sync(self, mode: str) -> None:
        if mode != self._synchronous:
            self._db.execute(f"PRAGMA synchronous={mode}")
            self._synchronous = mode

    def close(self) -> None:
        self._db.close()


def _progress(record: RequestRecord) -> RequestProgress:
    return RequestProgress(*_progress_of(record))
