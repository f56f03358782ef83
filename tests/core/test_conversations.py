"""Sealing databases: real SQLite, real images, writers that were killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.databases import (
    MODEL_ADDRESS,
    add_message,
    add_session,
    create_database,
    genuine_database,
    insert,
    make_hermes_database,
    open_database,
)

from hpkfs import conversations
from hpkfs.conversations import MARKER, Sealed, SuperJournalError, marker_for, seal_database
from hpkfs.errors import IntegrityError, QuotaError, RuntimeMismatchError, TransientError

DATA = Path(__file__).resolve().parents[1] / "data"
VECTOR = "2f7bb6f9409ee7726de2c784fe213a0b88187b0ee002fd8d959614485d0db45d"
VECTOR_DIGEST = "94f0e14abde0203c86287dff8f6692ad35962eca063b7ba11dc3e038b112c8f2"
WORKSPACE = "/home/ada/Böhm & Co/agent/workspace"
SECRET = "the canary sings at midnight"
PAGE_BYTES = 4096
KILLED_TIMEOUT_S = 60


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A live database of a machine, closed."""
    path = tmp_path / "live.db"
    make_hermes_database(path, sessions=6, messages_per_session=8, seed=3, workspace=WORKSPACE)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    folder.mkdir()
    return folder


def take(source: Path, image: Path) -> None:
    """Take an image: what the database and its sidecars are at this instant."""
    for name in os.listdir(image):
        (image / name).unlink()
    for suffix in ("", "-wal", "-journal"):
        if (path := source.with_name(source.name + suffix)).exists():
            shutil.copyfile(path, image / f"state.db{suffix}")


def seal(
    source: Path, image: Path, *, workspace: str | tuple[str, ...] = WORKSPACE, hermes: bool = True
) -> Sealed:
    take(source, image)
    return seal_database(str(image), "state.db", workspace=workspace, hermes=hermes)


def query(path: Path | str, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        return db.execute(sql).fetchall()


def differing_pages(left: bytes, right: bytes) -> list[int]:
    assert len(left) == len(right)
    return [
        at // PAGE_BYTES + 1
        for at in range(0, len(left), PAGE_BYTES)
        if left[at : at + PAGE_BYTES] != right[at : at + PAGE_BYTES]
    ]


def kill_when_ready(script: str, *arguments: Path | str) -> None:
    """Run a writer until it says that it is ready, and kill it."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        finally:
            writer.kill()
        writer.wait(KILLED_TIMEOUT_S)


# -- the logical digest --------------------------------------------------------------------


def test_logical_digest_is_the_one_of_the_vector() -> None:
    path = DATA / "vectors" / "03-remote" / "objects" / f"{VECTOR}.chunk"
    assert conversations.logical_digest(str(path)) == VECTOR_DIGEST


def test_logical_digest_ignores_pages_and_opening(live: Path, image: Path) -> None:
    before = seal(live, image)
    with closing(open_database(live)) as db:
        db.execute("INSERT INTO state_meta VALUES ('ghost_session_prune_v1', '1')")
        db.execute("UPDATE sessions SET cwd = ? WHERE cwd NOT NULL", (f"{WORKSPACE}/./",))
        db.execute("VACUUM")
    assert seal(live, image).logical_digest == before.logical_digest


def test_logical_digest_sees_one_more_message(live: Path, image: Path) -> None:
    before = seal(live, image)
    with closing(open_database(live)) as db:
        (session_id,) = db.execute("SELECT min(id) FROM sessions").fetchone()
        add_message(db, session_id, "one more")
        after = seal(live, image)
    assert after.logical_digest != before.logical_digest


def test_logical_digest_takes_text_that_is_no_utf8(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("UPDATE messages SET content = CAST(x'61ff62' AS TEXT) WHERE id = 1")
        db.execute("UPDATE sessions SET cwd = CAST(x'2fff' AS TEXT)")
    first = seal(live, image)
    assert first.logical_digest == conversations.logical_digest(first.path)


# -- normalising ---------------------------------------------------------------------------


def test_genuine_database_comes_out_with_every_row(tmp_path: Path, image: Path) -> None:
    source = tmp_path / "genuine.db"
    source.write_bytes(genuine_database())
    sealed = seal(source, image)
    everything = "SELECT * FROM messages ORDER BY id"
    assert query(sealed.path, everything) == query(source, everything)
    usage = "SELECT session_id, api_call_count, first_seen FROM session_model_usage ORDER BY 1"
    assert query(sealed.path, usage) == query(source, usage)
    assert sealed.notes == ()
    assert sealed.schema == conversations.DATABASE_SCHEMA
    assert os.listdir(image) == ["state.db"]
    assert query(sealed.path, "PRAGMA journal_mode") == [("delete",)]


def test_nothing_of_the_machine_is_left_in_sessions(live: Path, image: Path) -> None:
    dirty: dict[str, object] = dict.fromkeys(conversations.NULL_COLUMNS, SECRET)
    dirty |= dict.fromkeys(conversations.ZERO_COLUMNS, 7)
    with closing(open_database(live)) as db:
        add_session(db, "dirty", address=MODEL_ADDRESS, cwd=f"/home/{SECRET}", **dirty)
        db.execute("INSERT INTO gateway_routing VALUES ('s', 'k', ?, 1)", (SECRET,))
        db.execute("INSERT INTO compression_locks VALUES (?, 'h', 1, 2)", (SECRET,))
        db.execute("INSERT INTO state_meta VALUES ('k', ?)", (SECRET,))
        db.execute("CREATE TABLE delivery_obligations (id INTEGER PRIMARY KEY, body TEXT)")
        db.executemany("INSERT INTO delivery_obligations (body) VALUES (?)", [(SECRET,)] * 900)
        assert SECRET.encode() in live.with_name("live.db-wal").read_bytes()
        sealed = seal(live, image)
    assert sealed.notes == ()
    cleared = ", ".join((*conversations.NULL_COLUMNS, *conversations.ZERO_COLUMNS))
    nulls = (None,) * len(conversations.NULL_COLUMNS)
    assert set(query(sealed.path, f"SELECT {cleared} FROM sessions")) == {(*nulls, 0, 0, 0)}
    for table in ("gateway_routing", "compression_locks", "state_meta"):
        assert query(sealed.path, f"SELECT count(*) FROM {table}") == [(0,)]
    data = Path(sealed.path).read_bytes()
    assert SECRET.encode() not in data
    assert WORKSPACE.encode() not in data
    assert MODEL_ADDRESS.encode() not in data


def test_paths_become_markers_by_any_spelling_of_the_workspace(live: Path, image: Path) -> None:
    real = "/srv/disk/workspace"
    with closing(open_database(live)) as db:
        add_session(db, "a", cwd=real, git_repo_root=f"{WORKSPACE}/sub/repo")
        add_session(db, "b", cwd=f"{MARKER}kept", git_repo_root=f"{real}-other")
    sealed = seal(live, image, workspace=(WORKSPACE, real))
    found = query(sealed.path, "SELECT cwd, git_repo_root FROM sessions WHERE id IN ('a', 'b')")
    assert found == [(MARKER, f"{MARKER}sub/repo"), (f"{MARKER}kept", None)]


def test_one_spelling_may_be_given_alone_and_none_clears_every_path(
    live: Path, image: Path
) -> None:
    cwd = "SELECT DISTINCT cwd FROM sessions"
    assert query(seal(live, image, workspace=WORKSPACE).path, cwd) == [(MARKER,)]
    assert query(seal(live, image, workspace=()).path, cwd) == [(None,)]


PARTS = st.lists(st.text("ab .ü", min_size=1, max_size=4), max_size=3)


@given(value=st.one_of(st.text("/ab.", max_size=12), st.binary(), st.integers(), st.none()))
def test_a_cell_never_keeps_an_absolute_path(value: object) -> None:
    marker = marker_for(value, ("/a", "/a/b", "/"))
    assert marker is None or marker.startswith(MARKER)
    assert marker_for(marker, ("/a",)) == marker
    if marker is not None:
        assert ".." not in marker.removeprefix(MARKER).split("/")


@given(parts=PARTS)
def test_a_path_below_the_workspace_keeps_its_relative_part(parts: list[str]) -> None:
    names = [part for part in parts if part not in {".", ".."}]
    path = "/".join(("/a/work", *names))
    assert marker_for(path, ("/b", "/a/work/")) == MARKER + "/".join(names)


@pytest.mark.parametrize("outside", ["/a/workspace", "/a", "relative", "", "/a/work/../x"])
def test_a_path_outside_the_workspace_becomes_null(outside: str) -> None:
    assert marker_for(outside, ("/a/work",)) is None


def test_usage_rows_that_differ_in_the_address_only_are_added_up(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        add_session(db, "s")
        db.execute(
            "UPDATE session_model_usage SET first_seen = 5, last_seen = 9, api_call_count = 2,"
            " input_tokens = 10, estimated_cost_usd = 0.5, cost_status = 'old'"
            " WHERE session_id = 's'"
        )
        db.row_factory = sqlite3.Row
        row = dict(
            db.execute("SELECT * FROM session_model_usage WHERE session_id = 's'").fetchone()
        )
        newer = {"first_seen": 7, "last_seen": 11, "cost_status": "new", "input_tokens": 1}
        insert(db, "session_model_usage", {**row, "billing_base_url": "http://b", **newer})
        insert(db, "session_model_usage", {**row, "billing_base_url": "", "first_seen": None})
        insert(db, "session_model_usage", {**row, "task": "title", "api_call_count": 40})
    sealed = seal(live, image)
    found = query(
        sealed.path,
        "SELECT task, billing_base_url, api_call_count, input_tokens, estimated_cost_usd,"
        " first_seen, last_seen, cost_status FROM session_model_usage"
        " WHERE session_id = 's' ORDER BY task",
    )
    assert found == [
        ("", "", 6, 21, 1.5, 5.0, 11.0, "new"),
        ("title", "", 40, 10, 0.5, 5.0, 9.0, "old"),
    ]


def test_an_unknown_table_is_left_out_and_named(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute('CREATE TABLE "odd ""name" (body REFERENCES sessions(id))')
        db.execute('INSERT INTO "odd ""name" VALUES ((SELECT min(id) FROM sessions))')
        db.execute("CREATE VIRTUAL TABLE notes USING fts5(body)")
    sealed = seal(live, image)
    assert [note.split(" is ")[0] for note in sealed.notes] == [
        'table "notes"',
        'table "odd "name"',
    ]
    names = "SELECT count(*) FROM sqlite_schema WHERE name LIKE '%odd%' OR name LIKE 'notes%'"
    assert query(sealed.path, names) == [(0,)]


def test_a_virtual_table_of_a_missing_module_is_left_out(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("CREATE VIRTUAL TABLE embeddings USING fts5(body)")
        db.execute("PRAGMA writable_schema=ON")
        db.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'fts5', 'vec0') WHERE name = 'embeddings'"
        )
    sealed = seal(live, image)
    assert 'table "embeddings"' in sealed.notes[0]
    names = "SELECT count(*) FROM sqlite_schema WHERE name LIKE 'embeddings%'"
    assert query(sealed.path, names) == [(0,)]


def test_what_uses_a_dropped_table_goes_too_so_that_hermes_can_write(
    live: Path, image: Path
) -> None:
    with closing(open_database(live)) as db:
        db.execute("CREATE TABLE audit (id INTEGER)")
        db.execute("CREATE VIEW audit_view AS SELECT * FROM audit")
        db.execute("CREATE VIEW audit_top AS SELECT * FROM audit_view")
        db.execute(
            "CREATE TRIGGER log AFTER INSERT ON messages"
            " BEGIN INSERT INTO Audit VALUES (new.id); END"
        )
    sealed = seal(live, image)
    with closing(open_database(sealed.path)) as db:
        (session_id,) = db.execute("SELECT min(id) FROM sessions").fetchone()
        add_message(db, session_id, "zebra")
        found = db.execute("SELECT count(*) FROM messages_fts WHERE messages_fts MATCH 'zebra'")
        assert found.fetchone() == (1,)
    left_out = {note.split('"')[1] for note in sealed.notes}
    assert left_out == {"audit", "audit_view", "audit_top", "log"}


# -- bytes ---------------------------------------------------------------------------------


def test_a_sealed_file_sealed_again_is_the_same_bytes(live: Path, image: Path) -> None:
    sealed = seal(live, image)
    first = Path(sealed.path).read_bytes()
    again = seal_database(str(image), "state.db", workspace=WORKSPACE, hermes=True)
    assert again == sealed
    assert Path(sealed.path).read_bytes() == first


def test_the_same_image_gives_the_same_bytes(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        (session_id,) = db.execute("SELECT min(id) FROM sessions").fetchone()
        add_message(db, session_id, "only in the log")
        first = Path(seal(live, image).path).read_bytes()
        assert Path(seal(live, image).path).read_bytes() == first


def test_equal_pages_in_are_equal_pages_out(tmp_path: Path, image: Path) -> None:
    source = tmp_path / "live.db"
    make_hermes_database(source, sessions=6, messages_per_session=8, seed=5)
    sealed = Path(seal(source, image).path).read_bytes()
    assert differing_pages(source.read_bytes(), sealed) == [1]
    with closing(open_database(source)) as db:
        db.execute("UPDATE messages SET role = 'system' WHERE id = 4")
    changed = set(differing_pages(source.read_bytes(), sealed))
    again = Path(seal(source, image).path).read_bytes()
    assert set(differing_pages(again, sealed)) - {1} == changed - {1}  # it has the counter
    assert len(changed) > 1


def test_free_pages_hold_nothing_of_what_was_deleted(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("PRAGMA secure_delete=OFF")
        db.execute("CREATE TABLE delivery_obligations (id INTEGER PRIMARY KEY, body TEXT)")
        rows = [(SECRET * 10,)] * 16000
        db.executemany("INSERT INTO delivery_obligations (body) VALUES (?)", rows)
        db.execute("DROP TABLE delivery_obligations")
        (free,) = db.execute("PRAGMA freelist_count").fetchone()
    assert free > PAGE_BYTES // 4  # more than one page of the list itself
    assert SECRET.encode() in live.read_bytes()
    sealed = seal(live, image)
    data = Path(sealed.path).read_bytes()
    assert SECRET.encode() not in data
    assert query(sealed.path, "PRAGMA freelist_count") == [(free,)]
    before = os.stat(sealed.path).st_mtime_ns
    seal_database(str(image), "state.db", workspace=WORKSPACE, hermes=True)
    assert os.stat(sealed.path).st_mtime_ns == before


# -- refusals ------------------------------------------------------------------------------


def test_another_schema_is_refused_with_both_numbers(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("UPDATE schema_version SET version = 30")
    with pytest.raises(RuntimeMismatchError, match=r"schema 30.*schema 22"):
        seal(live, image)


@pytest.mark.parametrize("table", ["schema_version", "session_model_usage"])
def test_a_database_without_a_required_table_is_refused(
    live: Path, image: Path, table: str
) -> None:
    with closing(open_database(live)) as db:
        db.execute(f"DROP TABLE {table}")
    with pytest.raises(RuntimeMismatchError, match="schema"):
        seal(live, image)


def test_an_empty_file_is_refused(tmp_path: Path, image: Path) -> None:
    (tmp_path / "live.db").write_bytes(b"")
    with pytest.raises(conversations.EmptyDatabaseError, match="is empty"):
        seal(tmp_path / "live.db", image)


@pytest.mark.parametrize("hermes", [True, False])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, image: Path, hermes: bool) -> None:
    (tmp_path / "live.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(IntegrityError, match="damaged"):
        seal(tmp_path / "live.db", image, hermes=hermes)


def test_a_damaged_page_is_found(live: Path, image: Path) -> None:
    ((root,),) = query(
        live, "SELECT rootpage FROM sqlite_schema WHERE name = 'idx_messages_session'"
    )
    assert isinstance(root, int)
    with live.open("r+b") as file:
        file.seek((root - 1) * PAGE_BYTES + 12)
        file.write(b"\xff" * 20)
    with pytest.raises(IntegrityError, match=r"state\.db is damaged"):
        seal(live, image)


def test_a_page_that_is_both_free_and_used_is_found_and_not_sealed(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("CREATE TABLE delivery_obligations (body)")
        db.execute("DROP TABLE delivery_obligations")
    ((used,),) = query(live, "SELECT rootpage FROM sqlite_schema WHERE name = 'messages'")
    assert isinstance(used, int)
    with live.open("r+b") as file:
        header = file.read(100)
        trunk = int.from_bytes(header[32:36])
        file.seek((trunk - 1) * PAGE_BYTES)
        file.write((0).to_bytes(4) + (1).to_bytes(4) + used.to_bytes(4))
        file.seek(36)
        file.write((2).to_bytes(4))
    with pytest.raises(IntegrityError, match="damaged"):
        seal(live, image)


@pytest.mark.parametrize("first_free", [1 << 30, 7])
def test_a_broken_list_of_free_pages_is_found(live: Path, image: Path, first_free: int) -> None:
    with live.open("r+b") as file:
        file.seek(32)
        file.write(first_free.to_bytes(4) + (3).to_bytes(4))
    with pytest.raises(IntegrityError, match="damaged"):
        seal(live, image)


def test_a_row_without_its_session_is_found(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("PRAGMA foreign_keys=OFF")
        add_message(db, "nobody", "lost")
    with pytest.raises(IntegrityError, match="messages points to a row of sessions"):
        seal(live, image)


def test_a_full_disk_is_a_quota_error_and_a_vanished_image_a_transient_one(
    live: Path, image: Path
) -> None:
    def fill() -> None:
        with closing(sqlite3.connect(live)) as db, conversations._translated("state.db"):
            db.execute("PRAGMA max_page_count=1")
            db.execute("CREATE TABLE big AS SELECT zeroblob(1000000)")

    with pytest.raises(QuotaError, match="no space left"):
        fill()
    with pytest.raises(TransientError, match="could not be worked on"):
        seal_database(str(image), "state.db", workspace=(), hermes=True)


# -- images --------------------------------------------------------------------------------

WAL_WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode=WAL")
db.execute("PRAGMA wal_autocheckpoint=0")
db.execute("PRAGMA cache_size=2")
add = "INSERT INTO messages (session_id, role, content, timestamp) SELECT min(id), 'user', ?, 1"
for number in range(20):
    db.execute(add + " FROM sessions", (f"acknowledged {number}",))
db.execute("BEGIN IMMEDIATE")
for number in range(200):
    db.execute(add + " FROM sessions", (f"unfinished {number} " * 200,))
print("ready", flush=True)
sys.stdin.read()
"""

ROLLBACK_WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode=DELETE")
db.execute("PRAGMA cache_size=2")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE messages SET content = 'unfinished ' || content")
db.execute("UPDATE sessions SET system_prompt = 'unfinished ' || system_prompt")
print("ready", flush=True)
sys.stdin.read()
"""

SUPER_WRITER = """
import resource, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode=DELETE")
db.execute("ATTACH ? AS other", (sys.argv[2],))
db.execute("CREATE TABLE other.filler (id INTEGER PRIMARY KEY, body)")
db.execute("INSERT INTO other.filler (body) VALUES (zeroblob(20000000))")
db.execute("BEGIN")
db.execute("UPDATE messages SET role = 'system'")
db.execute("INSERT INTO other.filler (body) VALUES (zeroblob(20000))")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (15000000, 15000000))
db.execute("COMMIT")
"""


def test_every_acknowledged_message_of_a_killed_wal_writer_is_sealed(
    live: Path, image: Path
) -> None:
    kill_when_ready(WAL_WRITER, live)
    assert b"unfinished" in live.with_name("live.db-wal").read_bytes()
    sealed = seal(live, image)
    counts = (
        "SELECT sum(content LIKE 'acknowledged%'), sum(content LIKE 'unfinished%') FROM messages"
    )
    assert query(sealed.path, counts) == [(20, 0)]
    assert b"acknowledged 19" not in live.read_bytes()
    assert os.listdir(image) == ["state.db"]


@pytest.mark.parametrize("hermes", [True, False])
def test_an_unfinished_transaction_of_a_killed_writer_is_rolled_back(
    live: Path, image: Path, hermes: bool
) -> None:
    with closing(open_database(live)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    everything = "SELECT content FROM messages ORDER BY id"
    before = query(live, everything)
    kill_when_ready(ROLLBACK_WRITER, live)
    assert b"unfinished" in live.read_bytes()
    assert live.with_name("live.db-journal").stat().st_size > PAGE_BYTES
    sealed = seal(live, image, hermes=hermes)
    assert query(sealed.path, everything) == before
    prompts = "SELECT count(*) FROM sessions WHERE system_prompt LIKE 'unfinished%'"
    assert query(sealed.path, prompts) == [(0,)]
    assert os.listdir(image) == ["state.db"]


def test_a_transaction_over_two_databases_asks_for_another_image(
    live: Path, image: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SUPER_WRITER, str(live), str(tmp_path / "other.db")]
    killed = subprocess.run(command, timeout=KILLED_TIMEOUT_S, check=False)
    assert killed.returncode == -signal.SIGXFSZ
    assert b"-mj" in live.with_name("live.db-journal").read_bytes()
    for hermes in (True, False):
        with pytest.raises(SuperJournalError, match="together with another database"):
            seal(live, image, hermes=hermes)


def test_a_finished_journal_that_was_kept_does_not_matter(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        db.execute("PRAGMA journal_mode=PERSIST")
        db.execute("UPDATE messages SET role = 'system'")
        assert live.with_name("live.db-journal").stat().st_size > 0
        sealed = seal(live, image)
    assert query(sealed.path, "SELECT DISTINCT role FROM messages") == [("system",)]
    assert os.listdir(image) == ["state.db"]


def test_a_log_of_another_database_is_ignored(live: Path, image: Path) -> None:
    expected = seal(live, image).logical_digest
    other = live.with_name("other.db")
    with closing(create_database(other)):
        take(live, image)
        shutil.copyfile(f"{other}-wal", image / "state.db-wal")
        data = bytearray((image / "state.db-wal").read_bytes())
        data[16:20] = b"salt"
        (image / "state.db-wal").write_bytes(data)
    sealed = seal_database(str(image), "state.db", workspace=WORKSPACE, hermes=True)
    assert sealed.logical_digest == expected


def test_a_name_with_odd_characters_is_no_problem(live: Path, image: Path) -> None:
    odd = os.fsdecode(b"a?b#c%20\xff.db")
    shutil.copyfile(live, image / odd)
    sealed = seal_database(str(image), odd, workspace=WORKSPACE, hermes=True)
    assert os.listdir(image) == [odd]
    assert conversations.logical_digest(sealed.path) == sealed.logical_digest


# -- other databases -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wal", "delete", "truncate"])
def test_bytes_of_another_database_go_unchanged(tmp_path: Path, image: Path, mode: str) -> None:
    source = tmp_path / "kanban.db"
    with closing(sqlite3.connect(source, isolation_level=None)) as db:
        db.execute(f"PRAGMA journal_mode={mode}")
        db.execute("CREATE TABLE cards (id INTEGER PRIMARY KEY, body)")
        db.executemany("INSERT INTO cards (body) VALUES (?)", [("x" * 500,)] * 100)
        db.execute("DELETE FROM cards WHERE id > 20")
    data = source.read_bytes()
    sealed = seal(source, image, hermes=False)
    assert Path(sealed.path).read_bytes() == data
    assert sealed == Sealed(sealed.path, "", (), None)
    assert os.listdir(image) == ["state.db"]


def test_another_database_is_sealed_as_its_program_will_leave_it(
    tmp_path: Path, image: Path
) -> None:
    source = tmp_path / "kanban.db"
    with closing(open_database(source)) as db:
        db.execute("CREATE TABLE cards (body)")
        db.execute("INSERT INTO cards VALUES ('only in the log')")
        sealed = seal(source, image, hermes=False)
        assert query(sealed.path, "SELECT body FROM cards") == [("only in the log",)]
    assert Path(sealed.path).read_bytes() == source.read_bytes()


def test_a_database_that_needs_an_extension_travels_all_the_same(
    tmp_path: Path, image: Path
) -> None:
    source = tmp_path / "names.db"
    with closing(sqlite3.connect(source, isolation_level=None)) as db:
        db.create_collation("german", lambda a, b: (a > b) - (a < b))
        db.execute("CREATE TABLE names (name TEXT COLLATE german UNIQUE)")
        db.execute("INSERT INTO names VALUES ('Ada')")
    sealed = seal(source, image, hermes=False)
    assert Path(sealed.path).read_bytes() == source.read_bytes()
    assert all("extension" in note for note in sealed.notes)


# -- looking and copying -------------------------------------------------------------------


def test_inspect_tells_schema_and_tables_and_writes_nothing(live: Path, tmp_path: Path) -> None:
    data = live.read_bytes()
    info = conversations.inspect(str(live))
    assert info.schema == conversations.DATABASE_SCHEMA
    assert {"sessions", "messages", "messages_fts"} <= set(info.tables)
    assert live.read_bytes() == data
    assert os.listdir(tmp_path) == ["live.db"]
    (tmp_path / "other.db").write_bytes(b"")
    assert conversations.inspect(str(tmp_path / "other.db")) == conversations.DatabaseInfo(None, ())


def test_backup_of_a_live_home_has_what_is_in_the_log(live: Path, image: Path) -> None:
    with closing(open_database(live)) as db:
        (session_id,) = db.execute("SELECT min(id) FROM sessions").fetchone()
        add_message(db, session_id, "only in the log")
        db.execute("BEGIN IMMEDIATE")
        add_message(db, session_id, "not said yet")
        copy = conversations.backup_database(str(live), str(image))
    assert copy == str(image / "live.db")
    assert os.stat(copy).st_mode & 0o777 == 0o600
    sealed = seal_database(str(image), "live.db", workspace=WORKSPACE, hermes=True)
    newest = "SELECT content FROM messages ORDER BY id DESC LIMIT 1"
    assert query(sealed.path, newest) == [("only in the log",)]


def test_backup_takes_along_the_transaction_that_a_killed_writer_left(
    live: Path, image: Path
) -> None:
    with closing(open_database(live)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    before = query(live, "SELECT content FROM messages ORDER BY id")
    kill_when_ready(ROLLBACK_WRITER, live)
    torn = live.read_bytes()
    conversations.backup_database(str(live), str(image))
    assert live.read_bytes() == torn
    sealed = seal_database(str(image), "live.db", workspace=WORKSPACE, hermes=True)
    assert query(sealed.path, "SELECT content FROM messages ORDER BY id") == before


def test_backup_of_something_that_is_no_database_is_refused(tmp_path: Path, image: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"hello " * 1000)
    with pytest.raises(IntegrityError, match="damaged"):
        conversations.backup_database(str(tmp_path / "state.db"), str(image))
