"""What every test gets: skips that say what is missing, and checks for leaks and warnings."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support.homeserver
import support.unprivileged

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

OURS = ("hpkfs", "hermes_launcher")
DOCKER_TIMEOUT_S = 20
INDEX_TIMEOUT_S = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take hours too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes hours; run with --long"))
        for marker, missing in MISSING.items():
            if item.get_closest_marker(marker) and (reason := missing()):
                item.add_marker(pytest.mark.skip(reason=reason))


# What is missing for a marker, as a phrase; empty when nothing is. Asked once, and only
# when a test with that marker was collected.


@cache
def missing_fuse() -> str:
    if not Path("/dev/fuse").exists():
        return "/dev/fuse is missing"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be opened by this user"
    if not shutil.which("fusermount3"):
        return "fusermount3 is missing"
    return ""


@cache
def missing_docker() -> str:
    if not shutil.which("docker"):
        return "docker is missing"
    if not _succeeds("docker", "info", timeout_s=DOCKER_TIMEOUT_S):
        return "the Docker engine does not answer"
    return ""


@cache
def missing_network() -> str:
    ask = (sys.executable, "-m", "pip", "index", "versions", "--retries", "0", "pip")
    if not _succeeds(*ask, timeout_s=INDEX_TIMEOUT_S):
        return "no package index can be reached"
    return ""


@cache
def missing_homeserver() -> str:
    return support.homeserver.missing()


MISSING: dict[str, Callable[[], str]] = {
    "fuse": missing_fuse,
    "pubky": missing_homeserver,
    "docker": missing_docker,
    "net": missing_network,
}


def _succeeds(*command: str, timeout_s: float) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@pytest.fixture(scope="session", autouse=True)
def _no_mount_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail when a mount below the temporary folder outlives the tests; detach it."""
    base = tmp_path_factory.getbasetemp()
    yield
    left = mounts_below(base)
    for path in reversed(left):
        subprocess.run(("umount", "--lazy", path), capture_output=True, timeout=20, check=False)
    assert not left, f"still mounted after the tests: {', '.join(left)}"


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points below `folder`, outer ones first."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [
        re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split()[4]) for line in lines
    ]
    return [os.fsdecode(p) for p in points if p.startswith(os.fsencode(folder) + b"/")]


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[support.homeserver.Testnet]:
    """Provide a Pubky network for all tests; see tests/support/homeserver.py."""
    with support.homeserver.testnet(tmp_path_factory.mktemp("network")) as running:
        yield running


@pytest.fixture
def testnet(
    network: support.homeserver.Testnet, monkeypatch: pytest.MonkeyPatch
) -> support.homeserver.Testnet:
    """Provide the network with its homeserver running, and make it the one that addresses mean."""
    if not network.homeserver.runs:
        network.homeserver.start()
    for name, value in network.environment.items():
        monkeypatch.setenv(name, value)
    return network


@pytest.fixture(scope="session")
def shared_venv() -> Iterator[Path]:
    """Provide a venv with hpkfs that every user of the machine can read."""
    if reason := support.unprivileged.missing():
        pytest.skip(reason)
    with support.unprivileged.shared_venv() as venv:
        yield venv


@pytest.fixture
def unprivileged(shared_venv: Path) -> Iterator[support.unprivileged.Unprivileged]:
    """Provide an ordinary user who may mount; see tests/support/unprivileged.py."""
    with support.unprivileged.unprivileged(shared_venv) as user:
        yield user


class _Collector(logging.Handler):
    """Keeps what our loggers say at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@contextlib.contextmanager
def only_expected_warnings(patterns: tuple[str, ...]) -> Iterator[None]:
    """Raise when our loggers warn of something that no pattern names, or a pattern stays silent."""
    collector = _Collector()
    for name in OURS:
        logging.getLogger(name).addHandler(collector)
    try:
        yield
    finally:
        for name in OURS:
            logging.getLogger(name).removeHandler(collector)
    lines = collector.lines
    unexpected = [line for line in lines if not any(re.search(p, line) for p in patterns)]
    assert not unexpected, "unexpected in the log:\n" + "\n".join(unexpected)
    silent = [p for p in patterns if not any(re.search(p, line) for line in lines)]
    assert not silent, "expected in the log, and not there: " + ", ".join(silent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    marked = item.iter_markers("expects_log")
    with only_expected_warnings(tuple(str(marker.args[0]) for marker in marked)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    with only_expected_warnings(()):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    with only_expected_warnings(()):
        return (yield)
