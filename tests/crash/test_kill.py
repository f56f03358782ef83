"""Kill the daemon under real writers, again and again: every acknowledged write stays.

Writers are processes that note each thing they did in a file outside the mount once the call
returned. The daemon is killed with SIGKILL after a seeded number of notes, the agent is mounted
again, and all that was noted must be there; what was under way may be there, but only whole.
At the end everything is published, and a machine with an empty cache finds the same.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio
from support.databases import genuine_database
from support.faults import contents, opened
from support.mounts import mounted
from support.stores import make_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.fuse

ROUNDS = 4
ROUNDS_LONG = 60
NOTES_MAX = 120
SLOTS = 5
WRITER_TIMEOUT_S = 30

WRITER = """
import os, sqlite3, sys

kind, home, notes, first = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
out = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def slots(number):
    path = f"{home}/workspace/slot{number % 5}"
    with open(path + ".new", "wb") as new:
        new.write((b"%d\\n" % number) * (1 + number % 9_000))
    os.rename(path + ".new", path)

def appends(number):
    fd = os.open(f"{home}/workspace/appended.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, b"line %d\\n" % number)
    os.close(fd)

def rows(number):
    db.execute("INSERT INTO t VALUES(?, ?)", (number, "x" * (number % 3_000)))
    db.commit()

if kind == "rows":
    db = sqlite3.connect(f"{home}/workspace/rows.db", timeout=10)
    assert db.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    db.execute("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, text)")
    db.commit()
try:
    number = first
    while True:
        globals()[kind](number)
        os.write(out, b"%d\\n" % number)
        number += 1
except (OSError, sqlite3.Error):
    os._exit(0)
"""


class Writers:
    """The three writers of one agent, over all rounds."""

    kinds = ("slots", "appends", "rows")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def notes(self, kind: str) -> list[int]:
        try:
            return [int(line) for line in (self.folder / kind).read_text().split()]
        except FileNotFoundError:
            return []

    def last(self, kind: str) -> int:
        return self.notes(kind)[-1] if self.notes(kind) else 0

    @contextlib.contextmanager
    def at_work(self, home: Path, *, skip: int) -> Iterator[None]:
        """Let them work until the mount goes away; they start `skip` after their last note."""
        with contextlib.ExitStack() as stack:
            for kind in self.kinds:
                command = [sys.executable, "-c", WRITER, kind, str(home), str(self.folder / kind)]
                first = str(self.last(kind) + 1 + skip)
                process = subprocess.Popen([*command, first], stderr=subprocess.PIPE)
                stack.callback(self.end, process)
            yield

    def end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            _, said = process.communicate(timeout=WRITER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, said.decode()

    def wait_for(self, count: int) -> None:
        """Return when `count` more things have been noted, at least one by each."""
        before = {kind: len(self.notes(kind)) for kind in self.kinds}
        deadline = time.monotonic() + WRITER_TIMEOUT_S
        while True:
            more = [len(self.notes(kind)) - before[kind] for kind in self.kinds]
            if min(more) and sum(more) >= count:
                return
            assert time.monotonic() < deadline, f"only {more} were noted"
            time.sleep(0.002)


def check(found: dict[str, bytes], writers: Writers) -> None:
    """What was noted is there; the one thing more that may be there is whole."""
    check_slots(found, writers.notes("slots"))
    noted = writers.notes("appends")
    lines = found.get("workspace/appended.txt", b"").decode().splitlines(keepends=True)
    assert all(line.startswith("line ") and line.endswith("\n") for line in lines)
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == sorted(numbers)
    assert set(noted) <= set(numbers)


def check_slots(found: dict[str, bytes], noted: list[int]) -> None:
    newest = {number % SLOTS: number for number in noted}
    for slot, number in newest.items():
        data = found[f"workspace/slot{slot}"]
        there = int(data.split(b"\n")[0])
        assert there >= number, f"slot {slot} went back from {number} to {there}"
        assert data == (b"%d\n" % there) * (1 + there % 9_000)


def check_rows(path: Path, noted: list[int]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = dict(db.execute("SELECT id, text FROM t"))
    assert set(noted) <= rows.keys()
    assert all(text == "x" * (number % 3_000) for number, text in rows.items())


def tree(home: Path) -> dict[str, bytes]:
    return {
        f"workspace/{path.name}": path.read_bytes()
        for path in (home / "workspace").iterdir()
        if path.is_file()
    }


def kill_and_check(store: Path, tmp_path: Path, *, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    writers = Writers(tmp_path / "notes")
    with mounted(store, tmp_path, "--seal-after", "0.2") as mount:
        (mount.path / "workspace").mkdir(exist_ok=True)
        for number in range(rounds):
            with writers.at_work(mount.path, skip=number):
                writers.wait_for(chance.randrange(1, NOTES_MAX))
                mount.kill()
            mount.mount("--seal-after", "0.2")
            check(tree(mount.path), writers)
            check_rows(mount.path / "workspace" / "rows.db", writers.notes("rows"))
        mount.umount("--wait")
        assert "Traceback" not in (mount.state / "hpkfs" / "daemon.log").read_text()
    found = on_another_machine(store, tmp_path)
    check(found, writers)
    (tmp_path / "rows.db").write_bytes(found["workspace/rows.db"])
    check_rows(tmp_path / "rows.db", writers.notes("rows"))


def on_another_machine(store: Path, tmp_path: Path) -> dict[str, bytes]:
    async def look() -> dict[str, bytes]:
        async with opened(store, tmp_path / "another") as desk:
            assert desk.agent.journal.check() == []
            return await contents(desk)

    return trio.run(look)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(str(tmp_path / "store"), seed=2, files=4, checkpoints=1, big_files=0)
    return tmp_path / "store"


def test_what_writers_noted_survives_kills_of_the_daemon_and_reaches_the_store(
    store: Path, tmp_path: Path
) -> None:
    kill_and_check(store, tmp_path, rounds=ROUNDS, seed=1)


@pytest.mark.long
def test_what_writers_noted_survives_many_kills(store: Path, tmp_path: Path) -> None:
    kill_and_check(store, tmp_path, rounds=ROUNDS_LONG, seed=2)


CONVERSATION = """
import os, sqlite3, sys

home, notes, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
out = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
db = sqlite3.connect(f"{home}/state.db", timeout=10, isolation_level=None)
assert db.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
session = db.execute("SELECT id FROM sessions ORDER BY id LIMIT 1").fetchone()[0]
try:
    while True:
        db.execute(
            "INSERT INTO messages(session_id, role, content, timestamp) VALUES(?, 'user', ?, 1.0)",
            (session, f"said {first}"),
        )
        os.write(out, b"%d\\n" % first)
        first += 1
except sqlite3.Error:
    os._exit(0)
"""


def test_a_conversation_survives_kills_of_the_daemon_and_is_whole_on_the_next_machine(
    store: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "said"
    notes.touch()
    with mounted(store, tmp_path, "--seal-after", "0.2") as mount:
        (mount.path / "state.db").write_bytes(genuine_database())
        for _ in range(3):
            before = len(notes.read_text().split())
            command = [sys.executable, "-c", CONVERSATION, str(mount.path), str(notes)]
            with subprocess.Popen([*command, str(before)], stderr=subprocess.PIPE) as writer:
                deadline = time.monotonic() + WRITER_TIMEOUT_S
                while len(notes.read_text().split()) < before + 20:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
                mount.kill()
                assert writer.wait(WRITER_TIMEOUT_S) == 0, writer.communicate()[1].decode()
            mount.mount("--seal-after", "0.2")
            assert_said(mount.path / "state.db", notes)
        mount.umount("--wait")
    found = on_another_machine(store, tmp_path)
    (tmp_path / "sealed.db").write_bytes(found["state.db"])
    assert_said(tmp_path / "sealed.db", notes)


def assert_said(database: Path, notes: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = db.execute("SELECT content FROM messages WHERE content LIKE 'said %'").fetchall()
    said = {content for (content,) in rows}
    assert {f"said {number}" for number in notes.read_text().split()} <= said
