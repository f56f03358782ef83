"""A private copy of a SQLite database becomes one sealed file, and back into questions.

`sealer.py` calls `seal_database` in a worker thread with an *image*: the database with its
`-wal` and `-journal` (never `-shm`) as of one instant. SQLite recovers it, the conversation
database is normalised as the storage format demands, and what is left is one file that may
leave this machine. The image is ours to throw away: a crash here loses nothing.

Invariants:
    - Equal pages in give equal pages out; a row that needs no change is not touched, and a
      sealed file sealed again comes out byte for byte the same.
    - No column that is normalised, and no free page, keeps anything of this machine.
    - A file that fails a check is never returned.

Blocking, no trio; each function opens its own connections.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import sqlite3
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from hpkfs.errors import IntegrityError, QuotaError, RuntimeMismatchError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DATABASE_SCHEMA = 22
MARKER = "pubky-workspace:/"
SIDECARS = ("-wal", "-shm", "-journal")

REQUIRED_TABLES = ("sessions", "messages", "session_model_usage")
DIGEST_TABLES = ("sessions", "messages", "session_model_usage", "system_prompts")
LIVE_TABLES = (
    "gateway_routing",
    "compression_locks",
    "async_delegations",
    "state_meta",
    "telegram_dm_topic_bindings",
    "telegram_dm_topic_mode",
)
KNOWN_TABLES = frozenset({*REQUIRED_TABLES, *LIVE_TABLES, "schema_version"})
KNOWN_PREFIXES = ("messages_fts", "sqlite_")
# What a message gateway still has to deliver from this machine: left out without a word.
SILENTLY_DROPPED = frozenset({"delivery_obligations"})

NULL_COLUMNS = (
    "session_key",
    "chat_id",
    "chat_type",
    "thread_id",
    "display_name",
    "origin_json",
    "profile_name",
    "handoff_state",
    "handoff_platform",
    "handoff_error",
    "compression_failure_error",
    "model_config",
    "billing_base_url",
)
ZERO_COLUMNS = (
    "expiry_finalized",
    "compression_fallback_streak",
    "compression_failure_cooldown_until",
)
PATH_COLUMNS = ("cwd", "git_repo_root")

USAGE = "session_model_usage"
USAGE_ADDRESS = "billing_base_url"
USAGE_SUMS = (
    "api_call_count",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "estimated_cost_usd",
    "actual_cost_usd",
)

DIGEST_BATCH_BYTES = 1 << 20
BUSY_TIMEOUT_S = 5.0
BACKUP_COPY_TRIES = 5
# https://www.sqlite.org/fileformat.html, "The Rollback Journal"
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
SUPER_TAIL_BYTES = 16
HEADER_BYTES = 100
WAL_VERSIONS = b"\x02\x02"  # the header's write and read version
TRUNK_HEADER_BYTES = 8

KEPT = "The last saved conversation stays as it is, and the live database is not touched."
LOOK = "Look at the file with `sqlite3 FILE 'PRAGMA integrity_check'`, or restore it from history."


class SuperJournalError(IntegrityError):
    """The image fell into a transaction over several databases; take it again."""


class EmptyDatabaseError(RuntimeMismatchError):
    """The conversation database has no table: Hermes is about to make them, or never did."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One file that may leave this machine.

    Attributes:
        path: the sealed file, without sidecars.
        logical_digest: what was said, as a digest; empty for other databases.
        notes: what was left out, a phrase for people each.
        schema: the schema number; None for other databases.
    """

    path: str
    logical_digest: str
    notes: tuple[str, ...]
    schema: int | None


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """What a look at a database tells; `schema` is None where it has no such number."""

    schema: int | None
    tables: tuple[str, ...]


def seal_database(
    image_dir: str, name: str, *, workspace: str | Sequence[str], hermes: bool
) -> Sealed:
    """Turn the image `name` in `image_dir` into one checked file, in place.

    Args:
        image_dir: a private folder with the database, its `-wal` and its `-journal`.
        name: the database's file name in it.
        workspace: absolute spellings of the workspace, or one; paths below it become markers.
        hermes: the conversation database: normalise it too. Any other database is recovered
            and checked; its bytes stay as they are if nothing had to be recovered.

    Raises:
        EmptyDatabaseError: there is no table in it.
        RuntimeMismatchError: a schema other than 22.
        SuperJournalError: the image has to be taken again.
        IntegrityError: the database is damaged.
        QuotaError: the disk is full.
        TransientError: the disk failed.
    """
    path = os.path.join(image_dir, name)
    _unlink(path + "-shm")
    _refuse_super_journal(path, name)
    with _translated(name):
        if not hermes:
            _recover(path)
            return Sealed(path, "", _check_other(path, name), None)
        spellings = (workspace,) if isinstance(workspace, str) else tuple(workspace)
        notes = _normalise_image(path, name, spellings)
        _zero_free_pages(path, name)
        # Checked once, after the last write: what was damaged before still is, because
        # normalising repairs nothing that a table to be kept needs.
        with closing(_open_sealed(path)) as db:
            _check_integrity(db, name)
            _check_foreign_keys(db, name)
            digest = _digest_rows(db)
    return Sealed(path, digest, notes, DATABASE_SCHEMA)


def logical_digest(path: str) -> str:
    """Return the SHA-256 over the rows that make up the conversation, as lowercase hex.

    Two files with the same digest hold the same conversation, however their pages lie. The
    file must have no sidecars; it is only read.
    """
    with _translated(os.path.basename(path)), closing(_open_sealed(path)) as db:
        return _digest_rows(db)


def inspect(path: str) -> DatabaseInfo:
    """Look at a file without sidecars, for example a sealed one; it is only read.

    Raises:
        IntegrityError: it is no SQLite database.
    """
    with _translated(os.path.basename(path)), closing(_open_sealed(path)) as db:
        return DatabaseInfo(_schema_number(db), tuple(_table_names(db)))


def backup_database(source: str, target_dir: str) -> str:
    """Copy a database that others may be writing into `target_dir`; return the copy's path.

    The copy is consistent and holds what was in the source's sidecars. Where SQLite may not
    open the source (a read-only folder, a transaction that a killed writer left), or would make
    files beside it, the files are copied with their sidecars, so that `seal_database` recovers
    the copy.

    Raises:
        TransientError: the source kept changing, or the disk failed.
    """
    name = os.path.basename(source)
    target = os.path.join(target_dir, name)
    with _translated(name):
        if _is_at_rest(source):
            _copy_files(source, target)
            os.chmod(target, 0o600)
            return target
        try:
            with (
                closing(_connect(source, "mode=ro")) as live,
                closing(_connect(target, "mode=rwc")) as copy,
            ):
                live.backup(copy)
        except sqlite3.OperationalError as error:
            if _code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            _copy_files(source, target)
    os.chmod(target, 0o600)
    return target


def mark_workspace(path: str, workspaces: Sequence[str]) -> None:
    """Make the conversations of a copied database belong to the agent's workspace.

    Args:
        path: a private copy, which stays in its journal mode; without Hermes' tables it is left
            alone.
        workspaces: absolute folders; paths below them become markers, all others stay.

    Raises:
        IntegrityError: the database is damaged.
    """
    if not workspaces:
        return
    with _translated(os.path.basename(path)), closing(_open_image(path)) as db:
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        if "sessions" in _table_names(db):
            db.execute("BEGIN IMMEDIATE")
            _mark_paths(db, tuple(workspaces), clear=False)
            db.execute("COMMIT")
        _expect_whole_checkpoint(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
    _remove_sidecars(path)


# -- opening -------------------------------------------------------------------------------


def _connect(path: str, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path))}?{options}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)


def _open_image(path: str) -> sqlite3.Connection:
    """Open an image for recovery and change; nothing is synced, for it is thrown away."""
    return _prepared(
        _connect(path, "mode=rw"),
        "locking_mode=EXCLUSIVE",  # keeps the index of the WAL in memory: no -shm
        "synchronous=OFF",
        "secure_delete=ON",
        "foreign_keys=OFF",
        "trusted_schema=OFF",
    )


def _open_sealed(path: str) -> sqlite3.Connection:
    """Open a file that nobody writes, without locks and without making sidecars."""
    # Not mapped: a fifth faster, and the whole file would count as the daemon's memory.
    return _prepared(_connect(path, "mode=ro&immutable=1"), "trusted_schema=OFF")


def _prepared(db: sqlite3.Connection, *pragmas: str) -> sqlite3.Connection:
    """Apply pragmas; a file that is no database fails here, and its connection is closed."""
    try:
        for pragma in pragmas:
            db.execute(f"PRAGMA {pragma}")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn SQLite's failures into ours."""
    try:
        yield
    except sqlite3.Error as error:
        match _code(error):
            case sqlite3.SQLITE_FULL:
                raise QuotaError(
                    f"There is no space left on this disk to save the database {name}.",
                    kept=KEPT,
                    next_step="Free some space; it is tried again by itself.",
                ) from error
            case (
                sqlite3.SQLITE_IOERR
                | sqlite3.SQLITE_CANTOPEN
                | sqlite3.SQLITE_BUSY
                | sqlite3.SQLITE_NOMEM
                | sqlite3.SQLITE_READONLY
            ):
                raise TransientError(
                    f"The copy of the database {name} could not be worked on: {error}.",
                    kept=KEPT,
                    next_step="It is tried again by itself.",
                ) from error
            case _:
                raise _damaged(name, str(error)) from error


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None where Python's module made the error up."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _damaged(name: str, detail: str) -> IntegrityError:
    return IntegrityError(f"The database {name} is damaged: {detail}.", kept=KEPT, next_step=LOOK)


# -- recovery ------------------------------------------------------------------------------


def _refuse_super_journal(path: str, name: str) -> None:
    """Raise when the image's journal belongs to a transaction over several databases.

    Its name is a path inside the mount that recovery would look at, and each image alone may
    be torn from the other. See "readSuperJournal" in SQLite's pager.
    """
    try:
        with open(path + "-journal", "rb") as journal:
            head = journal.read(len(JOURNAL_MAGIC))
            size = journal.seek(0, os.SEEK_END)
            if not head or head[0] == 0 or size < SUPER_TAIL_BYTES:
                return
            journal.seek(size - SUPER_TAIL_BYTES)
            tail = journal.read(SUPER_TAIL_BYTES)
            length = int.from_bytes(tail[:4])
            if not tail.endswith(JOURNAL_MAGIC) or not 0 < length <= size - SUPER_TAIL_BYTES:
                return
            journal.seek(size - SUPER_TAIL_BYTES - length)
            # The sum is taken over signed or unsigned chars, as the writer's machine has it.
            super_name = journal.read(length)
    except FileNotFoundError:
        return
    unsigned = sum(super_name)
    signed = unsigned - 256 * sum(byte > 127 for byte in super_name)
    if int.from_bytes(tail[4:8]) in {unsigned & 0xFFFFFFFF, signed & 0xFFFFFFFF}:
        raise SuperJournalError(
            f"The database {name} was in a transaction together with another database.",
            kept=KEPT,
            next_step="It is tried again by itself.",
        )


def _recover(path: str) -> None:
    """Let SQLite roll back or roll forward; the header's journal mode stays as it is.

    So the bytes are those that the live file will have after its own next checkpoint, and
    without anything to recover they do not change.
    """
    with closing(_open_image(path)) as db:
        db.execute("PRAGMA schema_version").fetchone()
        _expect_whole_checkpoint(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
    _remove_sidecars(path)


def _expect_whole_checkpoint(row: tuple[int, int, int]) -> None:
    busy, frames, done = row
    if busy or frames != done:
        raise TransientError(
            "The copy of a database could not be brought up to date.",
            kept=KEPT,
            next_step="It is tried again by itself.",
        )


def _remove_sidecars(path: str) -> None:
    for suffix in SIDECARS:
        _unlink(path + suffix)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


# -- checks --------------------------------------------------------------------------------


def _check_integrity(db: sqlite3.Connection, name: str) -> None:
    (answer,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if answer != "ok":
        raise _damaged(name, " ".join(str(answer).split()))


def _check_foreign_keys(db: sqlite3.Connection, name: str) -> None:
    row = db.execute("PRAGMA foreign_key_check").fetchone()
    if row is not None:
        raise _damaged(name, f"a row of {row[0]} points to a row of {row[2]} that is missing")


def _check_other(path: str, name: str) -> tuple[str, ...]:
    """Check a database that another program defined; return notes.

    It may use functions, collations or modules that only that program has. Then what can be
    checked without them is checked.
    """
    with closing(_open_sealed(path)) as db:
        for check in ("integrity_check", "quick_check"):
            try:
                (answer,) = db.execute(f"PRAGMA {check}(1)").fetchone()
            except sqlite3.OperationalError as error:
                if "no such" not in str(error) and "unknown function" not in str(error):
                    raise
                continue
            if answer != "ok":
                raise _damaged(name, " ".join(str(answer).split()))
            return ()
    return ("could not be checked: it needs extensions of the program that made it",)


def _schema_number(db: sqlite3.Connection) -> int | None:
    if "schema_version" not in _table_names(db):
        return None
    (number,) = db.execute("SELECT max(version) FROM schema_version").fetchone()
    return number if isinstance(number, int) else None


def _check_schema(db: sqlite3.Connection, name: str) -> None:
    number = _schema_number(db)
    if number != DATABASE_SCHEMA:
        if not _table_names(db):
            raise EmptyDatabaseError(
                f"The conversation database {name} is empty.", kept=KEPT, next_step=LOOK
            )
        has = "no schema number" if number is None else f"schema {number}"
        raise RuntimeMismatchError(
            f"The conversation database {name} has {has}; this version of hpkfs can save "
            f"schema {DATABASE_SCHEMA}.",
            kept=KEPT,
            next_step="Use the version of Hermes that the agent was saved with, "
            "or an hpkfs that knows this schema.",
        )
    missing = [table for table in REQUIRED_TABLES if table not in _table_names(db)]
    if missing:
        raise RuntimeMismatchError(
            f"The conversation database {name} lacks the table {missing[0]}, which schema "
            f"{DATABASE_SCHEMA} has.",
            kept=KEPT,
            next_step=LOOK,
        )


def _table_names(db: sqlite3.Connection) -> list[str]:
    return [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({_quoted(table)})")]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# -- normalising ---------------------------------------------------------------------------


def _normalise_image(path: str, name: str, workspaces: tuple[str, ...]) -> tuple[str, ...]:
    """Recover the image, make it one file in journal mode DELETE, and normalise it."""
    with closing(_open_image(path)) as db:
        (mode,) = db.execute("PRAGMA journal_mode=DELETE").fetchone()
        if mode != "delete":
            raise TransientError(
                f"The copy of the database {name} could not be brought up to date.",
                kept=KEPT,
                next_step="It is tried again by itself.",
            )
        _check_schema(db, name)
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # one bad path is no failure
        db.execute("PRAGMA journal_mode=MEMORY")
        db.execute("BEGIN IMMEDIATE")
        notes = _drop_foreign(db)
        for table in LIVE_TABLES:
            _empty(db, table)
        _clear_sessions(db)
        _mark_paths(db, workspaces, clear=True)
        _clear_usage_addresses(db)
        db.execute("COMMIT")
    _remove_sidecars(path)
    return notes


def _is_known(table: str) -> bool:
    return table in KNOWN_TABLES or table.startswith(KNOWN_PREFIXES)


def _drop_foreign(db: sqlite3.Connection) -> tuple[str, ...]:
    """Drop the tables that the format does not know, and what would fail without them."""
    rows = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
    foreign = {name: sql or "" for name, sql in rows if not _is_known(name)}
    virtual = [n for n, sql in foreign.items() if re.match(r"\s*CREATE\s+VIRTUAL\b", sql, re.I)]
    for table in virtual:
        _drop_virtual(db, table)
    left = set(_table_names(db))  # a virtual table takes its own tables with it
    plain = [table for table in foreign if table in left]
    for table in plain:
        db.execute(f"DROP TABLE {_quoted(table)}")
    named = [n for n in sorted({*virtual, *plain}) if n not in SILENTLY_DROPPED]
    notes = [f'table "{name}" is not part of a conversation and was left out' for name in named]
    return (*notes, *_drop_users(db, foreign))


def _drop_virtual(db: sqlite3.Connection, table: str) -> None:
    try:
        db.execute(f"DROP TABLE {_quoted(table)}")
    except sqlite3.OperationalError as error:
        if "no such module" not in str(error):
            raise
        # Only its maker can drop it properly; it has no page of its own, so its line will do.
        db.execute("PRAGMA writable_schema=ON")
        db.execute("DELETE FROM sqlite_schema WHERE name = ? AND rootpage = 0", (table,))
        db.execute("PRAGMA writable_schema=RESET")


def _drop_users(db: sqlite3.Connection, dropped: Iterable[str]) -> list[str]:
    """Drop triggers and views that name a dropped table: they would make every insert fail."""
    gone = list(dropped)
    notes = []
    while gone:
        words = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, gone)) + r")(?!\w)", re.I)
        gone = []
        for kind, name, sql in db.execute(
            "SELECT type, name, sql FROM sqlite_schema WHERE type IN ('trigger', 'view')"
        ).fetchall():
            if words.search(sql):
                db.execute(f"DROP {kind} IF EXISTS {_quoted(name)}")
                notes.append(f'{kind} "{name}" uses such a table and was left out')
                gone.append(name)
    return notes


def _empty(db: sqlite3.Connection, table: str) -> None:
    if table not in _table_names(db):
        return
    # Deleting from an empty table would still write its first page.
    if db.execute(f"SELECT EXISTS (SELECT 1 FROM {_quoted(table)})").fetchone() == (1,):
        db.execute(f"DELETE FROM {_quoted(table)}")


def _clear_sessions(db: sqlite3.Connection) -> None:
    present = set(_columns(db, "sessions"))
    wanted = [(_quoted(c), "NULL") for c in NULL_COLUMNS if c in present]
    wanted += [(_quoted(c), "0") for c in ZERO_COLUMNS if c in present]
    if wanted:
        changes = ", ".join(f"{column} = {value}" for column, value in wanted)
        differs = " OR ".join(f"{column} IS NOT {value}" for column, value in wanted)
        db.execute(f"UPDATE sessions SET {changes} WHERE {differs}")


def marker_for(value: object, workspaces: Iterable[str]) -> str | None:
    """Return what a sealed database holds instead of a path: a marker, or None.

    Args:
        value: a cell; only text can be a path.
        workspaces: absolute spellings of the workspace.
    """
    if not isinstance(value, str):
        return None
    if value.startswith(MARKER):
        return value
    if not value.startswith("/"):
        return None
    path = posixpath.normpath("/" + value.lstrip("/"))
    for workspace in sorted(workspaces, key=len, reverse=True):
        root = posixpath.normpath(workspace)
        if not root.startswith("/") or root == "/":
            continue
        if path == root:
            return MARKER
        if path.startswith(root + "/"):
            return MARKER + path[len(root) + 1 :]
    return None


def _mark_paths(db: sqlite3.Connection, workspaces: tuple[str, ...], *, clear: bool) -> None:
    """Turn paths of the workspace into markers; with `clear`, empty all others."""
    present = set(_columns(db, "sessions"))
    for column in [c for c in PATH_COLUMNS if c in present]:
        rows = db.execute(
            f"SELECT rowid, {column} FROM sessions WHERE {column} IS NOT NULL"
        ).fetchall()
        for rowid, value in rows:
            marker = marker_for(value, workspaces)
            if marker != value and (clear or marker is not None):
                db.execute(f"UPDATE sessions SET {column} = ? WHERE rowid = ?", (marker, rowid))


def _clear_usage_addresses(db: sqlite3.Connection) -> None:
    """Empty the address of the model's server, which is part of the table's key.

    Rows that differ in nothing else of the key become one: counts and costs are added up, the
    rest is the newest row's.
    """
    info = db.execute(f"PRAGMA table_info({USAGE})").fetchall()
    columns = [row[1] for row in info]
    if USAGE_ADDRESS not in columns:
        return
    if not db.execute(f"SELECT 1 FROM {USAGE} WHERE {USAGE_ADDRESS} <> '' LIMIT 1").fetchone():
        return
    key = [row[1] for row in info if row[5] and row[1] != USAGE_ADDRESS]
    groups: dict[tuple[object, ...], list[tuple[int, dict[str, object]]]] = {}
    for rowid, *cells in db.execute(f"SELECT rowid, * FROM {USAGE} ORDER BY rowid").fetchall():
        row = dict(zip(columns, cells, strict=True))
        # Without a key there is nothing to collide: each row stands alone.
        group = tuple(row[column] for column in key) if key else (rowid,)
        groups.setdefault(group, []).append((rowid, row))
    for rows in groups.values():
        if any(row[USAGE_ADDRESS] for _, row in rows):
            _merge_usage(db, rows)


def _merge_usage(db: sqlite3.Connection, rows: list[tuple[int, dict[str, object]]]) -> None:
    kept = rows[0][0]
    merged = _merged([row for _, row in rows])
    for rowid, _ in rows[1:]:
        db.execute(f"DELETE FROM {USAGE} WHERE rowid = ?", (rowid,))
    changes = ", ".join(f"{_quoted(column)} = ?" for column in merged)
    db.execute(f"UPDATE {USAGE} SET {changes} WHERE rowid = ?", (*merged.values(), kept))


def _merged(rows: list[dict[str, object]]) -> dict[str, object]:
    """One row for several; a single row only loses its address."""
    if len(rows) == 1:
        return {USAGE_ADDRESS: ""}
    newest = max(rows, key=lambda row: _number(row.get("last_seen")))
    merged = {**newest, USAGE_ADDRESS: ""}
    for column in merged:
        numbers = [n for row in rows if isinstance(n := row[column], int | float)]
        if not numbers:
            continue
        if column in USAGE_SUMS:
            merged[column] = sum(numbers)
        elif column == "first_seen":
            merged[column] = min(numbers)
        elif column == "last_seen":
            merged[column] = max(numbers)
    return merged


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("-inf")


# -- free pages ----------------------------------------------------------------------------


def _zero_free_pages(path: str, name: str) -> None:
    """Overwrite what deleted rows left in pages that belong to no table any more.

    Hermes' own SQLite may lack secure deletion. Pages that are zero already are not written.
    Format: https://www.sqlite.org/fileformat.html, "The Freelist".
    """
    with open(path, "r+b", buffering=0) as file:
        header = file.read(HEADER_BYTES)
        page_bytes = int.from_bytes(header[16:18])
        page_bytes = 65536 if page_bytes == 1 else page_bytes
        pages = os.fstat(file.fileno()).st_size // page_bytes
        left = int.from_bytes(header[36:40])
        trunk = int.from_bytes(header[32:36])
        while trunk:
            if trunk > pages or left <= 0:
                raise _damaged(name, "its list of free pages is broken")
            data = _read_page(file.fileno(), trunk, page_bytes)
            count = int.from_bytes(data[4:8])
            end = TRUNK_HEADER_BYTES + 4 * count
            leaves = memoryview(data)[TRUNK_HEADER_BYTES:end]
            left -= 1 + count
            if end > page_bytes or left < 0:
                raise _damaged(name, "its list of free pages is broken")
            _zero_range(file.fileno(), trunk, page_bytes, end)
            for start in range(0, len(leaves), 4):
                leaf = int.from_bytes(leaves[start : start + 4])
                if not 1 < leaf <= pages:
                    raise _damaged(name, "its list of free pages is broken")
                _zero_range(file.fileno(), leaf, page_bytes, 0)
            trunk = int.from_bytes(data[:4])


def _read_page(fd: int, page: int, page_bytes: int) -> bytes:
    return os.pread(fd, page_bytes, (page - 1) * page_bytes)


def _zero_range(fd: int, page: int, page_bytes: int, start: int) -> None:
    """Make a page zero from `start` to its end, unless it is."""
    if _read_page(fd, page, page_bytes).count(0, start) != page_bytes - start:
        os.pwrite(fd, bytes(page_bytes - start), (page - 1) * page_bytes + start)


# -- the logical digest --------------------------------------------------------------------


def _digest_rows(db: sqlite3.Connection) -> str:
    try:
        return _digest_with(db)
    except sqlite3.OperationalError as error:
        if "decode" not in str(error).lower():
            raise
        # Text that is no UTF-8 gets in by hand only; the strict decoder is much faster.
        db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        return _digest_with(db)


def _digest_with(db: sqlite3.Connection) -> str:
    digest = hashlib.sha256()
    tables = set(_table_names(db))
    for table in DIGEST_TABLES:
        if table in tables:
            names = _columns(db, table)
            columns = ", ".join(map(_quoted, names))
            order = '"id"' if "id" in names else columns
            digest.update(f"table:{table}:{columns}\n".encode())
            _digest_lines(
                digest, db.execute(f"SELECT {columns} FROM {_quoted(table)} ORDER BY {order}")
            )
    return digest.hexdigest()


def _digest_lines(digest: hashlib._Hash, rows: Iterable[tuple[object, ...]]) -> None:
    lines: list[str] = []
    size = 0
    for row in rows:
        line = repr(row)
        lines.append(line)
        size += len(line)
        if size >= DIGEST_BATCH_BYTES:
            digest.update(("\n".join(lines) + "\n").encode())
            lines, size = [], 0
    if lines:
        digest.update(("\n".join(lines) + "\n").encode())


# -- copying from a live home --------------------------------------------------------------


def _is_at_rest(source: str) -> bool:
    """Whether a database in WAL mode is open nowhere: who opens it makes a `-shm`."""
    with open(source, "rb") as file:
        header = file.read(HEADER_BYTES)
    has_log = header[18:20] == WAL_VERSIONS or os.path.lexists(source + "-wal")
    return has_log and not os.path.lexists(source + "-shm")


def _copy_files(source: str, target: str) -> None:
    """Copy a database with its sidecars, again until nothing changed meanwhile."""
    for _ in range(BACKUP_COPY_TRIES):
        before = _state(source)
        _remove_sidecars(target)
        for suffix in ("", "-wal", "-journal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(source + suffix, target + suffix)
        if _state(source) == before:
            return
    raise TransientError(
        f"The database {os.path.basename(source)} kept changing while it was copied.",
        kept="It is not touched.",
        next_step="Stop the program that writes it and try again.",
    )


def _state(source: str) -> list[tuple[int, int, int] | None]:
    states: list[tuple[int, int, int] | None] = []
    for suffix in ("", "-wal", "-journal"):
        try:
            stat = os.stat(source + suffix)
        except FileNotFoundError:
            states.append(None)
        else:
            states.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return states
