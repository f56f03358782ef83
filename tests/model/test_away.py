"""A store that is slow, away or forbidden: the mount starts, works, and goes on when it returns."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest
import trio
from support.agents import Desk
from support.stores import make_store

from hpkfs import agent as agent_module
from hpkfs.agent import Agent, AgentOptions
from hpkfs.errors import AuthorisationError
from hpkfs.transport.memory import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BUDGET_S = 0.2
WAIT_S = 20


class Store(MemoryTransport):
    """Counts how often connections were made anew."""

    reconnects = 0

    def reconnect(self) -> None:
        self.reconnects += 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    folder = tmp_path / "store"
    make_store(str(folder), seed=3, files=20, checkpoints=1, big_files=1)
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return Store(files)


@contextlib.asynccontextmanager
async def running(store: Store, state: Path) -> AsyncIterator[Desk]:
    """An agent with its long-lived tasks."""
    options = AgentOptions("file:///store", str(state), "ab" * 16, seal_after_s=0.05)
    agent = Agent(options, store)
    try:
        await agent.prepare()
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            yield Desk(agent)
            nursery.cancel_scope.cancel()
    finally:
        store.faults.hang = False
        await agent.close()


async def becomes(desk: Desk, *states: str) -> None:
    with trio.fail_after(WAIT_S):
        while desk.agent.state()[0] not in states:  # noqa: ASYNC110 - as a person looks
            await trio.sleep(0.02)


async def test_a_store_that_hangs_does_not_keep_a_known_agent_waiting(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, tmp_path / "state") as here:
        await here.agent.fetch([], progress=_ignore)
    monkeypatch.setattr(agent_module, "START_BUDGET_S", BUDGET_S)
    monkeypatch.setattr(agent_module, "RETRY_S_MIN", 0.05)
    store.faults.hang = True
    async with running(store, tmp_path / "state") as here:
        state, detail = here.agent.state()
        assert state == "offline"
        assert "did not answer within" in detail
        assert await here.read("SOUL.md")
        store.faults.hang = False
        await becomes(here, "clean")


async def test_an_agent_that_was_never_here_is_waited_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "START_BUDGET_S", BUDGET_S)
    store.faults.slow_s = 2 * BUDGET_S
    async with running(store, tmp_path / "state") as here:
        assert here.agent.state()[0] == "clean"


async def test_a_revoked_grant_is_a_state_and_a_login_heals_it(
    store: Store, tmp_path: Path
) -> None:
    async with running(store, tmp_path / "state") as here:
        store.faults.status = 401
        await here.write("workspace/x.txt", b"meanwhile")
        await becomes(here, "auth-required")
        assert here.agent.outcome()["exit_code"] == 4
        await here.write("workspace/y.txt", b"and later")
        await here.agent.log_in()
        assert here.agent.state()[0] == "auth-required"
        store.faults.status = 0
        await here.agent.log_in()
        await becomes(here, "clean")
        assert store.reconnects >= 2


async def test_a_mount_that_starts_without_a_login_works_and_is_healed(
    store: Store, tmp_path: Path
) -> None:
    async with running(store, tmp_path / "state") as here:
        await here.agent.fetch([], progress=_ignore)
    store.faults.status = 401
    async with running(store, tmp_path / "state") as here:
        assert here.agent.state()[0] == "auth-required"
        assert await here.read("SOUL.md")
        store.faults.status = 0
        await here.agent.log_in()
        await becomes(here, "clean")


async def test_after_a_sleep_of_the_machine_connections_are_made_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s = 0.0
    real = time.clock_gettime

    def clock(which: int) -> float:
        return real(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0)

    monkeypatch.setattr(time, "clock_gettime", clock)
    monkeypatch.setattr(agent_module, "MAINTENANCE_S", 0.02)
    async with running(store, tmp_path / "state") as here:
        await trio.sleep(0.2)
        assert store.reconnects == 0
        await here.write("workspace/x.txt", os.urandom(10))
        slept_s = 3 * 3_600.0
        with trio.fail_after(WAIT_S):
            while not store.reconnects:  # noqa: ASYNC110 - as above
                await trio.sleep(0.02)
        await becomes(here, "clean")
        assert store.reconnects == 1


async def test_what_cannot_be_fetched_is_told_once_and_the_rest_is_fetched(
    store: Store, tmp_path: Path
) -> None:
    options = AgentOptions("file:///store", str(tmp_path / "state"), "ab" * 16)
    agent = Agent(options, store)
    await agent.prepare()
    store.faults.status = 401
    with pytest.raises(AuthorisationError):
        await agent.fetch([], progress=_ignore)
    store.faults.status = 0
    await agent.fetch([], progress=_ignore)
    assert agent.status()["files"]["absent"] == 0  # type: ignore[index]  # JSON
    await agent.close()


async def _ignore(_told: dict[str, object]) -> None:
    pass
