"""Stores as large as agents get, for measurements: made once, then taken from a cache.

The same arguments give the same bytes. What is cached lies below `$XDG_CACHE_HOME/hpkfs` (else
`~/.cache/hpkfs`) and is never changed: whoever writes to a store takes a copy with `copy_store`.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from support.databases import make_hermes_database

from hpkfs.core.chunks import build_record
from hpkfs.core.documents import HERMES_RUNTIME, Head, Snapshot, encode_head, encode_snapshot
from hpkfs.core.ids import SnapshotId, make_id, sha256_hex
from hpkfs.core.paths import AGENTS, DATABASE, MEMORY, PORTABLE, SOUL, USER
from hpkfs.core.portable import DEFAULT, encode_portable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Bumped when what is made changes: an older cache is then left alone.
VERSION = 1
BIG_FILES = 1_800
BIG_DATABASE_BYTES = 211_500_000
BIG_SESSIONS = 444
SMALL_FILES = 10
SMALL_DATABASE_BYTES = 1 << 20
SMALL_SESSIONS = 3
MESSAGES_PER_SESSION = 24
FILES_PER_FOLDER = 12
LINES = ("The tests pass.", "Ada likes short notes.", "def answer():", "    return 42", "", "- one")


def cache_folder() -> Path:
    """Where what takes long to make is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "hpkfs", "bench")


def big_store() -> Path:
    """A store of 1,800 files and a conversation database of 211 MB."""
    return cached_store(BIG_FILES, sessions=BIG_SESSIONS, database_bytes=BIG_DATABASE_BYTES)


def small_store() -> Path:
    """A store of 10 files and a conversation database of 1 MB."""
    return cached_store(SMALL_FILES, sessions=SMALL_SESSIONS, database_bytes=SMALL_DATABASE_BYTES)


def cached_store(files: int, *, sessions: int, database_bytes: int) -> Path:
    """A store with one checkpoint of `files` files besides its database."""
    database = cached_database(sessions=sessions, database_bytes=database_bytes)

    def make(path: Path) -> None:
        content = {**seeded_files(files), DATABASE: database.read_bytes()}
        write_store(path, content)

    return _cached(f"store-{files}-{database_bytes}", make)


def cached_database(*, sessions: int, database_bytes: int) -> Path:
    """A conversation database as a checkpoint holds it."""

    def make(path: Path) -> None:
        make_hermes_database(
            path,
            sessions=sessions,
            messages_per_session=MESSAGES_PER_SESSION,
            target_bytes=database_bytes,
        )
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode=DELETE")

    return _cached(f"database-{sessions}-{database_bytes}.sqlite3", make)


def copy_store(source: Path, target: Path) -> Path:
    """A store of one's own; objects are never rewritten, so they are shared by hard links."""

    def link_or_copy(old: str, new: str) -> None:
        if Path(old).parent.name != "objects":
            shutil.copyfile(old, new)
            return
        try:
            os.link(old, new)
        except OSError:
            shutil.copyfile(old, new)

    shutil.copytree(source, target, copy_function=link_or_copy)
    return target


def seeded_files(count: int) -> dict[str, bytes]:
    """Logical paths and contents: a profile, skills and a workspace of text of usual sizes."""
    rng = random.Random(count)
    files = {
        PORTABLE: encode_portable(DEFAULT),
        SOUL: b"# Ada's agent\n\nBe brief.\n",
        USER: b"The user's name is Ada.\n",
        MEMORY: b"The tests are run with pytest.\n",
        AGENTS: b"# Rules\n\nBe brief.\n",
    }
    number = 0
    while len(files) < count:
        folder = number // FILES_PER_FOLDER
        if folder % 3 == 0:
            path = f"profile/skills/area-{folder % 7}/skill-{folder}/part-{number}.md"
        else:
            path = f"workspace/project-{folder % 9}/module-{folder}/file-{number}.py"
        files[path] = _text(rng)
        number += 1
    return files


def _text(rng: random.Random) -> bytes:
    """Mostly some KB, now and then much more."""
    size = int(min(rng.lognormvariate(8.0, 1.2), 300_000))
    block = "\n".join(rng.choice(LINES) for _ in range(40)) + "\n"
    head = f"{rng.random()}\n"
    return (head + block * (size // len(block) + 1)).encode()[: max(size, 20)]


def write_store(root: Path, content: Mapping[str, bytes], *, agent_id: str = "big") -> None:
    """Write a store with one checkpoint of `content` (by logical path) into a new folder."""
    rng = random.Random(len(content))
    for name in ("objects", "snapshots"):
        (root / name).mkdir(parents=True)
    records = {}
    for path, data in content.items():
        records[path], objects = build_record(path, data, executable=False)
        for name, piece in objects.items():
            (root / name).write_bytes(piece)
    snapshot = Snapshot(
        kind="agent",
        owner_id=agent_id,
        name="",
        snapshot_id=SnapshotId(make_id(rng.randbytes(16))),
        parent=None,
        created_at="2026-01-02T03:04:05Z",
        device_id=make_id(rng.randbytes(16)),
        runtime=HERMES_RUNTIME,
        last_session_id=None,
        template=None,
        description="",
        files=records,
    )
    document = encode_snapshot(snapshot)
    (root / f"snapshots/{snapshot.snapshot_id}.json").write_bytes(document)
    head = Head("agent", agent_id, snapshot.snapshot_id, sha256_hex(document))
    (root / "head.json").write_bytes(encode_head(head))


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    folder = cache_folder()
    path = folder / f"v{VERSION}-{name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / f".half-{os.getpid()}-{name}"
        try:
            make(half)
            half.rename(path)
        finally:
            if half.is_dir():
                shutil.rmtree(half)
            else:
                half.unlink(missing_ok=True)
    return path
