"""The journal: inodes, dentries, chunk states, checkpoints and the operation log, in SQLite.

Owned by the one daemon of a state directory and used from its event loop only. Every method that
changes something is one transaction, or part of the caller's `transaction()`. A committed
transaction survives the death of the daemon; `sync()` makes all of them survive a power cut
(write-ahead log, `synchronous=NORMAL`: https://sqlite.org/wal.html#performance_considerations).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpkfs.core.documents import Reference
from hpkfs.core.ids import Digest, SnapshotId
from hpkfs.errors import IntegrityError, JournalError, QuotaError
from hpkfs.inodes import ROOT_INO, Inode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpkfs.durable import Disk

log = logging.getLogger(__name__)

VERSION = 1
APPLICATION_ID = 0x68706B66  # "hpkf"
META_BASE = "base"
LOG_ROWS_MAX = 100_000
LOG_AGE_NS_MAX = 30 * 86_400 * 10**9
NAMES_MAX = 16_384
WAL_BYTES_BEFORE_CHECKPOINT = 4 << 20

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE inodes(
  ino INTEGER PRIMARY KEY, mode INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
  rdev INTEGER NOT NULL, nlink INTEGER NOT NULL, size INTEGER NOT NULL,
  atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
  target BLOB, record TEXT, states BLOB, dirty INTEGER NOT NULL,
  parent INTEGER, name BLOB, base_mtime_ns INTEGER, base_mode INTEGER);
CREATE INDEX orphans ON inodes(ino) WHERE nlink = 0;
CREATE TABLE dentries(
  parent INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER NOT NULL,
  PRIMARY KEY(parent, name)) WITHOUT ROWID;
CREATE TABLE xattrs(
  ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY(ino, name)) WITHOUT ROWID;
CREATE TABLE dropped(ino INTEGER PRIMARY KEY);
CREATE TABLE checkpoints(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, snapshot_id TEXT NOT NULL, sha256 TEXT NOT NULL,
  parent_id TEXT, parent_sha256 TEXT, created_at TEXT NOT NULL, device_id TEXT,
  state TEXT NOT NULL, files INTEGER NOT NULL, bytes INTEGER NOT NULL, document BLOB);
CREATE UNIQUE INDEX checkpoint_ids ON checkpoints(snapshot_id, sha256);
CREATE TABLE log(
  id INTEGER PRIMARY KEY AUTOINCREMENT, time_ns INTEGER NOT NULL, op TEXT NOT NULL,
  path TEXT NOT NULL, detail TEXT NOT NULL, checkpoint TEXT);
CREATE INDEX log_unsealed ON log(id) WHERE checkpoint IS NULL;
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One row of the chain as this machine knows it.

    `state` is `pending` (sealed here, not on the store) or `published`.
    """

    seq: int
    snapshot_id: str
    sha256: str
    parent_id: str | None
    parent_sha256: str | None
    created_at: str
    device_id: str | None
    state: str
    files: int
    bytes: int

    @property
    def reference(self) -> Reference:
        """Id and digest; both were checked when the row was written."""
        return Reference(SnapshotId(self.snapshot_id), Digest(self.sha256))

    @property
    def parent(self) -> Reference | None:
        """Id and digest of the checkpoint before; None for the first."""
        if self.parent_id is None or self.parent_sha256 is None:
            return None
        return Reference(SnapshotId(self.parent_id), Digest(self.parent_sha256))


_CHECKPOINT_COLUMNS = (
    "seq, snapshot_id, sha256, parent_id, parent_sha256, created_at, device_id, state, files, bytes"
)
_INODE_MARKS = ",".join("?" * 18)
_JOINED = "i." + Inode.COLUMNS.replace(", ", ", i.")


class Journal:
    """The open journal of one state directory."""

    def __init__(self, path: str, *, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._wal_fd: int | None = None
        self._unsynced = False
        self._failed = False
        self._depth = 0
        self._sync_lock = threading.Lock()
        self._names: dict[tuple[int, bytes], int] = {}
        # Called after a failed transaction, when memory may be ahead of the journal.
        self.on_rollback: Callable[[], None] = lambda: None
        self._db = _open(path)
        row = self._run(
            "SELECT max(coalesce((SELECT max(ino) FROM inodes), 1),"
            " coalesce((SELECT max(ino) FROM dropped), 1))"
        ).fetchone()
        self._next_ino = int(row[0]) + 1

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run one statement; what SQLite says becomes an error for people."""
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise _translate(error, self._path) from error

    # -- transactions ---------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all of them, or none. May be nested; the outermost one commits.

        Raises:
            QuotaError: the disk of the state directory is full; nothing was changed.
            JournalError: the journal cannot be written.
        """
        if self._depth:
            yield
            return
        if self._failed:
            raise _disk_failed(self._path)
        try:
            self._run("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                with contextlib.suppress(JournalError, QuotaError):
                    if self._db.in_transaction:
                        self._run("ROLLBACK")
                self._depth = 0
                self._names.clear()
                self.on_rollback()
                raise
            self._depth = 0
            self._unsynced = True
        except sqlite3.Error as error:
            raise _translate(error, self._path) from error

    def sync(self) -> None:
        """Make every committed transaction survive a power cut. Blocking; any thread.

        Once the disk failed here no transaction is accepted until the next mount: the kernel
        drops the pages that it could not write, so a second fsync would succeed falsely.
        """
        with self._sync_lock:
            if self._failed:
                raise _disk_failed(self._path)
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                if self._wal_fd is None:
                    self._wal_fd = os.open(self._path + "-wal", os.O_RDONLY)
                self._disk.fsync_file(self._wal_fd, point="journal.wal.fsync")
            except BaseException as error:
                self._unsynced = True
                if isinstance(error, IntegrityError):
                    self._failed = True
                    log.error("the disk failed under the journal; nothing more is accepted")
                raise

    def shrink(self) -> None:
        """Move the write-ahead log into the database. Blocking; run it in a thread.

        A connection of its own, so that the loop's transactions go on meanwhile.
        """
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as db:
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.Error as error:
                raise _translate(error, self._path) from error

    def is_large(self) -> bool:
        """Whether the write-ahead log has grown so that `shrink` is due."""
        try:
            return os.stat(self._path + "-wal").st_size > WAL_BYTES_BEFORE_CHECKPOINT
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Checkpoint and close; everything is durable when this returns."""
        if self._wal_fd is not None:
            os.close(self._wal_fd)
            self._wal_fd = None
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.close()

    # -- meta -----------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | None:
        """A remembered value, or None."""
        row = self._run("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str | None) -> None:
        """Remember a value; None forgets it."""
        with self.transaction():
            if value is None:
                self._run("DELETE FROM meta WHERE key=?", (key,))
            else:
                self._run("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, value))

    def meta_keys(self, prefix: str) -> list[str]:
        """Remembered keys that start with `prefix`."""
        rows = self._run("SELECT key FROM meta WHERE substr(key, 1, ?)=?", (len(prefix), prefix))
        return [str(row[0]) for row in rows]

    # -- inodes and dentries --------------------------------------------------------------

    def new_ino(self) -> int:
        """A number that no inode has had since the journal was opened."""
        self._next_ino += 1
        return self._next_ino - 1

    def load(self, ino: int) -> Inode | None:
        """Read one inode."""
        row = self._run(f"SELECT {Inode.COLUMNS} FROM inodes WHERE ino=?", (ino,)).fetchone()
        return None if row is None else Inode(row)

    def remembered(self, parent: int, name: bytes) -> int | None:
        """The inode number of a name that was looked up before; no query."""
        return self._names.get((parent, name))

    def _remember(self, parent: int, name: bytes, ino: int) -> None:
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        self._names[parent, name] = ino

    def lookup(self, parent: int, name: bytes) -> int | None:
        """The inode number of a name in a folder."""
        known = self.remembered(parent, name)
        if known is not None:
            return known
        row = self._run(
            "SELECT ino FROM dentries WHERE parent=? AND name=?", (parent, name)
        ).fetchone()
        if row is None:
            return None
        self._remember(parent, name, row[0])
        return int(row[0])

    def lookup_inode(self, parent: int, name: bytes) -> Inode | None:
        """A name's inode in one query, for names the table does not hold."""
        row = self._run(
            f"SELECT {_JOINED} FROM dentries d JOIN inodes i ON i.ino=d.ino"
            " WHERE d.parent=? AND d.name=?",
            (parent, name),
        ).fetchone()
        if row is None:
            return None
        self._remember(parent, name, row[0])
        return Inode(row)

    def children(self, parent: int) -> list[tuple[bytes, int]]:
        """Names and inode numbers in a folder, by name."""
        return self._run("SELECT name, ino FROM dentries WHERE parent=?", (parent,)).fetchall()

    def has_children(self, parent: int) -> bool:
        """Whether a folder holds any name."""
        found = self._run("SELECT 1 FROM dentries WHERE parent=? LIMIT 1", (parent,)).fetchone()
        return found is not None

    def insert(self, inode: Inode) -> None:
        """Add an inode."""
        with self.transaction():
            self._run(f"INSERT INTO inodes({Inode.COLUMNS}) VALUES({_INODE_MARKS})", inode.row())

    def set_dentry(self, parent: int, name: bytes, ino: int) -> None:
        """Name an inode in a folder; a name that exists is replaced."""
        self._names.pop((parent, name), None)
        with self.transaction():
            self._run("INSERT OR REPLACE INTO dentries VALUES(?,?,?)", (parent, name, ino))

    def delete_dentry(self, parent: int, name: bytes) -> None:
        """Remove a name."""
        self._names.pop((parent, name), None)
        with self.transaction():
            self._run("DELETE FROM dentries WHERE parent=? AND name=?", (parent, name))

    def update(self, ino: int, **columns: Any) -> None:
        """Set columns of one inode; the names are those of `Inode.COLUMNS`."""
        assignments = ",".join(f"{name}=?" for name in columns)
        with self.transaction():
            self._run(f"UPDATE inodes SET {assignments} WHERE ino=?", (*columns.values(), ino))

    def set_states(self, changed: Iterable[tuple[bytes, int]]) -> None:
        """Write chunk states of many inodes: (states, ino)."""
        with self.transaction():
            self._db.executemany("UPDATE inodes SET states=? WHERE ino=?", changed)

    def bulk_insert(self, inodes: list[Inode], dentries: list[tuple[int, bytes, int]]) -> None:
        """Add many inodes and their names."""
        self._names.clear()
        with self.transaction():
            self._db.executemany(
                f"INSERT OR REPLACE INTO inodes({Inode.COLUMNS}) VALUES({_INODE_MARKS})",
                [inode.row() for inode in inodes],
            )
            self._db.executemany("INSERT OR REPLACE INTO dentries VALUES(?,?,?)", dentries)

    def drop_inode(self, ino: int) -> None:
        """Remove an inode that nothing names or holds open; its bytes go to `dropped`."""
        with self.transaction():
            self._run("DELETE FROM inodes WHERE ino=?", (ino,))
            self._run("DELETE FROM xattrs WHERE ino=?", (ino,))
            self._run("INSERT OR IGNORE INTO dropped VALUES(?)", (ino,))

    def dropped(self) -> list[int]:
        """Inodes whose backing files may go once the journal is durable."""
        return [int(row[0]) for row in self._run("SELECT ino FROM dropped")]

    def forget_dropped(self, inos: Iterable[int]) -> None:
        """The backing files are gone."""
        with self.transaction():
            self._db.executemany("DELETE FROM dropped WHERE ino=?", [(ino,) for ino in inos])

    def orphans(self) -> list[int]:
        """Inodes without a name, left by a process that held them open."""
        return [int(r[0]) for r in self._run("SELECT ino FROM inodes WHERE nlink=0")]

    def find_name(self, ino: int) -> tuple[int, bytes] | None:
        """Any name of an inode. Reads all dentries: only for links that lost their hint."""
        row = self._run("SELECT parent, name FROM dentries WHERE ino=? LIMIT 1", (ino,)).fetchone()
        return None if row is None else (int(row[0]), bytes(row[1]))

    def with_states(self) -> list[tuple[int, bytes]]:
        """Inodes with a record, and their chunk states."""
        return self._run("SELECT ino, states FROM inodes WHERE states IS NOT NULL").fetchall()

    def folder(self, parent: int) -> list[tuple[bytes, Inode]]:
        """Names and inodes of a folder in one query, for walks."""
        rows = self._run(
            f"SELECT d.name, {_JOINED} FROM dentries d JOIN inodes i ON i.ino=d.ino"
            " WHERE d.parent=? ORDER BY d.name",
            (parent,),
        )
        return [(row[0], Inode(row[1:])) for row in rows]

    # -- xattrs ---------------------------------------------------------------------------

    def get_xattr(self, ino: int, name: bytes) -> bytes | None:
        """One extended attribute."""
        row = self._run("SELECT value FROM xattrs WHERE ino=? AND name=?", (ino, name)).fetchone()
        return None if row is None else bytes(row[0])

    def list_xattrs(self, ino: int) -> dict[bytes, bytes]:
        """All extended attributes of an inode."""
        return dict(self._run("SELECT name, value FROM xattrs WHERE ino=?", (ino,)))

    def all_xattrs(self) -> dict[int, dict[bytes, bytes]]:
        """Extended attributes of every inode that has any."""
        found: dict[int, dict[bytes, bytes]] = {}
        for ino, name, value in self._run("SELECT ino, name, value FROM xattrs"):
            found.setdefault(ino, {})[name] = value
        return found

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Set one extended attribute."""
        with self.transaction():
            self._run("INSERT OR REPLACE INTO xattrs VALUES(?,?,?)", (ino, name, value))

    def remove_xattr(self, ino: int, name: bytes) -> None:
        """Remove one extended attribute."""
        with self.transaction():
            self._run("DELETE FROM xattrs WHERE ino=? AND name=?", (ino, name))

    # -- checkpoints ----------------------------------------------------------------------

    def set_base(self, snapshot_id: str) -> None:
        """The tree is this checkpoint; documents that are neither it nor pending go."""
        with self.transaction():
            self.set_meta(META_BASE, snapshot_id)
            self._run(
                "UPDATE checkpoints SET document=NULL WHERE state='published' AND snapshot_id<>?",
                (snapshot_id,),
            )

    def add_checkpoint(self, checkpoint: Checkpoint, document: bytes | None) -> None:
        """Add to what is known; `checkpoint.seq` is ignored. Known already: its state is set."""
        with self.transaction():
            self._run(
                "INSERT INTO checkpoints(snapshot_id, sha256, parent_id, parent_sha256, created_at,"
                " device_id, state, files, bytes, document) VALUES(?,?,?,?,?,?,?,?,?,?)"
                " ON CONFLICT(snapshot_id, sha256) DO UPDATE SET state=excluded.state,"
                " document=coalesce(excluded.document, document)",
                (
                    checkpoint.snapshot_id,
                    checkpoint.sha256,
                    checkpoint.parent_id,
                    checkpoint.parent_sha256,
                    checkpoint.created_at,
                    checkpoint.device_id,
                    checkpoint.state,
                    checkpoint.files,
                    checkpoint.bytes,
                    document,
                ),
            )

    def set_checkpoint_state(self, snapshot_id: str, state: str) -> None:
        """Move a checkpoint on."""
        with self.transaction():
            self._run("UPDATE checkpoints SET state=? WHERE snapshot_id=?", (state, snapshot_id))

    def checkpoints(self, *, state: str | None = None) -> list[Checkpoint]:
        """The known chain, oldest first."""
        query = f"SELECT {_CHECKPOINT_COLUMNS} FROM checkpoints"
        if state is None:
            rows = self._run(query + " ORDER BY seq").fetchall()
        else:
            rows = self._run(query + " WHERE state=? ORDER BY seq", (state,)).fetchall()
        return [Checkpoint(*row) for row in rows]

    def base_reference(self) -> Reference | None:
        """The checkpoint that the tree was last sealed as or installed from; None before that."""
        base = self.get_meta(META_BASE)
        return next((r.reference for r in self.checkpoints() if r.snapshot_id == base), None)

    def document(self, snapshot_id: str) -> bytes | None:
        """The canonical bytes of a checkpoint: kept for the base and for what is pending."""
        row = self._run(
            "SELECT document FROM checkpoints WHERE snapshot_id=? AND document IS NOT NULL",
            (snapshot_id,),
        ).fetchone()
        return None if row is None else bytes(row[0])

    # -- operation log --------------------------------------------------------------------

    def log(self, time_ns: int, op: str, path: str, detail: str = "") -> None:
        """Note one operation on what travels."""
        with self.transaction():
            self._run(
                "INSERT INTO log(time_ns, op, path, detail) VALUES(?,?,?,?)",
                (time_ns, op, path, detail),
            )

    def seal_log(self, checkpoint: str, upto: int) -> None:
        """The operations up to row `upto` are in this checkpoint."""
        with self.transaction():
            self._run(
                "UPDATE log SET checkpoint=? WHERE checkpoint IS NULL AND id<=?",
                (checkpoint, upto),
            )

    def has_unsealed(self) -> bool:
        """Whether anything that travels was touched since the last seal."""
        row = self._run("SELECT 1 FROM log WHERE checkpoint IS NULL LIMIT 1").fetchone()
        return row is not None

    def last_log_id(self) -> int:
        """The newest row's number; 0 when there is none."""
        return int(self._run("SELECT coalesce(max(id), 0) FROM log").fetchone()[0])

    def read_log(self, *, since: int, limit: int) -> list[dict[str, object]]:
        """Rows after `since`, oldest first; with `since` 0 the newest `limit` rows."""
        order = "ASC" if since else "DESC"
        rows = self._run(
            "SELECT id, time_ns, op, path, detail, checkpoint FROM log WHERE id>?"
            f" ORDER BY id {order} LIMIT ?",
            (since, limit),
        ).fetchall()
        names = ("id", "time_ns", "op", "path", "detail", "checkpoint")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return found if since else found[::-1]

    def trim_log(self, now_ns: int) -> None:
        """Keep the log within its bounds."""
        with self.transaction():
            self._run(
                "DELETE FROM log WHERE checkpoint IS NOT NULL AND"
                " (id <= (SELECT coalesce(max(id),0) FROM log) - ? OR time_ns < ?)",
                (LOG_ROWS_MAX, now_ns - LOG_AGE_NS_MAX),
            )

    # -- small documents ------------------------------------------------------------------

    def get_json(self, key: str, default: Any) -> Any:
        """A remembered JSON value."""
        text = self.get_meta(key)
        return default if text is None else json.loads(text)

    def set_json(self, key: str, value: object) -> None:
        """Remember a JSON value."""
        self.set_meta(key, json.dumps(value, ensure_ascii=True))

    def check(self) -> list[str]:
        """Problems found by SQLite and by our own rules; empty when all is well."""
        problems = [
            f"journal: {row[0]}" for row in self._run("PRAGMA integrity_check") if row[0] != "ok"
        ]
        for parent, name in self._run(
            "SELECT parent, name FROM dentries WHERE ino NOT IN (SELECT ino FROM inodes)"
        ):
            problems.append(f"the name {os.fsdecode(name)!r} in folder {parent} has no inode")
        for (ino,) in self._run(
            "SELECT ino FROM inodes WHERE nlink>0 AND ino<>?"
            " AND ino NOT IN (SELECT ino FROM dentries)",
            (ROOT_INO,),
        ):
            problems.append(f"inode {ino} has no name")
        return problems


def _open(path: str) -> sqlite3.Connection:
    """Open or make the journal; refuse one that is damaged or newer."""
    try:
        # The loop owns the connection; the daemon may open it before the loop's thread is chosen.
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        application = int(db.execute("PRAGMA application_id").fetchone()[0])
        empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        new = version == 0 and empty
        if not new:
            _check_known(path, application=application, version=version)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cache_size=-8000")
        db.execute("PRAGMA foreign_keys=OFF")
        if new:
            db.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA.split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute(f"PRAGMA user_version={VERSION}")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise _translate(error, path) from error
    return db


def _check_known(path: str, *, application: int, version: int) -> None:
    """Refuse what this program did not write, before anything of it is changed."""
    if application != APPLICATION_ID:
        raise JournalError(
            f"{path} is not a journal of hpkfs.",
            kept="It was not touched.",
            next_step="Name another state directory with --state-dir.",
        )
    if version > VERSION:
        raise JournalError(
            f"The journal {path} has version {version}; this program knows {VERSION}.",
            kept="It was not touched; your work in it is safe.",
            next_step="Use the newer hpkfs that wrote it.",
        )


def _disk_failed(path: str) -> JournalError:
    return JournalError(
        f"The disk failed while {path} was made durable.",
        kept="What the mount shows is still there to be read; copy what matters.",
        next_step="Check the disk, then unmount and mount again.",
    )


def _translate(error: sqlite3.Error, path: str) -> QuotaError | JournalError:
    """Say what a failure of SQLite means for the person."""
    text = str(error)
    if "full" in text or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return QuotaError(
            f"The disk that holds {path} is full.",
            kept="Everything written before is safe; this one operation was not done.",
            next_step="Free space on that disk, or run `hpkfs evict`.",
        )
    return JournalError(
        f"The journal {path} cannot be used: {text}.",
        kept="The store and the files under `backing/` beside it were not touched.",
        next_step=(
            "Keep a copy of the state directory; `hpkfs fsck` says more. To go on with what is on"
            " the store, mount with another --state-dir; the newest bytes are in `backing/` and"
            " `pending/` of the copy."
        ),
    )
