"""Waiting for the kernel: quick while requests come, and never at the cost of anyone else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from hpkfs import waiting
from hpkfs.waiting import KernelWait, ReaderLock

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSES_MAX = 1_000_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.fixture
def readable(pipe: tuple[int, int]) -> int:
    os.write(pipe[1], b"x")
    return pipe[0]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, the time to stay is not over."""
    monkeypatch.setattr(waiting, "STAY_S_MAX", 3_600.0)


@pytest.mark.usefixtures("patient")
async def test_a_request_that_is_there_is_taken_without_a_pass_of_the_loop(readable: int) -> None:
    wait = KernelWait(lambda: False).lowlevel
    await wait.wait_readable(readable)
    ran = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_set, ran)
        await wait.wait_readable(readable)
        await wait.wait_readable(readable)
        assert not ran.is_set()


@pytest.mark.usefixtures("patient")
async def test_the_loop_goes_on_while_a_handler_waits_for_something(readable: int) -> None:
    busy = False
    wait = KernelWait(lambda: busy).lowlevel
    await wait.wait_readable(readable)
    busy = True
    ran = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_set, ran)
        await wait.wait_readable(readable)
        await wait.wait_readable(readable)  # trio shuffles the tasks of a pass, not the passes
        assert ran.is_set()


async def test_others_run_even_if_requests_never_stop(readable: int) -> None:
    wait = KernelWait(lambda: False).lowlevel
    await wait.wait_readable(readable)
    ran = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_set, ran)
        for _ in range(PASSES_MAX):
            await wait.wait_readable(readable)
            if ran.is_set():
                break
    assert ran.is_set()


async def test_a_request_that_comes_late_is_waited_for_through_trio(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    wait = KernelWait(lambda: False).lowlevel
    os.write(writing, b"x")
    await wait.wait_readable(reading)
    os.read(reading, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_write, writing)
        await wait.wait_readable(reading)
    assert os.read(reading, 1) == b"y"


async def test_who_waits_is_told_that_the_kernel_is_let_go(pipe: tuple[int, int]) -> None:
    wait = KernelWait(lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close, wait, pipe[0])
        with pytest.raises(trio.ClosedResourceError):
            await wait.lowlevel.wait_readable(pipe[0])


async def test_one_reader_at_a_time_and_none_is_forgotten() -> None:
    lock = ReaderLock()
    inside = most = served = 0

    async def reader() -> None:
        nonlocal inside, most, served
        for _ in range(20):
            async with lock:
                inside += 1
                most = max(most, inside)
                await trio.lowlevel.checkpoint()
                inside -= 1
            served += 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reader)
    assert (most, served) == (1, 100)


async def test_a_reader_that_is_free_again_need_not_change_the_task() -> None:
    lock = ReaderLock()
    order: list[str] = []

    async def other() -> None:
        async with lock:
            order.append("other")

    async with trio.open_nursery() as nursery:
        async with lock:
            nursery.start_soon(other)
            await trio.testing.wait_all_tasks_blocked()
        async with lock:
            order.append("again")
    assert order == ["again", "other"]


async def _set(event: trio.Event) -> None:
    event.set()


async def _write(fd: int) -> None:
    os.write(fd, b"y")


async def _close(wait: KernelWait, fd: int) -> None:
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.notify_closing(fd)
