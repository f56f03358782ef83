"""fsck: every kind of damage is a finding, nothing else is, and mending loses no copy."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from support.agents import desk
from support.stores import make_store

from hpkfs import fsck, mountpoint, places
from hpkfs.client import MountRecord
from hpkfs.core.documents import Head, encode_head, encode_snapshot, parse_head, parse_snapshot
from hpkfs.core.ids import SnapshotId, sha256_hex
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.errors import BusyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.agents import Desk
    from support.stores import ExpectedStore

GENUINE = Path(__file__).parents[1] / "data" / "hermes-0.19" / "store"
BIG = "workspace/exactly-1048577.bin"

Findings = list[dict[str, object]]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> ExpectedStore:
    return make_store(str(tmp_path / "store"), seed=5, files=40, big_files=0)


@pytest.fixture
def state(store: ExpectedStore, tmp_path: Path) -> Path:
    """A state directory with everything hydrated, a new file published and one pending."""

    async def work(opened: Desk) -> None:
        for ino, _ in opened.volume.journal.with_states():
            await opened.agent.content.hydrate(opened.volume.get(ino))
        await opened.write("workspace/published.md", b"published")
        await opened.agent.sync()
        await opened.write("workspace/pending.md", b"pending")
        await opened.write("cron/jobs.json", b"local")
        await opened.agent.sync(publish=False, pull=False)

    at(store, tmp_path / "state", work)
    return tmp_path / "state"


def at(store: ExpectedStore, state: Path, work: Callable[[Desk], object]) -> None:
    async def run() -> None:
        async with desk(store.root, state) as opened:
            await work(opened)  # type: ignore[misc]  # each is a coroutine function

    trio.run(run)


def texts(found: Findings) -> list[str]:
    return [f"{one['what']}: {one['where']}" for one in found]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != places.LOCK_FILE
    }


def head_of(store: Path) -> Path:
    head = parse_head((store / "head.json").read_bytes())
    return store / "snapshots" / f"{head.snapshot_id}.json"


def an_object(store: ExpectedStore) -> Path:
    """An object that the newest checkpoint names."""
    record = store.newest.snapshot.files["profile/SOUL.md"]
    return Path(store.root) / record.pieces[0].object


def backing(state: Path, name: str) -> Path:
    with closing(sqlite3.connect(state / "hpkfs" / "journal.sqlite3")) as db:
        (ino,) = db.execute("SELECT ino FROM inodes WHERE name=?", (name.encode(),)).fetchone()
    return state / "hpkfs" / "backing" / str(ino)


def change_journal(state: Path, *statements: str) -> None:
    with closing(sqlite3.connect(state / "hpkfs" / "journal.sqlite3")) as db, db:
        for statement in statements:
            db.execute(statement)


def flip(path: Path, offset: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


# -- stores --------------------------------------------------------------------------------


@pytest.mark.parametrize("read_data", [False, True])
def test_a_genuine_store_is_clean(read_data: bool) -> None:
    assert fsck.check(str(GENUINE), read_data=read_data) == []
    assert fsck.check(GENUINE.as_uri(), read_data=read_data) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_store_of_another_program_is_clean(tmp_path: Path, seed: int) -> None:
    store = make_store(str(tmp_path / "store"), seed=seed, files=60)
    assert fsck.check(store.uri, read_data=True) == []


def test_a_check_changes_nothing_in_a_store(store: ExpectedStore) -> None:
    before = tree(Path(store.root))
    flip(Path(store.root, "head.json"))
    damaged = tree(Path(store.root))
    assert damaged != before
    fsck.check(store.uri, read_data=True, repair=True)
    assert tree(Path(store.root)) == damaged


def test_a_missing_object_is_found_with_the_file_that_needs_it(store: ExpectedStore) -> None:
    path = an_object(store)
    path.unlink()
    (one,) = fsck.check(store.uri)
    assert one["what"] == "An object is missing"
    assert str(one["where"]).startswith(f"objects/{path.name}, needed by profile/SOUL.md of ")
    assert one["repairable"] is False
    assert fsck.exit_code([one]) == 6


def test_an_object_of_an_older_checkpoint_is_found_missing(store: ExpectedStore) -> None:
    newest = {p.object for r in store.newest.snapshot.files.values() for p in r.pieces}
    oldest = {p.object for r in store.checkpoints[0].snapshot.files.values() for p in r.pieces}
    name = min(oldest - newest)
    Path(store.root, name).unlink()
    assert [one["what"] for one in fsck.check(store.uri)] == ["An object is missing"]


def test_an_object_of_another_size_is_found_without_reading_it(store: ExpectedStore) -> None:
    with an_object(store).open("ab") as out:
        out.write(b"more")
    (one,) = fsck.check(store.uri)
    assert "bytes instead of" in str(one["what"])


def test_a_flipped_byte_is_found_by_reading(store: ExpectedStore) -> None:
    flip(an_object(store))
    assert fsck.check(store.uri) == []
    (one,) = fsck.check(store.uri, read_data=True)
    assert one["what"] == "The bytes are not what the digest says"


def test_whole_pieces_in_the_wrong_order_are_found_by_reading(store: ExpectedStore) -> None:
    snapshot = store.newest.snapshot
    path = next(p for p, r in snapshot.files.items() if len(set(r.pieces)) > 1)
    record = snapshot.files[path]
    wrong = replace(record, pieces=record.pieces[::-1])
    document = encode_snapshot(replace(snapshot, files={**snapshot.files, path: wrong}))
    put_newest(store, document)
    assert fsck.check(store.uri) == []
    (one,) = fsck.check(store.uri, read_data=True)
    assert "The pieces are whole" in str(one["what"])
    assert path in str(one["where"])


def put_newest(store: ExpectedStore, document: bytes) -> None:
    snapshot = parse_snapshot(document)
    root = Path(store.root)
    (root / f"snapshots/{snapshot.snapshot_id}.json").write_bytes(document)
    head = Head("agent", store.agent_id, snapshot.snapshot_id, sha256_hex(document))
    (root / "head.json").write_bytes(encode_head(head))


@pytest.mark.parametrize("data", [b"", b"{}\n", b"\xff garbage", b"[" * 3000, b" " * 10_000])
def test_a_damaged_head_is_found_and_what_it_led_to_still_checked(
    store: ExpectedStore, data: bytes
) -> None:
    Path(store.root, "head.json").write_bytes(data)
    an_object(store).unlink()
    found = fsck.check(store.uri)
    assert "head.json" in str(found[0]["where"])
    assert "An object is missing" in [one["what"] for one in found]


def test_a_missing_head_is_found(store: ExpectedStore) -> None:
    Path(store.root, "head.json").unlink()
    (one,) = fsck.check(store.uri)
    assert one["what"] == "The head is missing"


def test_a_folder_in_the_place_of_the_head_is_found(store: ExpectedStore) -> None:
    Path(store.root, "head.json").unlink()
    Path(store.root, "head.json").mkdir()
    (one,) = fsck.check(store.uri)
    assert "is not a file" in str(one["what"])


def test_a_damaged_snapshot_is_found(store: ExpectedStore) -> None:
    flip(head_of(Path(store.root)), 30)
    found = fsck.check(store.uri)
    assert [one["where"] for one in found[:1]] == [
        f"snapshots/{store.newest.snapshot.snapshot_id}.json, named by the head"
    ]


def test_a_missing_parent_is_found_and_what_lies_behind_it_still_checked(
    store: ExpectedStore,
) -> None:
    gone = store.checkpoints[-2].snapshot.snapshot_id
    Path(store.root, "snapshots", f"{gone}.json").unlink()
    (one,) = fsck.check(store.uri)
    assert one["what"] == "A checkpoint is missing"
    assert gone in str(one["where"])
    newest = {p.object for r in store.newest.snapshot.files.values() for p in r.pieces}
    oldest = {p.object for r in store.checkpoints[0].snapshot.files.values() for p in r.pieces}
    Path(store.root, min(oldest - newest)).unlink()
    assert len(fsck.check(store.uri)) == 2


def test_a_parent_with_another_digest_is_found(store: ExpectedStore) -> None:
    old = store.checkpoints[0].snapshot
    path = Path(store.root, "snapshots", f"{old.snapshot_id}.json")
    path.write_bytes(encode_snapshot(replace(old, name="changed")))
    (one,) = fsck.check(store.uri)
    assert "digest" in str(one["what"])


def test_a_snapshot_of_another_agent_is_found(store: ExpectedStore) -> None:
    snapshot = replace(store.newest.snapshot, owner_id="other", snapshot_id=SnapshotId("ab" * 16))
    put_newest(store, encode_snapshot(snapshot))
    found = fsck.check(store.uri)
    assert f"snapshots/{'ab' * 16}.json, named by the head" in str(found[0]["where"])


def test_copies_by_a_sync_program_and_unknown_files_are_told_and_no_damage(
    store: ExpectedStore,
) -> None:
    root = Path(store.root)
    for name in ("head (1).json", "head.sync-conflict-20260101-120000-ABCDEFG.json", "notes.txt"):
        (root / name).write_bytes(b"x")
    digest = "0" * 64
    (root / f"objects/{digest} (copy).bin").write_bytes(b"x")
    found = fsck.check(store.uri)
    assert len(found) == 4
    assert all(one["notice"] for one in found)
    assert sum("a sync program made a copy of the head" in str(one["what"]) for one in found) == 2
    assert fsck.exit_code(found) == 0


def test_what_a_killed_writer_leaves_in_a_store_is_no_finding(store: ExpectedStore) -> None:
    root = Path(store.root)
    (root / "head.json.0123abcd.tmp").write_bytes(b"{")
    (root / f"objects/{'0' * 64}.bin.0123abcd.tmp").write_bytes(b"x")
    assert fsck.check(store.uri, read_data=True) == []


@pytest.mark.parametrize("name", ["missing", "empty", "file", "full"])
def test_a_path_that_is_neither_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "x").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UsageError) as caught:
        fsck.check(str(tmp_path / name))
    assert caught.value.exit_code == 1
    assert str(tmp_path / name) in caught.value.happened


# -- state directories ---------------------------------------------------------------------


@pytest.mark.parametrize("read_data", [False, True])
def test_a_state_directory_with_pending_work_is_clean_and_not_changed(
    state: Path, read_data: bool
) -> None:
    before = tree(state)
    assert fsck.check(str(state), read_data=read_data) == []
    assert tree(state) == before


def test_a_state_directory_after_a_kill_is_clean_and_not_changed(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    copy = tmp_path / "killed"

    async def work(opened: Desk) -> None:
        await opened.write("workspace/new.md", b"new")
        await opened.write("workspace/gone.md", b"gone")
        opened.remove("workspace/gone.md")
        shutil.copytree(state, copy)

    at(store, state, work)
    (copy / "hpkfs/pending/.new/objects").mkdir(parents=True)
    (copy / "hpkfs/backing/999999").write_bytes(b"")
    before = tree(copy)
    assert fsck.check(str(copy), read_data=True) == []
    assert tree(copy) == before


def test_a_damaged_clean_chunk_is_mended_from_the_store(store: ExpectedStore, state: Path) -> None:
    good = backing(state, "exactly-1048577.bin").read_bytes()
    flip(backing(state, "exactly-1048577.bin"), PIECE_SIZE)
    (one,) = fsck.check(str(state), read_data=True)
    assert one["repairable"] is True
    assert "exactly-1048577.bin" in str(one["where"])
    (one,) = fsck.check(str(state), read_data=True, repair=True)
    assert one["repaired"] is True
    assert fsck.check(str(state), read_data=True) == []

    async def read(opened: Desk) -> None:
        assert await opened.read(BIG) == good

    at(store, state, read)


def test_a_damaged_chunk_whose_object_is_gone_is_left_alone(
    store: ExpectedStore, state: Path
) -> None:
    path = backing(state, "SOUL.md")
    an_object(store).unlink()
    flip(path)
    damaged = path.read_bytes()
    found = fsck.check(str(state), read_data=True, repair=True)
    one = next(one for one in found if "Clean chunk 0" in str(one["what"]))
    assert (one["repairable"], one["repaired"]) == (False, False)
    assert path.read_bytes() == damaged


def test_a_missing_backing_file_of_clean_bytes_is_mended(store: ExpectedStore, state: Path) -> None:
    good = backing(state, "SOUL.md").read_bytes()
    backing(state, "SOUL.md").unlink()
    (one,) = fsck.check(str(state), repair=True)
    assert (one["what"], one["repaired"]) == ("The backing file is missing", True)
    assert fsck.check(str(state)) == []

    async def read(opened: Desk) -> None:
        assert await opened.read("SOUL.md") == good

    at(store, state, read)


@pytest.mark.parametrize("change", [-3, 5])
def test_a_backing_file_of_another_size_moves_to_recovery_and_comes_again(
    store: ExpectedStore, state: Path, change: int
) -> None:
    path = backing(state, "SOUL.md")
    good = path.read_bytes()
    wrong = good[:change] if change < 0 else good + b"x" * change
    path.write_bytes(wrong)
    (one,) = fsck.check(str(state), repair=True)
    assert "bytes instead of" in str(one["what"])
    assert one["repaired"] is True
    (aside,) = (state / "hpkfs" / "recovery").rglob(path.name)
    assert aside.read_bytes() == wrong
    assert fsck.check(str(state), read_data=True) == []

    async def read(opened: Desk) -> None:
        assert await opened.read("SOUL.md") == good

    at(store, state, read)


def test_the_lost_only_copy_of_a_local_file_is_found_and_not_mended(state: Path) -> None:
    backing(state, "jobs.json").unlink()
    (one,) = fsck.check(str(state), repair=True)
    assert (one["what"], one["repairable"]) == ("The only copy of a file is missing", False)
    assert "cron/jobs.json" in str(one["where"])


def test_the_name_of_a_secret_is_in_no_finding(store: ExpectedStore, tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def work(opened: Desk) -> None:
        await opened.write("workspace/credentials.env", b"KEY=1")

    at(store, state, work)
    backing(state, "credentials.env").unlink()
    (one,) = fsck.check(str(state))
    assert "credentials" not in "".join(texts([one]))


def test_a_backing_file_that_nothing_names_moves_to_recovery(state: Path) -> None:
    left = state / "hpkfs" / "backing" / "987654"
    left.write_bytes(b"only copy?")
    (one,) = fsck.check(str(state))
    assert (one["where"], one["repairable"]) == (str(left), True)
    assert left.exists()
    fsck.check(str(state), repair=True)
    assert not left.exists()
    (aside,) = (state / "hpkfs" / "recovery").rglob("987654")
    assert aside.read_bytes() == b"only copy?"
    assert fsck.check(str(state)) == []


def test_a_file_in_use_that_is_marked_for_removal_is_found(state: Path) -> None:
    ino = backing(state, "SOUL.md").name
    change_journal(state, f"INSERT INTO dropped VALUES({ino})")
    (one,) = fsck.check(str(state), repair=True)
    assert one["what"] == "A file is in use, and its bytes are marked for removal"
    assert backing(state, "SOUL.md").exists()


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        (
            "UPDATE inodes SET record='[' WHERE name=x'534f554c2e6d64'",
            "record of a file is damaged",
        ),
        (
            "UPDATE inodes SET states=x'' WHERE name=x'534f554c2e6d64'",
            "record of a file is damaged",
        ),
        ("DELETE FROM dentries WHERE name=x'534f554c2e6d64'", "has no name"),
        ("DELETE FROM inodes WHERE name=x'534f554c2e6d64'", "has no inode"),
        ("UPDATE meta SET value='00' WHERE key='base'", "does not know its base"),
        ("UPDATE checkpoints SET document=x'00' WHERE state='pending'", "what its digest says"),
        ("UPDATE checkpoints SET document=NULL WHERE state='pending'", "document of a checkpoint"),
    ],
)
def test_a_journal_that_contradicts_itself_is_found(state: Path, statement: str, what: str) -> None:
    change_journal(state, statement)
    found = fsck.check(str(state))
    assert any(what in text for text in texts(found)), texts(found)


def pending(state: Path) -> Path:
    (folder,) = (state / "hpkfs" / "pending").iterdir()
    return folder


def test_a_damaged_sealed_document_is_found(state: Path) -> None:
    flip(pending(state) / "snapshot.json", 10)
    (one,) = fsck.check(str(state))
    assert one["where"] == str(pending(state) / "snapshot.json")


def test_a_sealed_object_that_is_nowhere_is_found(state: Path) -> None:
    name = hashlib.sha256(b"pending").hexdigest()
    (pending(state) / "objects" / f"{name}.md").unlink()
    (one,) = fsck.check(str(state))
    assert one["what"] == "A sealed object is neither here nor on the store"
    assert "workspace/pending.md" in str(one["where"])


def test_a_damaged_sealed_object_is_found_by_reading(state: Path) -> None:
    name = hashlib.sha256(b"pending").hexdigest()
    flip(pending(state) / "objects" / f"{name}.md")
    assert fsck.check(str(state)) == []
    (one,) = fsck.check(str(state), read_data=True)
    assert one["what"] == "The bytes are not what the digest says"


def test_pending_work_whose_store_is_away_is_told_and_no_damage(
    store: ExpectedStore, state: Path
) -> None:
    shutil.move(store.root, store.root + ".away")
    found = fsck.check(str(state))
    assert fsck.exit_code(found) == 0
    assert "the store was not asked" in str(found[0]["what"])


# -- journals that cannot be used ----------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 2000)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:12_288] = b"\xaa" * 8192
    path.write_bytes(data)


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id=7")


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=99")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (garbage, "not a database"),
        (truncated, "damaged|malformed"),
        (flipped_pages, "damaged|malformed"),
        (foreign, "not a journal of hpkfs"),
        (newer, "has version 99, and this program knows 1"),
        (empty, "The journal is empty"),
        (Path.unlink, "The journal is missing"),
    ],
)
def test_a_journal_that_cannot_be_used_is_a_finding_and_nothing_is_touched(
    state: Path, damage: Callable[[Path], None], what: str, repair: bool
) -> None:
    path = state / "hpkfs" / "journal.sqlite3"
    damage(path)
    before = tree(state)
    found = fsck.check(str(state), read_data=True, repair=repair)
    assert found
    assert all(one["where"] == str(path) for one in found)
    assert not any(one["repairable"] for one in found)
    assert any(part in str(found[0]["what"]) for part in what.split("|")), texts(found)
    assert "hpkfs-fsck-" not in "".join(texts(found))
    assert tree(state) == before


# -- while a daemon runs -------------------------------------------------------------------


def test_a_running_daemon_is_not_disturbed_and_refuses_repair(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"

    async def work(opened: Desk) -> None:
        await opened.write("workspace/new.md", b"new")
        with places.RunLock(str(state)):
            check = ("import json, sys; from hpkfs import fsck; "
                     "print(json.dumps(fsck.check(sys.argv[1], read_data=True)))")  # fmt: skip
            done = await trio.run_process(
                (sys.executable, "-c", check, str(state)), capture_stdout=True
            )
            assert done.stdout == b"[]\n"
            await opened.write("workspace/new.md", b"newer")

    at(store, state, work)
    with places.RunLock(str(state)), pytest.raises(BusyError) as caught:
        fsck.check(str(state), repair=True)
    assert f"in use by process {os.getpid()}" in caught.value.happened
    assert "--repair needs the state directory for itself" in caught.value.kept
    assert caught.value.exit_code == 1


def test_damage_is_found_while_a_daemon_runs(state: Path) -> None:
    backing(state, "SOUL.md").unlink()
    with places.RunLock(str(state)):
        (one,) = fsck.check(str(state))
    assert one["what"] == "The backing file is missing"


# -- mounts --------------------------------------------------------------------------------


def test_a_mountpoint_stands_for_its_store_and_its_state_directory(
    store: ExpectedStore, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mountpoint.Mount(1, "0:1", "/mnt/agent", "fuse.hpkfs", store.uri)
    record = MountRecord(store.uri, "/mnt/agent", str(state), 1, False, 0, "/nowhere.sock")
    monkeypatch.setattr(mountpoint, "mounts", lambda: [mount])
    monkeypatch.setattr(fsck, "all_mounts", lambda: [record])
    assert fsck.check("/mnt/agent/workspace") == []
    an_object(store).unlink()
    backing(state, "jobs.json").unlink()
    expected = [
        "An object is missing",
        "The only copy of a file is missing",
        "A sealed object is neither here nor on the store",
    ]
    assert [one["what"] for one in fsck.check("/mnt/agent/workspace")] == expected
    assert [one["what"] for one in fsck.check(str(state))] == expected
    monkeypatch.setattr(fsck, "all_mounts", list)
    dead = fsck.check("/mnt/agent", state_dir=str(state))
    assert [one["what"] for one in dead] == expected


def test_the_command_ends_with_6_when_something_is_found(store: ExpectedStore) -> None:
    command = (sys.executable, "-m", "hpkfs.cli", "fsck", store.uri)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "Nothing is wrong.\n")
    an_object(store).unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert done.stdout.startswith("An object is missing: objects/")
