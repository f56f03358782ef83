"""Conversation databases of Hermes 0.19.0 (schema 22) of any size, for tests and benchmarks.

The schema is not written here: it is read from the genuine database in
`tests/data/hermes-0.19/store`, with its full-text tables and triggers.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

STORE = Path(__file__).resolve().parents[1] / "data" / "hermes-0.19" / "store"
DATABASE = "conversations/state.sqlite3"
MARKER = "pubky-workspace:/"
MODEL_ADDRESS = "http://127.0.0.1:18601/v1"
START_S = 1_790_000_000.0
SYSTEM_PROMPT_CHARS = 6_500
PARAGRAPHS = 600
WORDS = 4_000
# Bytes of file per character of text, as measured; only the first guess for `target_bytes`.
BYTES_PER_CHAR = 5.0


@cache
def genuine_database() -> bytes:
    """The database of the newest checkpoint that the real programs stored."""
    head = json.loads((STORE / "head.json").read_bytes())
    snapshot = json.loads((STORE / "snapshots" / f"{head['snapshotId']}.json").read_bytes())
    pieces = snapshot["files"][DATABASE]["pieces"]
    return b"".join((STORE / piece["object"]).read_bytes() for piece in pieces)


@cache
def _genuine() -> tuple[tuple[str, ...], dict[str, object], dict[str, object]]:
    """Statements that make the schema, one session and one usage row as Hermes wrote them."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(genuine_database())
        rows = db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
        virtual = [name for _, name, sql in rows if sql.startswith("CREATE VIRTUAL")]
        made_by_others = tuple(f"{name}_" for name in virtual)
        statements = [
            sql
            for kind, name, sql in rows
            if not name.startswith("sqlite_")
            and not (kind == "table" and name.startswith(made_by_others) and name not in virtual)
        ]
        db.row_factory = sqlite3.Row
        session = dict(db.execute("SELECT * FROM sessions ORDER BY id").fetchone())
        usage = dict(db.execute("SELECT * FROM session_model_usage LIMIT 1").fetchone())
    return tuple(statements), session, usage


def open_database(path: Path | str) -> sqlite3.Connection:
    """Open a database as Hermes does: WAL, foreign keys on, transactions by hand."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA foreign_keys=ON")
    return db


def create_database(path: Path | str) -> sqlite3.Connection:
    """Make an empty database of schema 22 and return it open."""
    db = open_database(path)
    db.execute("BEGIN")
    for statement in _genuine()[0]:
        db.execute(statement)
    db.execute("INSERT INTO schema_version VALUES (22)")
    db.execute("COMMIT")
    return db


def insert(db: sqlite3.Connection, table: str, row: dict[str, object]) -> None:
    columns = ", ".join(row)
    marks = ", ".join("?" * len(row))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(row.values()))


def add_session(
    db: sqlite3.Connection, session_id: str, *, address: str = MODEL_ADDRESS, **columns: object
) -> None:
    """Add a session with its usage row; `columns` replace what the genuine row has."""
    _, session, usage = _genuine()
    started = START_S + int(db.execute("SELECT count(*) FROM sessions").fetchone()[0]) * 60
    row = {**session, "id": session_id, "title": None, "started_at": started, **columns}
    insert(db, "sessions", row)
    seen = {"first_seen": started, "last_seen": started}
    insert(
        db,
        "session_model_usage",
        {**usage, "session_id": session_id, "billing_base_url": address, **seen},
    )


def add_message(
    db: sqlite3.Connection,
    session_id: str,
    content: str,
    *,
    role: str = "user",
    at: float = START_S,
) -> None:
    insert(
        db,
        "messages",
        {"session_id": session_id, "role": role, "content": content, "timestamp": at},
    )


class _Text:
    """Seeded prose: the same seed gives the same text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        weights = range(len(letters), 0, -1)
        words = [
            "".join(self.random.choices(letters, weights, k=self.random.randint(2, 11)))
            for _ in range(WORDS)
        ]
        common = [1 / (rank + 1) for rank in range(WORDS)]
        self._paragraphs = [
            " ".join(self.random.choices(words, common, k=self.random.randint(20, 90))) + ".\n"
            for _ in range(PARAGRAPHS)
        ]

    def of_length(self, chars: int) -> str:
        parts: list[str] = []
        size = 0
        while size < chars:
            parts.append(self.random.choice(self._paragraphs))
            size += len(parts[-1])
        return "".join(parts)[:chars]


def make_hermes_database(
    path: Path | str,
    *,
    sessions: int,
    messages_per_session: int,
    seed: int = 0,
    target_bytes: int | None = None,
    workspace: str | None = None,
) -> None:
    """Make a database with seeded conversations; it is closed and has no sidecars.

    Args:
        path: the file to make.
        sessions: how many conversations.
        messages_per_session: how many messages each has.
        seed: equal arguments give equal bytes.
        target_bytes: the size that the file shall have, within a few percent.
        workspace: this machine's workspace: sessions get it as `cwd`, with what else a live
            database holds of its machine. Without it they are as a checkpoint holds them.
    """
    text = _Text(seed)
    with closing(create_database(path)) as db:
        chars = 400.0
        for number in range(sessions):
            if target_bytes is not None:
                left = max(0, target_bytes - _size(db)) / (sessions - number)
                chars = left / _bytes_per_char(db) / messages_per_session
            db.execute("BEGIN IMMEDIATE")
            session_id = f"{20270101 + number // 40}_{number:06d}_{text.random.randbytes(3).hex()}"
            columns = _session_columns(text, number, workspace)
            address = MODEL_ADDRESS if workspace else ""
            add_session(db, session_id, address=address, **columns)
            _converse(db, session_id, text, count=messages_per_session, chars=int(chars))
            db.execute("COMMIT")
        if workspace is not None:
            insert(db, "state_meta", {"key": "orphaned_compression_finalize_v1", "value": "1"})


def _converse(
    db: sqlite3.Connection, session_id: str, text: _Text, *, count: int, chars: int
) -> None:
    for index in range(count):
        length = int(chars * text.random.uniform(0.5, 1.5))
        role = ("user", "assistant", "tool", "assistant")[index % 4]
        add_message(db, session_id, text.of_length(length), role=role, at=START_S + index)


def _session_columns(text: _Text, number: int, workspace: str | None) -> dict[str, object]:
    columns: dict[str, object] = {
        "system_prompt": text.of_length(SYSTEM_PROMPT_CHARS),
        "title": f"Conversation {number}",
    }
    if workspace is None:
        return {**columns, "cwd": MARKER}
    return {
        **columns,
        "cwd": workspace,
        "git_repo_root": f"{workspace}/project",
        "model_config": '{"provider": "custom"}',
        "billing_base_url": MODEL_ADDRESS,
    }


def _size(db: sqlite3.Connection) -> int:
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    return int(pages) * int(page_bytes)


def _bytes_per_char(db: sqlite3.Connection) -> float:
    """File size per character of message text so far, without what is there from the start."""
    (last,) = db.execute("SELECT max(id) FROM messages").fetchone()
    if not last:
        return BYTES_PER_CHAR
    (sample,) = db.execute(
        "SELECT avg(length(content)) FROM (SELECT content FROM messages ORDER BY id DESC LIMIT 50)"
    ).fetchone()
    # The newest messages stand for all: the length hardly changes from session to session.
    return max(1.0, _size(db) / (int(last) * float(sample)))
