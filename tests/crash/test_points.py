"""Kill an agent, or fail its disk, at every named disk call; then look at what was promised.

Whatever the point: after it the tree is the old or the new one, nothing acknowledged is lost,
the journal is whole, and everything reaches the store, where a second machine finds the same.
"""

from __future__ import annotations

import errno
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
import trio
from support.faults import (
    STEPS,
    contents,
    life,
    live_and_die,
    opened,
    pattern,
    tree_after,
)
from support.faulty_disk import FaultyDisk
from support.stores import make_store

from hpkfs.durable import ATOMIC_CALLS, NAMES
from hpkfs.errors import HpkfsError, IntegrityError, JournalError, QuotaError

if TYPE_CHECKING:
    from pathlib import Path

# Each point, and how often an agent's life passes it at least; killed the first and the last time.
PASSED = {
    "backing.data.fsync": 1,
    "backing.file.fsync": 2,
    "backing.folder.fsync": 2,
    "journal.wal.fsync": 7,
    "pending.folder.fsync": 2,
    "pending.object.fsync": 4,
    "pending.objects.fsync": 2,
    "pending.rename": 2,
    "pending.snapshot.write": 2,
    "pending.snapshot.fsync": 2,
    "pending.snapshot.rename": 2,
    "pending.snapshot.folder": 2,
    "store.folder.fsync": 4,
    "store.head.write": 2,
    "store.head.fsync": 2,
    "store.head.rename": 2,
    "store.head.folder": 2,
    "store.object.write": 4,
    "store.object.fsync": 4,
    "store.object.rename": 4,
    "store.object.folder": 4,
}
FSYNC_POINTS = ("backing.", "journal.")
# Passed only where a second writer or a killed one left something (test_store_points.py), and by a
# login (test_grants.py).
ELSEWHERE = {"store.known.fsync"} | {f"grant.file.{call}" for call in ATOMIC_CALLS}
CASES = sorted({(point, nth) for point, most in PASSED.items() for nth in (1, most)})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store that nobody has mounted yet."""
    root = tmp_path_factory.mktemp("pristine") / "store"
    make_store(str(root), seed=11, files=3, checkpoints=1, big_files=0)
    return root


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "store")


async def ours(store: Path, state: Path) -> dict[str, bytes]:
    """What an agent that is opened now holds of the files that `life` makes."""
    async with opened(store, state) as desk:
        assert desk.agent.journal.check() == []
        found = {path: data for path, data in (await contents(desk)).items() if _is_ours(path)}
        await desk.agent.sync()
        assert desk.agent.outcome()["state"] == "clean"
        return found


def _is_ours(path: str) -> bool:
    return path.rpartition("/")[2] in {"a.txt", "big.bin", "gone.txt", "moved-big.bin"}


def test_every_named_point_is_tried() -> None:
    assert PASSED.keys() | ELSEWHERE == NAMES


async def test_a_life_without_a_fault_passes_each_point_as_often_as_it_is_tried(
    store: Path, tmp_path: Path
) -> None:
    disk = FaultyDisk()
    with (tmp_path / "said").open("wb", buffering=0) as said:
        await life(str(store), str(tmp_path / "state"), disk, said.fileno())
    assert (tmp_path / "said").read_text().split() == list(STEPS)
    short = {p: disk.passed.count(p) for p, most in PASSED.items() if disk.passed.count(p) < most}
    assert not short
    assert await ours(store, tmp_path / "state") == tree_after("close")


@pytest.mark.parametrize(("point", "nth"), CASES)
async def test_a_kill_leaves_the_old_or_the_new_tree_and_all_that_was_acknowledged(
    store: Path, tmp_path: Path, point: str, nth: int
) -> None:
    state = tmp_path / "state"
    code, steps = await trio.to_thread.run_sync(live_and_die, store, state, point, nth)
    assert code == -signal.SIGKILL, f"{point} was not passed {nth} times; it said {steps}"
    found = await ours(store, state)
    if "change" in steps:
        assert found == tree_after("change")
    elif "publish" in steps:  # killed within the change: each of its operations happened or not
        assert_old_or_new(found)
    elif "write" in steps:
        assert found == tree_after("write")
    assert await ours(store, tmp_path / "second") == found


def assert_old_or_new(found: dict[str, bytes]) -> None:
    names = set(found)
    assert ("workspace/big.bin" in names) != ("workspace/moved-big.bin" in names)
    big = found.get("workspace/big.bin") or found["workspace/moved-big.bin"]
    old = pattern("workspace/big.bin", 1)
    assert big in (old, old[:-100], tree_after("change")["workspace/moved-big.bin"])
    assert found["workspace/a.txt"] in [pattern("workspace/a.txt", version) for version in (1, 2)]


def _disk_errors() -> list[object]:
    """Each point with both errors; who must act on a failed fsync of a file is told in the log."""
    suspect = pytest.mark.expects_log("takes no more writes|nothing more is accepted")
    return [
        pytest.param(
            point,
            number,
            marks=suspect if number == errno.EIO and point.startswith(FSYNC_POINTS) else (),
        )
        for point in sorted(PASSED)
        for number in (errno.EIO, errno.ENOSPC)
    ]


@pytest.mark.parametrize(("point", "number"), _disk_errors())
async def test_an_error_of_the_disk_is_told_and_the_next_try_finishes(
    store: Path, tmp_path: Path, point: str, number: int
) -> None:
    disk = FaultyDisk()
    state = tmp_path / "state"
    async with opened(store, state, disk=disk) as desk:
        a = await desk.write("workspace/a.txt", pattern("workspace/a.txt", 1))
        big = await desk.write("workspace/big.bin", pattern("workspace/big.bin", 1))
        disk.errors[point] = number
        failures = []
        for call in (
            lambda: desk.volume.fsync(a.ino, data_only=False),
            lambda: desk.volume.fsync(big.ino, data_only=True),
            desk.agent.sync,
        ):
            try:
                await call()
            except HpkfsError as error:
                failures.append(error)
        assert failures, f"{point} was passed, and nobody was told of its failure"
        expected = QuotaError if number == errno.ENOSPC else (IntegrityError, HpkfsError)
        assert all(isinstance(error, expected) for error in failures)
        assert all(error.happened and error.kept and error.next_step for error in failures)
        disk.errors.clear()
        if (point, number) == ("journal.wal.fsync", errno.EIO):
            with pytest.raises(JournalError):  # only a new mount trusts that disk again
                await desk.agent.sync()
        else:
            await desk.agent.sync()
            assert desk.agent.outcome()["state"] == "clean"
    async with opened(store, state) as desk:
        await desk.agent.sync()
    written = {name: pattern(name, 1) for name in ("workspace/a.txt", "workspace/big.bin")}
    assert await ours(store, state) == written
    assert await ours(store, tmp_path / "second") == written


async def test_regression_a_kill_while_the_settings_are_merged_does_not_block_the_next_start(
    store: Path, tmp_path: Path
) -> None:
    code, steps = await trio.to_thread.run_sync(
        live_and_die, store, tmp_path / "state", "backing.file.fsync", 1
    )
    assert (code, steps) == (-signal.SIGKILL, [])
    async with opened(store, tmp_path / "state") as desk:
        assert await desk.read("config.yaml")
        assert not desk.exists(".config.yaml.hpkfs.tmp")


@pytest.mark.expects_log("takes no more writes")
async def test_a_file_whose_fsync_failed_takes_no_more_writes(tmp_path: Path) -> None:
    make_store(str(tmp_path / "store"), seed=3, files=5)
    disk = FaultyDisk()
    async with opened(tmp_path / "store", tmp_path / "state", disk=disk) as desk:
        made = await desk.write("workspace/f", b"kept")
        disk.errors["backing.data.fsync"] = errno.EIO
        with pytest.raises(IntegrityError):
            await desk.volume.fsync(made.ino, data_only=True)
        disk.errors.clear()
        with pytest.raises(IntegrityError):
            await desk.volume.fsync(made.ino, data_only=True)
        with pytest.raises(IntegrityError):
            await desk.volume.write(made.ino, 4, b"more")
        assert await desk.read("workspace/f") == b"kept"
