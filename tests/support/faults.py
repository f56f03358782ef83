"""What goes wrong around an agent: disks that are full, read-only or gone, and killed processes.

The disks are mounts of their own (root only, so a test skips where it is not); the processes
drive an `Agent` without a kernel mount and die at a named point.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from support.agents import Desk

from hpkfs.agent import Agent, AgentOptions
from hpkfs.transport.local import LocalTransport
from hpkfs.volume import Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from hpkfs.durable import Disk

TESTS = Path(__file__).resolve().parents[1]
RUN_TIMEOUT_S = 60
SIZES = {"small": 3_000, "big": (1 << 20) + 4_321}


# -- agents -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(
    store: Path | str, state: Path | str, *, disk: Disk | None = None, offline: bool = False
) -> AsyncIterator[Desk]:
    """An agent without a mount; `disk` makes its durable calls and those of the store."""
    options = AgentOptions(
        uri=f"file://{store}",
        state_dir=str(state),
        device_id="0123456789abcdef" * 2,
        mountpoint="/mnt/agent",
        offline=offline,
    )
    agent = Agent(options, LocalTransport(str(store), disk=disk), disk=disk)
    try:
        await agent.prepare()
        yield Desk(agent)
    finally:
        await agent.close()


async def contents(desk: Desk) -> dict[str, bytes]:
    """Every regular file of the tree that is not made by the mount itself."""
    found: dict[str, bytes] = {}

    async def walk(ino: int, prefix: str) -> None:
        for name, inode in desk.volume.walk_folder(ino):
            path = prefix + os.fsdecode(name)
            if inode.is_folder:
                await walk(inode.ino, path + "/")
            elif inode.is_file and path != "config.yaml":
                found[path] = await desk.read(path)

    await walk(1, "")
    return found


# -- processes that die -----------------------------------------------------------------------

# Each step changes the tree, then says so. What a step leaves is in `TREES`, by step.
STEPS = ("write", "fsync", "datasync", "seal", "publish", "change", "seal2", "publish2", "close")


def pattern(name: str, version: int) -> bytes:
    """The bytes of a version of a file."""
    text = f"{name} {version}\n".encode()
    size = SIZES["big" if "big" in name else "small"]
    return (text * (size // len(text) + 1))[:size]


def tree_after(step: str) -> dict[str, bytes]:
    """What travels after a step of `life`."""
    if STEPS.index(step) < STEPS.index("change"):
        names = {"workspace/a.txt": 1, "workspace/big.bin": 1, "workspace/gone.txt": 1}
        return {name: pattern(name, version) for name, version in names.items()}
    return {
        "workspace/a.txt": pattern("workspace/a.txt", 2),
        "workspace/moved-big.bin": pattern("workspace/big.bin", 1)[:-100] + b"end" * 10,
    }


async def life(store: str, state: str, disk: Disk, acknowledge: int) -> None:
    """Live through `STEPS`; after each one its name is written to a descriptor."""

    def done(step: str) -> None:
        os.write(acknowledge, f"{step}\n".encode())

    async with opened(store, state, disk=disk) as desk:
        volume = desk.volume
        names = {name: (await desk.write(name, data)).ino for name, data in _first().items()}
        done("write")
        await volume.fsync(names["workspace/a.txt"], data_only=False)
        done("fsync")
        await volume.fsync(names["workspace/big.bin"], data_only=True)
        done("datasync")
        await desk.agent.sync(publish=False)
        done("seal")
        await desk.agent.sync()
        done("publish")
        await _change(desk)
        done("change")
        await desk.agent.sync(publish=False)
        done("seal2")
        await desk.agent.sync()
        done("publish2")
    done("close")


def _first() -> dict[str, bytes]:
    return tree_after("write")


async def _change(desk: Desk) -> None:
    big = desk.volume.resolve("workspace/big.bin").ino
    size = SIZES["big"]
    await desk.volume.setattr(big, Change(size=size - 100))
    await desk.volume.write(big, size - 100, b"end" * 10)
    desk.rename("workspace/big.bin", "workspace/moved-big.bin")
    desk.remove("workspace/gone.txt")
    # As an editor saves: beside it, synced, renamed over it.
    new = await desk.write("workspace/.a.txt.new", pattern("workspace/a.txt", 2))
    await desk.volume.fsync(new.ino, data_only=False)
    desk.rename("workspace/.a.txt.new", "workspace/a.txt")


def live_and_die(store: Path, state: Path, point: str, nth: int) -> tuple[int, list[str]]:
    """Run `life` in a process that is killed at a point.

    Returns:
        Its exit code, and the steps that it acknowledged.
    """
    reading, writing = os.pipe()
    arguments = json.dumps([str(store), str(state), point, nth, writing])
    try:
        done = subprocess.run(
            (sys.executable, "-m", "support.faults", arguments),
            cwd=TESTS,
            pass_fds=(writing,),
            stderr=subprocess.PIPE,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(writing)
    with open(reading, encoding="ascii") as pipe:
        steps = pipe.read().split()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.returncode, steps


def _main() -> None:
    from support.faulty_disk import KillingDisk

    store, state, point, nth, writing = json.loads(sys.argv[1])
    trio.run(life, store, state, KillingDisk(point, nth=nth), writing)


# -- disks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    """A tmpfs of a size, mounted on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={size_kib}k,mode=0700", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _call("umount", "--lazy", str(folder))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only for everyone, root included."""
    _call("mount", "--bind", str(folder), str(folder))
    try:
        _call("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        _call("umount", "--lazy", str(folder))


def fill(folder: Path) -> Path:
    """Take all the space that is left on a disk; deleting the file that is returned ends it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as out:
        for size in (1 << 20, 4_096, 1):
            with contextlib.suppress(OSError):
                while True:
                    out.write(bytes(size))
    return path


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


if __name__ == "__main__":
    _main()
