"""A disk that is full at exactly the wrong moment, then a kill: what was acknowledged is there.

The journal refuses one chosen change, as SQLite does when the disk is full, and takes the next
one; the daemon's state is copied as a kill would leave it.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import contents, opened
from support.stores import make_store

from hpkfs.core.limits import PIECE_SIZE
from hpkfs.errors import QuotaError
from hpkfs.volume import Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from support.agents import Desk

OLD = b"old bytes " * 150_000
NAME = "workspace/file.bin"


@pytest.fixture
async def elsewhere(tmp_path: Path) -> Path:
    """A store with one file of two chunks, which a new machine does not have yet."""
    store = tmp_path / "store"
    make_store(str(store), seed=2, files=2, checkpoints=1, big_files=0)
    async with opened(store, tmp_path / "first") as desk:
        await desk.write(NAME, OLD)
        await desk.agent.sync()
    return store


@contextlib.asynccontextmanager
async def then_killed(store: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """An agent whose state, as it is at the end of the block, is copied to `killed`."""
    async with opened(store, tmp_path / "state") as desk:
        yield desk
        shutil.copytree(tmp_path / "state", tmp_path / "killed")


def refuse_once(desk: Desk, name: str, which: Callable[..., bool]) -> list[object]:
    """Let one call of a journal's method fail as on a full disk; returns what was refused."""
    refused: list[object] = []
    journal = desk.agent.journal
    real = getattr(journal, name)

    def call(*args: Any, **more: Any) -> Any:
        if not refused and which(*args, **more):
            refused.append((args, more))
            raise QuotaError("The disk is full.", kept="All of it.", next_step="Free space.")
        return real(*args, **more)

    setattr(journal, name, call)
    return refused


async def after(store: Path, tmp_path: Path) -> bytes:
    async with opened(store, tmp_path / "killed") as desk:
        assert desk.agent.unclean
        assert desk.agent.journal.check() == []
        return (await contents(desk))[NAME]


async def test_regression_what_is_written_into_an_emptied_file_is_not_emptied_again(
    elsewhere: Path, tmp_path: Path
) -> None:
    async with then_killed(elsewhere, tmp_path) as desk:
        ino = desk.volume.resolve(NAME).ino
        refused = refuse_once(
            desk, "set_meta", lambda key, value: key.startswith("emptied:") and not value
        )
        with contextlib.suppress(QuotaError):
            await desk.volume.setattr(ino, Change(size=0))
        assert refused
        await desk.volume.write(ino, 0, b"acknowledged")
    assert await after(elsewhere, tmp_path) == b"acknowledged"


async def test_regression_an_overwritten_chunk_is_not_fetched_over_what_was_acknowledged(
    elsewhere: Path, tmp_path: Path
) -> None:
    new = b"n" * PIECE_SIZE
    async with then_killed(elsewhere, tmp_path) as desk:
        ino = desk.volume.resolve(NAME).ino
        refused = refuse_once(desk, "update", lambda _ino, **columns: columns.keys() == {"states"})
        await desk.volume.write(ino, 0, new)
        assert refused
        assert (await desk.read(NAME)) == new + OLD[PIECE_SIZE:]
    assert await after(elsewhere, tmp_path) == new + OLD[PIECE_SIZE:]


async def test_regression_a_truncate_that_the_journal_refuses_in_part_tells_the_true_size(
    elsewhere: Path, tmp_path: Path
) -> None:
    async with then_killed(elsewhere, tmp_path) as desk:
        ino = desk.volume.resolve(NAME).ino
        refused = refuse_once(desk, "update", lambda _ino, **columns: columns.keys() == {"states"})
        with contextlib.suppress(QuotaError):
            await desk.volume.setattr(ino, Change(size=1_000))
        assert refused
        size = desk.volume.get(ino).size
        assert await desk.read(NAME) == OLD[:size]
    assert await after(elsewhere, tmp_path) == OLD[:size]
