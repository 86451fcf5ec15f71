"""Control's memory on disk: one row a job and one a request, in SQLite with a write-ahead log. Never decides anything.

Rows are written before any message that depends on them is sent, in one transaction a loop turn, so a kill at any instruction loses nothing
that somebody was told. SQLite in WAL mode with synchronous=NORMAL survives the death of the process; with FULL also that of the machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from spot_runtime.errors import StoreError
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import JobId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (job_id TEXT PRIMARY KEY, sequence INTEGER, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (request_id TEXT PRIMARY KEY, job_id TEXT NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS requests_of_job ON requests (job_id);
"""


class Journal:
    """One file, one process. Raises StoreError when it cannot be opened or read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_job = msgspec.msgpack.Decoder(JobRecord).decode
        self._decode_request = msgspec.msgpack.Decoder(RequestRecord).decode
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
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
        """Puts all rows down in one transaction, or none."""
        job_rows = [(job.job_id, job.sequence, self._encode(job)) for job in jobs]
        request_rows = [(r.request_id, r.request.job_id, self._encode(r)) for r in requests]
        gone = [(job_id,) for job_id in forgotten]
        if not (job_rows or request_rows or gone):
            return
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
            self._db.executemany("DELETE FROM requests WHERE job_id = ?", gone)
            self._db.executemany("DELETE FROM jobs WHERE job_id = ?", gone)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()
