"""What `durable.py` promises of each call, and what it says when a disk fails."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faulty_disk import FaultyDisk

from hpkfs.durable import ATOMIC_CALLS, ATOMIC_POINTS, NAMES, POINTS, RealDisk
from hpkfs.errors import IntegrityError, QuotaError

if TYPE_CHECKING:
    from pathlib import Path

HEAD_STEPS = [f"store.head.{call}" for call in ATOMIC_CALLS]
FOLDER_STEP = HEAD_STEPS[-1]


def test_an_atomic_write_passes_its_four_points_in_order(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.write_atomic(str(tmp_path / "file"), b"bytes", point="store.head")
    assert disk.passed == HEAD_STEPS
    assert os.listdir(tmp_path) == ["file"]


@given(old=st.binary(max_size=100) | st.none(), new=st.binary(max_size=100_000))
def test_an_atomic_write_replaces_whatever_was_there(
    tmp_path_factory: pytest.TempPathFactory, old: bytes | None, new: bytes
) -> None:
    path = tmp_path_factory.mktemp("atomic") / "file"
    if old is not None:
        path.write_bytes(old)
    RealDisk().write_atomic(str(path), new, point="store.head")
    assert path.read_bytes() == new


def test_an_atomic_write_gives_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    RealDisk().write_atomic(str(tmp_path / "private"), b"", point="store.head")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("point", HEAD_STEPS)
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, QuotaError),
        (errno.EDQUOT, QuotaError),
        (errno.EIO, IntegrityError),
        (errno.EROFS, OSError),
    ],
)
def test_a_failed_atomic_write_leaves_the_old_or_the_new_bytes_and_no_other_name(
    tmp_path: Path, point: str, number: int, error: type[Exception]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    disk = FaultyDisk({point: number})
    with pytest.raises(error) as caught:
        disk.write_atomic(str(path), b"new", point="store.head")
    cause = caught.value if isinstance(caught.value, OSError) else caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == number
    assert path.read_bytes() == (b"new" if point == FOLDER_STEP else b"old")
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_fsync_is_said_in_three_sentences(tmp_path: Path) -> None:
    disk = FaultyDisk({"backing.file.fsync": errno.EIO})
    with (tmp_path / "file").open("wb") as out, pytest.raises(IntegrityError) as caught:
        disk.fsync_file(out.fileno(), point="backing.file.fsync")
    assert all((caught.value.happened, caught.value.kept, caught.value.next_step))


def test_a_file_system_that_cannot_sync_folders_is_put_up_with(tmp_path: Path) -> None:
    disk = FaultyDisk({"backing.folder.fsync": errno.EINVAL})
    disk.fsync_folder(str(tmp_path), point="backing.folder.fsync")
    assert disk.passed == ["backing.folder.fsync"]


def test_a_rename_to_a_folder_that_is_missing_is_the_systems_own_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        RealDisk().rename(str(tmp_path / "a"), str(tmp_path / "no" / "b"), point="pending.rename")


def test_data_only_sync_passes_its_point(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with (tmp_path / "file").open("wb") as out:
        disk.fdatasync_file(out.fileno(), point="backing.data.fsync")
    assert disk.passed == ["backing.data.fsync"]


def test_a_point_that_nobody_named_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        RealDisk().fsync_folder(str(tmp_path), point="store.folder.fsnyc")
    with pytest.raises(AssertionError):
        RealDisk().write_atomic(str(tmp_path / "x"), b"", point="store.folder.fsync")
    assert os.listdir(tmp_path) == []


def test_the_names_are_the_points_with_the_steps_of_atomic_writes_spelled_out() -> None:
    assert ATOMIC_POINTS < POINTS
    assert len(NAMES) == len(POINTS) + len(ATOMIC_POINTS) * (len(ATOMIC_CALLS) - 1)
    assert {name.rpartition(".")[0] for name in NAMES - POINTS} == ATOMIC_POINTS
