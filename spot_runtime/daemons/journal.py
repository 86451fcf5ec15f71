"""Control's memory on disk: one row a job and one a request, in SQLite with a write-ahead log. Never decides anything.

Rows are written before any message that depends on them is sent, in one transaction a loop turn, so a kill at any instruction loses nothing
that somebody was told. What concerns a job (submitted, admitted, ended) is forced to the disk at once. Rows of requests alone survive the
death of the process at any instruction, and reach the disk with the next job or checkpoint: after a power cut some requests may be run
again, with the same samples.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from spot_runtime.errors import StoreError
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import JobId, RequestId

CHECKPOINT_PAGES_MAX = 65_536
"""The log is brought into the file between turns, by `checkpoint`; a write does it itself only beyond this."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (job_id TEXT PRIMARY KEY, sequence INTEGER, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (request_id TEXT PRIMARY KEY, job_id TEXT NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS requests_of_job ON requests (job_id);
"""


class Journal:
    """One file, one process. Raises StoreError when it cannot be opened or read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synchronous = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_job = msgspec.msgpack.Decoder(JobRecord).decode
        self._decode_request = msgspec.msgpack.Decoder(RequestRecord).decode
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES_MAX}")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(path)!r}: {error}") from error

    def load(self) -> list[tuple[JobRecord, list[RequestRecord]]]:
        """All jobs in submission order, each with its requests in the order they were first written."""
        try:
            jobs = [self._decode_job(row[0]) for row in self._db.execute("SELECT record FROM jobs ORDER BY sequence")]
            requests: dict[JobId, list[RequestRecord]] = {job.job_id: [] for job in jobs}
            for job_id, blob in self._db.execute("SELECT job_id, record FROM requests ORDER BY rowid"):
                requests[job_id].append(self._decode_request(blob))
        except (sqlite3.Error, msgspec.MsgspecError, KeyError) as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error
        return [(job, requests[job.job_id]) for job in jobs]

    def write(
        self, jobs: Iterable[JobRecord], requests: Iterable[RequestRecord], forgotten: Iterable[JobId] = ()
    ) -> None:
        """Puts all rows down in one transaction, or none. Raises StoreError."""
        job_rows = [(job.job_id, job.sequence, self._encode(job)) for job in jobs]
        request_rows = [(r.request_id, r.request.job_id, self._encode(r)) for r in requests]
        gone = [(job_id,) for job_id in forgotten]
        if not (job_rows or request_rows or gone):
            return
        try:
            self._commit(job_rows, request_rows, gone)
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error

    def checkpoint(self) -> None:
        """Brings the log into the file and both to the disk. From any thread, beside writes; raises StoreError."""
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=0.0)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise StoreError(f"journal = {str(self.path)!r}: {error}") from error

    def _commit(
        self,
        job_rows: list[tuple[JobId, int, bytes]],
        request_rows: list[tuple[RequestId, JobId, bytes]],
        gone: list[tuple[JobId]],
    ) -> None:
        self._sync("FULL" if job_rows else "NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(
                "INSERT INTO jobs VALUES (?, ?, ?) ON CONFLICT (job_id) DO UPDATE SET record = excluded.record",
                job_rows,
            )
            self._db.executemany(
                "INSERT INTO requests (request_id, job_id, record) VALUES (?, ?, ?) "
                "ON CONFLICT (request_id) DO UPDATE SET record = excluded.record",
                request_rows,
            )
            if gone:
                self._db.executemany("DELETE FROM requests WHERE job_id = ?", gone)
                self._db.executemany("DELETE FROM jobs WHERE job_id = ?", gone)
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
