"""Kill a writer at every durable point of a store in a directory, then look at what it left.

The writer is a process of its own, killed with SIGKILL just before the named call. A kill loses
what was not yet written; what a power cut takes besides is simulated by `LosingDisk`, which undoes
every rename and new file whose folder was not synced.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from hpkfs.durable import ATOMIC_CALLS, RealDisk
from hpkfs.errors import ConflictError, MissingObjectError, TransientError
from hpkfs.transport.base import HEAD_NAME
from hpkfs.transport.local import LOCK_NAME, LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).resolve().parents[1]
DATA = bytes(range(256)) * 64
OBJECT = f"objects/{hashlib.sha256(DATA).hexdigest()}.bin"
OLD, NEW = b'{"old":1}\n', b'{"new":1}\n'
TIMEOUT_S = 60

HEAD_STEPS = [f"{point}.{call}" for point in ("store.head",) for call in ATOMIC_CALLS]
OBJECT_STEPS = [f"{point}.{call}" for point in ("store.object",) for call in ATOMIC_CALLS]
SWAP_POINTS = [("store.folder.fsync", 1), ("store.folder.fsync", 2)] + [(p, 1) for p in HEAD_STEPS]
KNOWN_POINTS = ["store.known.fsync", "store.folder.fsync"]

WRITER = """
import json, sys, trio
from support.faulty_disk import KillingDisk
from hpkfs.transport.local import LocalTransport

root, point, nth, verb, *rest = json.loads(sys.argv[1])
transport = LocalTransport(root, disk=KillingDisk(point, nth=nth))
if verb == "swap":
    expected, new = rest
    trio.run(transport.swap_head, expected and expected.encode(), new.encode())
else:
    name, text = rest
    trio.run(transport.put, name, text.encode("latin-1"))
"""


def run_writer(root: Path, point: str, nth: int, *task: str | None) -> int:
    """Run a writer that is killed at a point; returns its exit code."""
    done = subprocess.run(
        (sys.executable, "-c", WRITER, json.dumps([str(root), point, nth, *task])),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))},
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode


@pytest.fixture
def root(tmp_path: Path) -> Path:
    LocalTransport(str(tmp_path / "store"), create=True)
    return tmp_path / "store"


def names_of(root: Path) -> set[str]:
    """Names in a store, without the lock and what a killed writer left unfinished."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in found if name != LOCK_NAME and not name.endswith(".tmp")}


# -- the head -----------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "nth"), SWAP_POINTS)
@pytest.mark.parametrize("old", [None, OLD], ids=["no head", "a head"])
def test_a_kill_during_the_swap_leaves_the_old_head_or_the_new_one(
    root: Path, point: str, nth: int, old: bytes | None
) -> None:
    if old is not None:
        (root / HEAD_NAME).write_bytes(old)
    expected = None if old is None else old.decode()
    assert run_writer(root, point, nth, "swap", expected, NEW.decode()) == -signal.SIGKILL

    moved = point == "store.head.folder"  # the call after the rename
    left = (root / HEAD_NAME).read_bytes() if (root / HEAD_NAME).exists() else None
    assert left == (NEW if moved else old)
    # The lock went with the writer, and the next one gets on with what it finds.
    transport = LocalTransport(str(root))
    trio.run(transport.swap_head, left, b"next")
    assert (root / HEAD_NAME).read_bytes() == b"next"
    assert names_of(root) == {HEAD_NAME}


def test_a_writer_that_is_not_killed_swaps_the_head(root: Path) -> None:
    assert run_writer(root, "store.known.fsync", 1, "swap", None, NEW.decode()) == 0
    assert (root / HEAD_NAME).read_bytes() == NEW


def test_the_same_swap_after_a_kill_is_a_conflict_exactly_when_the_head_had_moved(
    root: Path,
) -> None:
    for point, moved in (("store.head.rename", False), ("store.head.folder", True)):
        (root / HEAD_NAME).write_bytes(OLD)
        run_writer(root, point, 1, "swap", OLD.decode(), NEW.decode())
        transport = LocalTransport(str(root))
        if moved:
            with pytest.raises(ConflictError):
                trio.run(transport.swap_head, OLD, NEW)
        else:
            trio.run(transport.swap_head, OLD, NEW)
        assert (root / HEAD_NAME).read_bytes() == NEW


# -- objects ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", OBJECT_STEPS)
def test_a_kill_during_a_put_leaves_the_whole_object_or_none(root: Path, point: str) -> None:
    text = DATA.decode("latin-1")
    assert run_writer(root, point, 1, "put", OBJECT, text) == -signal.SIGKILL

    transport = LocalTransport(str(root))
    if point == "store.object.folder":
        assert trio.run(read, transport) == DATA
    else:
        assert names_of(root) == set()
        with pytest.raises(MissingObjectError):
            trio.run(read, transport)
    trio.run(transport.put, OBJECT, DATA)
    assert trio.run(read, transport) == DATA
    assert names_of(root) == {OBJECT}


@pytest.mark.parametrize("point", KNOWN_POINTS)
def test_a_kill_while_a_known_object_is_made_durable_leaves_it_whole(
    root: Path, point: str
) -> None:
    text = DATA.decode("latin-1")
    (root / OBJECT).write_bytes(DATA)
    assert run_writer(root, point, 1, "put", OBJECT, text) == -signal.SIGKILL
    assert trio.run(read, LocalTransport(str(root))) == DATA


async def read(transport: LocalTransport) -> bytes:
    return await transport.get(OBJECT, limit=len(DATA))


# -- power cuts ---------------------------------------------------------------------------


class LosingDisk(RealDisk):
    """A disk whose `cut_power` takes back every rename that no folder sync made durable.

    That is the least that POSIX promises: bytes by fsync of the file, names by fsync of the folder.
    `stop_at` raises before a point, as an error of the program would.
    """

    def __init__(self, stop_at: str = "") -> None:
        self.stop_at = stop_at
        self._undo: list[tuple[str, bytes | None]] = []

    def at(self, point: str) -> None:
        super().at(point)
        if point == self.stop_at:
            raise InterruptedError(point)

    def rename(self, source: str, target: str, *, point: str) -> None:
        before = Path(target).read_bytes() if os.path.exists(target) else None
        super().rename(source, target, point=point)
        self._undo.append((target, before))

    def fsync_folder(self, path: str, *, point: str) -> None:
        super().fsync_folder(path, point=point)
        self._undo = [
            (target, old) for target, old in self._undo if os.path.dirname(target) != path
        ]

    def cut_power(self) -> None:
        for target, before in reversed(self._undo):
            if before is None:
                os.unlink(target)
            else:
                Path(target).write_bytes(before)
        self._undo.clear()


def test_what_put_and_swap_returned_survives_a_power_cut(root: Path) -> None:
    disk = LosingDisk()
    transport = LocalTransport(str(root), disk=disk)
    trio.run(transport.put, OBJECT, DATA)
    trio.run(transport.swap_head, None, NEW)
    disk.cut_power()
    assert names_of(root) == {OBJECT, HEAD_NAME}


@pytest.mark.parametrize(
    "finish",
    [
        lambda transport: trio.run(transport.put, OBJECT, DATA),
        lambda transport: trio.run(transport.swap_head, None, NEW),
    ],
    ids=["put again", "swap"],
)
def test_an_object_whose_writer_died_before_the_folder_sync_is_durable_after_the_next_step(
    root: Path, finish: Callable[[LocalTransport], None]
) -> None:
    disk = LosingDisk(stop_at="store.object.folder")
    with pytest.raises(TransientError):
        trio.run(LocalTransport(str(root), disk=disk).put, OBJECT, DATA)
    disk.stop_at = ""
    finish(LocalTransport(str(root), disk=disk))
    disk.cut_power()
    assert OBJECT in names_of(root)


def test_a_head_whose_writer_died_before_the_folder_sync_is_durable_after_a_swap_for_itself(
    root: Path,
) -> None:
    (root / HEAD_NAME).write_bytes(OLD)
    disk = LosingDisk(stop_at="store.head.folder")
    with pytest.raises(TransientError):
        trio.run(LocalTransport(str(root), disk=disk).swap_head, OLD, NEW)
    assert (root / HEAD_NAME).read_bytes() == NEW
    disk.stop_at = ""
    trio.run(LocalTransport(str(root), disk=disk).swap_head, NEW, NEW)
    disk.cut_power()
    assert (root / HEAD_NAME).read_bytes() == NEW


def test_the_simulated_power_cut_does_take_what_was_not_synced(root: Path) -> None:
    disk = LosingDisk(stop_at="store.object.folder")
    with pytest.raises(TransientError):
        trio.run(LocalTransport(str(root), disk=disk).put, OBJECT, DATA)
    assert names_of(root) == {OBJECT}
    disk.cut_power()
    assert names_of(root) == set()
