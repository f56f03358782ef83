"""The other v2 program accepts a sound store and refuses a damaged one."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import hermes, peer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.peer]
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "hermes-0.19"
EXPECTED: dict[str, Any] = json.loads((SAMPLE / "expected.json").read_text())
DATABASE = "conversations/state.sqlite3"
NOT_COPIED = (DATABASE, "config/portable.json")
PIECE_SIZE = 1_048_576
BINARY = "workspace/data/sample.bin"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE / "store", tmp_path / "store"))


def test_the_sample_is_accepted_and_rebuilt_byte_for_byte(store: Path, tmp_path: Path) -> None:
    report = peer.check(store, tmp_path / "scratch")
    assert report.problems == ()
    assert report.chain == tuple(c["snapshotId"] for c in EXPECTED["checkpoints"])
    assert (report.foreign, report.changes) == ((), ())
    assert report.files == {
        path: peer.OnDisk(record["sha256"], record["size"], record["executable"])
        for path, record in EXPECTED["files"].items()
        if path not in NOT_COPIED
    }
    assert conversations(report) == {
        session["id"]: session["textSha256"] for session in EXPECTED["database"]["sessionList"]
    }
    folders = {session.cwd for session in hermes.sessions(report.home)}
    assert folders == {None, str(report.workspace)}, "markers became its own workspace"


def conversations(report: peer.Report) -> dict[str, str]:
    return {
        session.id: hashlib.sha256(
            "\n".join(f"{role}|{text}" for role, text in session.messages).encode()
        ).hexdigest()
        for session in hermes.sessions(report.home)
    }


def test_a_checkpoint_that_it_adds_is_one_that_it_accepts(store: Path, tmp_path: Path) -> None:
    edits = {"workspace/from-the-other.md": "Hello.\n", BINARY: None}
    published = peer.publish(store, tmp_path / "first", edits)
    assert published.problems == ()
    report = peer.check(store, tmp_path / "second")
    assert report.problems == ()
    assert report.chain == (published.published, *published.chain)
    assert report.files.keys() - published.files.keys() == {"workspace/from-the-other.md"}
    assert published.files.keys() - report.files.keys() == {BINARY}


def test_a_file_that_it_has_no_place_for_is_kept(store: Path, tmp_path: Path) -> None:
    snapshot = newest(store)
    sidecar = "hpkfs/attributes.json"
    snapshot["files"][sidecar] = stored(store, b"{}\n", "json")
    replace_newest(store, snapshot)
    published = peer.publish(store, tmp_path / "first", {"workspace/new.md": "New.\n"})
    assert (published.problems, published.foreign) == ((), (sidecar,))
    assert newest(store)["files"][sidecar] == snapshot["files"][sidecar]


def test_a_file_that_its_next_checkpoint_would_lose_is_reported(
    store: Path, tmp_path: Path
) -> None:
    snapshot = newest(store)
    snapshot["files"]["workspace/build/made.bin"] = stored(store, b"made", "bin")
    replace_newest(store, snapshot)
    report = peer.check(store, tmp_path / "scratch")
    assert (report.problems, report.changes) == ((), ("removed workspace/build/made.bin",))


# One damage each: where the problem must be named, and what to do to the store.


def flip_a_byte_of_an_object(store: Path) -> str:
    name = newest(store)["files"][BINARY]["pieces"][1]["object"]
    data = bytearray((store / name).read_bytes())
    data[0] ^= 1
    (store / name).write_bytes(data)
    return BINARY


def remove_an_object_of_an_old_snapshot(store: Path) -> str:
    oldest = EXPECTED["checkpoints"][-1]["snapshotId"]
    old = json.loads((store / "snapshots" / f"{oldest}.json").read_text())["files"]
    new = newest(store)["files"]
    path = str(next(path for path in old if path.startswith("workspace/") and path not in new))
    (store / old[path]["pieces"][0]["object"]).unlink()
    return path


def change_a_snapshot_behind_its_digest(store: Path) -> str:
    name = store / "snapshots" / f"{EXPECTED['checkpoints'][1]['snapshotId']}.json"
    name.write_bytes(name.read_bytes().replace(b'"schemaVersion":2', b'"schemaVersion": 2'))
    return "chain"


def write_the_head_with_a_space_too_many(store: Path) -> str:
    head = store / "head.json"
    head.write_bytes(head.read_bytes().replace(b'":"', b'": "', 1))
    return "head.json: it would write other bytes"


def end_the_head_early(store: Path) -> str:
    (store / "head.json").write_bytes((store / "head.json").read_bytes()[:-20])
    return "head: "


def add_a_table_to_the_database(store: Path) -> str:
    change_database(store, "CREATE TABLE delivery_obligations (id)")
    return "unrecognized tables"


def leave_this_machine_s_state_in_the_database(store: Path) -> str:
    change_database(store, "UPDATE sessions SET chat_id = 'here'")
    return "another conversation"


DAMAGES = [
    flip_a_byte_of_an_object,
    remove_an_object_of_an_old_snapshot,
    change_a_snapshot_behind_its_digest,
    write_the_head_with_a_space_too_many,
    end_the_head_early,
    add_a_table_to_the_database,
    leave_this_machine_s_state_in_the_database,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_store_is_refused(
    damage: Callable[[Path], str], store: Path, tmp_path: Path
) -> None:
    named = damage(store)
    problems = peer.check(store, tmp_path / "scratch").problems
    assert any(named in problem for problem in problems), problems


def newest(store: Path) -> dict[str, Any]:
    head = json.loads((store / "head.json").read_text())
    text = (store / "snapshots" / f"{head['snapshotId']}.json").read_text()
    snapshot: dict[str, Any] = json.loads(text)
    return snapshot


def replace_newest(store: Path, snapshot: dict[str, Any]) -> None:
    """Store another document as the newest snapshot, with the head that belongs to it."""
    body = canonical(snapshot)
    (store / "snapshots" / f"{snapshot['snapshotId']}.json").write_bytes(body)
    head = json.loads((store / "head.json").read_text())
    head["sha256"] = hashlib.sha256(body).hexdigest()
    (store / "head.json").write_bytes(canonical(head))


def stored(store: Path, data: bytes, extension: str) -> dict[str, Any]:
    """Store a file of one piece; return its record."""
    assert 0 < len(data) <= PIECE_SIZE
    content = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    name = f"objects/{content['sha256']}.{extension}"
    (store / name).write_bytes(data)
    return {**content, "executable": False, "pieces": [{**content, "object": name}]}


def change_database(store: Path, statement: str) -> None:
    """Run a statement on the newest database; all documents stay well-formed."""
    snapshot = newest(store)
    pieces = snapshot["files"][DATABASE]["pieces"]
    scratch = store.parent / "changed.db"
    scratch.write_bytes(b"".join((store / piece["object"]).read_bytes() for piece in pieces))
    with closing(sqlite3.connect(scratch)) as database, database:
        database.execute(statement)
    snapshot["files"][DATABASE] = stored(store, scratch.read_bytes(), "chunk")
    replace_newest(store, snapshot)


def canonical(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"{text}\n".encode()
