"""What every measurement shares: rounds side by side, medians, one table, and on what machine.

A ratio is the median of the rounds' ratios: within one round each way is measured right after
the other, so what else the machine does hurts both. Where operations take microseconds, it
matters more on which core each side is woken: `pin` puts all of them on one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support.big_store import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.mounts import Mount

ROOT = Path(__file__).resolve().parents[2]
SLOWEST_S = 100.0
KB = 1024
NEVER_SEAL = "--seal-after=86400s"


@dataclass(slots=True)
class Row:
    """One line of the table. `must` and `got` are what is compared."""

    what: str
    must: float
    got: float
    unit: str
    detail: str

    @property
    def ok(self) -> bool:
        return self.got <= self.must


@dataclass(slots=True)
class Table:
    """The lines of one script; `show` prints them with machine and commit."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratio(self, what: str, *, must: float, ours: list[float], other: list[float]) -> None:
        """Add a ratio of times: the median of the rounds' ratios."""
        got = statistics.median(a / b for a, b in zip(ours, other, strict=True))
        self.rows.append(Row(what, must, got, "x", times(ours, other)))

    def more(self, what: str, *, must: float, ours: list[float], other: list[float]) -> None:
        """Add a difference of times in seconds: the median of the rounds' differences."""
        got = statistics.median(a - b for a, b in zip(ours, other, strict=True))
        self.rows.append(Row(what, must, got, "s more", times(ours, other)))

    def value(self, what: str, *, must: float, got: float, unit: str, detail: str = "") -> None:
        """Add a number that stands for itself."""
        self.rows.append(Row(what, must, got, unit, detail))

    def note(self, text: str) -> None:
        """Add a number that is not judged."""
        self.notes.append(text)

    def show(self) -> None:
        print(f"\n## {self.title}\n\n{machine()}\n{commit()}\n")
        print("| What | must be | measured | | ours and the other |\n|---|---|---|---|---|")
        for row in self.rows:
            verdict = "ok" if row.ok else "**misses**"
            must = f"≤ {row.must:g} {row.unit}"
            print(f"| {row.what} | {must} | {row.got:.2f} {row.unit} | {verdict} | {row.detail} |")
        for text in self.notes:
            print(f"- {text}")
        sys.stdout.flush()


def rounds(count: int, ways: dict[str, Callable[[], float | None]]) -> dict[str, list[float]]:
    """Measure each way once a round; a way that measures itself returns its seconds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            started = time.perf_counter()
            told = way()
            spent = time.perf_counter() - started if told is None else told
            found[name].append(spent)
    return found


def clock(what: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def call(*command: str, timeout_s: float = SLOWEST_S) -> str:
    """Run a program that must succeed; its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """An empty folder on the disk of the cached stores."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="work-", dir=cache))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def cleaned(mount: Mount) -> Iterator[Mount]:
    """A mount that is gone afterwards."""
    try:
        yield mount
    finally:
        mount.clean()


@contextlib.contextmanager
def bindfs(source: Path, target: Path) -> Iterator[Path]:
    """The reference: a pass-through file system in C."""
    target.mkdir(exist_ok=True)
    call("bindfs", str(source), str(target))
    try:
        yield target
    finally:
        call("fusermount3", "-uz", str(target))


def wait_hydrated(mount: Mount) -> None:
    """Return when nothing is absent any more."""
    deadline = time.monotonic() + SLOWEST_S
    while mount.status()["files"]["absent"]:
        if time.monotonic() > deadline:
            raise RuntimeError("the background hydration does not end")
        time.sleep(0.2)


def pin() -> None:
    """Stay on one core with all that is started from here."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def drop_names() -> bool:
    """Make the kernel forget names and attributes; False where that is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2\n")
    except OSError:
        return False
    return True


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process now and at its highest."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(rest.split()[0]) / KB
    return found["VmRSS"], found["VmHWM"]


def machine() -> str:
    """Processor, cores, kernel, file system of the cache, Python."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    disk = call("stat", "--file-system", "--format=%T", str(cache_folder())).strip()
    load = os.getloadavg()[0]
    return (
        f"Machine: {model}, {os.cpu_count()} cores, Linux {platform.release()}, {disk}, "
        f"Python {platform.python_version()}; load {load:.1f}"
    )


def commit() -> str:
    """The commit, and whether something is changed since."""
    name = call("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    changed = call("git", "-C", str(ROOT), "status", "--porcelain", "--", "hpkfs").strip()
    return f"Commit: {name}{' and uncommitted changes' if changed else ''}"


def times(ours: list[float], other: list[float]) -> str:
    """Both medians, and the fastest round of each: how much of it is other work of the machine."""
    medians = f"{show_s(statistics.median(ours))} and {show_s(statistics.median(other))}"
    return f"{medians}; fastest {show_s(min(ours))} and {show_s(min(other))}"


def show_s(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
