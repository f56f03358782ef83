"""Folders with thousands of names, listed while they are emptied, filled and renamed."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.mounts import Mount, mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.fuse

FILES = 5_000
DELETE_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    root = tmp_path_factory.mktemp("large")
    new = Mount(root / "store", root)
    new.run("init", new.store, "--state-dir", str(new.state))
    with mounted(new.store, root) as mount:
        yield mount


def fill(folder: Path, count: int) -> set[str]:
    """Make empty files; returns their names."""
    folder.mkdir(parents=True)
    names = {f"file-{number:05}-{'x' * (number % 60)}" for number in range(count)}
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for name in names:
        os.mknod(name, 0o600, dir_fd=fd)
    os.close(fd)
    return names


def run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=DELETE_TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def remove_with_rm(folder: Path) -> None:
    run("rm", "-r", folder)


def remove_with_find(folder: Path) -> None:
    run("find", folder, "-delete")


def remove_while_listing(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            os.unlink(entry.path)
    folder.rmdir()


@pytest.mark.parametrize(
    ("remove", "zone", "count"),
    [
        (remove_with_rm, "plugins", FILES),
        (remove_with_find, "plugins", FILES),
        (remove_while_listing, "plugins", FILES),
        (remove_while_listing, "workspace", FILES // 5),
    ],
)
def test_one_pass_empties_a_large_folder(
    mount: Mount, remove: Callable[[Path], None], zone: str, count: int
) -> None:
    folder = mount.path / zone / "large"
    names = fill(folder, count)
    listed = os.listdir(folder)
    assert len(listed) == count
    assert set(listed) == names
    remove(folder)
    assert not folder.exists()


def test_no_name_comes_twice_while_others_come_and_go(mount: Mount) -> None:
    folder = mount.path / "plugins" / "moving"
    names = fill(folder, 1_500)
    seen: list[str] = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 3 == 0:
                os.mknod(folder / f"new-{number}", 0o600)
            elif number % 3 == 1:
                os.unlink(entry.path)
            else:
                os.rename(entry.path, folder / f"renamed-{number}")
    assert len(seen) == len(set(seen))
    assert names <= set(seen)
    assert len(os.listdir(folder)) == 1_500 - 500 + 500


def test_two_listings_of_one_folder_do_not_disturb_each_other(mount: Mount) -> None:
    folder = mount.path / "plugins" / "twice"
    names = fill(folder, 1_500)
    with os.scandir(folder) as one, os.scandir(folder) as other:
        pairs = [(a.name, b.name) for a, b in zip(one, other, strict=True)]
    assert {a for a, _ in pairs} == {b for _, b in pairs} == names
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    assert set(os.listdir(fd)) == names
    os.mknod("later", 0o600, dir_fd=fd)
    os.lseek(fd, 0, os.SEEK_SET)  # rewinddir(3): what is there now
    assert set(os.listdir(fd)) == {*names, "later"}
    os.close(fd)


def test_a_large_tree_goes_with_its_links_and_folders(mount: Mount) -> None:
    folder = mount.path / "plugins" / "tree"
    for number in range(30):
        names = sorted(fill(folder / f"d{number}" / "deep", 20))
        (folder / f"d{number}" / "link").symlink_to(f"deep/{names[0]}")
        os.link(folder / f"d{number}" / "deep" / names[0], folder / f"hard{number}")
    run("rm", "-rf", folder)
    assert not folder.exists()
