"""Seals, evictions and fetches while writers go on: each checkpoint is one instant of the tree.

Every writer knows each state that its files have had. In every checkpoint on the store a file has
one of them, and two files that are always written one after the other are at most one step apart.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
from support.faults import contents, opened
from support.stores import make_store

from hpkfs.core.documents import parse_snapshot
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.volume import Change

if TYPE_CHECKING:
    from pathlib import Path

    from support.agents import Desk

STEPS = 25
SEALS = 8
BIG = "workspace/big.bin"
LINKED = ("workspace/linked-1.bin", "workspace/linked-2.bin")
FIRST, SECOND = "workspace/first.txt", "workspace/second.txt"
SAVED = "workspace/saved.md"


class Writers:
    """What writes, and every state that each file has had."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk = desk
        self.chance = random.Random(seed)
        self.states: dict[str, set[str]] = {}

    def note(self, path: str, data: bytes) -> None:
        self.states.setdefault(path, set()).add(hashlib.sha256(data).hexdigest())

    async def patch(self, paths: tuple[str, ...], size: int) -> None:
        """Overwrite, append and truncate one file, which may have more than one name."""
        model = bytearray(await self.desk.read(paths[0]))
        ino = self.desk.volume.resolve(paths[0]).ino
        for _ in range(STEPS):
            if self.chance.random() < 0.2:
                length = self.chance.randrange(size // 2, size)
                await self.desk.volume.setattr(ino, Change(size=length))
                model[length:] = bytes(max(0, length - len(model)))
            else:
                where = self.chance.randrange(len(model) + 1)
                data = self.chance.randbytes(self.chance.choice((10, 5_000, PIECE_SIZE + 3)))
                await self.desk.volume.write(ino, where, data)
                model[where : where + len(data)] = data
            for path in paths:
                self.note(path, bytes(model))
            await self.pause()
        assert await self.desk.read(paths[-1]) == model

    async def count(self) -> None:
        """Two files, always one after the other."""
        inos = [(await self.desk.write(path, b"0")).ino for path in (FIRST, SECOND)]
        for number in range(STEPS * 4):
            for ino in inos:
                await self.desk.volume.write(ino, 0, b"%d" % number)
                await self.pause()

    async def save(self) -> None:
        """As an editor saves: a new file, renamed over the old one."""
        for number in range(STEPS * 2):
            data = b"%d\n" % number * self.chance.randrange(1, 2_000)
            self.note(SAVED, data)
            await self.desk.write(SAVED + ".part", data)
            self.desk.rename(SAVED + ".part", SAVED)
            await self.pause()

    async def pause(self) -> None:
        for _ in range(self.chance.randrange(30)):
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(4))
async def test_every_checkpoint_is_one_instant_of_what_writers_do(
    tmp_path: Path, seed: int
) -> None:
    store = tmp_path / "store"
    make_store(str(store), seed=seed, files=3, checkpoints=1, big_files=0)
    before = set((store / "snapshots").iterdir())
    async with opened(store, tmp_path / "first") as desk:
        writers = Writers(desk, seed)
        await begin(writers)
        await desk.agent.sync()
    async with opened(store, tmp_path / "second") as desk:
        writers.desk = desk
        desk.volume.unlink(desk.folder("workspace"), LINKED[1].rpartition("/")[2].encode())
        linked = desk.volume.resolve(LINKED[0])
        desk.volume.link(linked.ino, desk.folder("workspace"), b"linked-2.bin")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_house, desk)
            async with trio.open_nursery() as work:
                work.start_soon(writers.patch, (BIG,), 3 * PIECE_SIZE)
                work.start_soon(writers.patch, LINKED, 2 * PIECE_SIZE)
                work.start_soon(writers.count)
                work.start_soon(writers.save)
            nursery.cancel_scope.cancel()
        await desk.agent.sync()
        assert desk.agent.outcome()["state"] == "clean"
        left = await contents(desk)
    async with opened(store, tmp_path / "third") as desk:
        assert await contents(desk) == left
    checkpoints = set((store / "snapshots").iterdir()) - before
    assert len(checkpoints) > 2, "nothing was sealed meanwhile"
    for path in checkpoints:
        check(store, path, writers)


async def begin(writers: Writers) -> None:
    for path, size in ((BIG, 3 * PIECE_SIZE), (LINKED[0], 400_000), (LINKED[1], 400_000)):
        data = random.Random(size).randbytes(size)
        await writers.desk.write(path, data)
        writers.note(path, data)


async def keep_house(desk: Desk) -> None:
    for number in range(SEALS * 100):
        await desk.agent.sync()
        if number % 3 == 1:
            await desk.agent.evict([])


def check(store: Path, document: Path, writers: Writers) -> None:
    files = parse_snapshot(document.read_bytes()).files
    data = {
        path: b"".join((store / piece.object).read_bytes() for piece in record.pieces)
        for path, record in files.items()
    }
    for path, states in writers.states.items():
        if path in files:
            digest = hashlib.sha256(data[path]).hexdigest()
            assert digest == files[path].sha256
            assert digest in states, f"{path} has a state in {document.name} that it never had"
    if SECOND in files:
        first, second = int(data[FIRST]), int(data[SECOND])
        assert first - 1 <= second <= first
    if files[LINKED[0]].sha256 != files[LINKED[1]].sha256:
        raise AssertionError("one file with two names has two contents in one checkpoint")
