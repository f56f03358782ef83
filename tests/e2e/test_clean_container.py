"""A fresh clone in a clean system: `./dev` is all that a newcomer needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import container

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.docker, pytest.mark.net, pytest.mark.slow, pytest.mark.fuse]
CLONE = "/srv/hpkfs"
SETUP_TIMEOUT_S = 900


@pytest.fixture(scope="module")
def clean() -> Iterator[container.Container]:
    if reason := container.missing():
        pytest.skip(reason)
    with container.clean_container() as running:
        container.clone_into(running, CLONE)
        running.run("./dev", "setup", cwd=CLONE, timeout_s=SETUP_TIMEOUT_S)
        yield running


def test_a_second_setup_finds_nothing_to_do(clean: container.Container) -> None:
    assert clean.run("./dev", "setup", cwd=CLONE) == ""


def test_setup_brings_all_that_the_program_imports(clean: container.Container) -> None:
    clean.run(".venv/bin/python", "-c", "import pyfuse3, trio, hpkfs.errors", cwd=CLONE)


def test_the_example_agent_is_mounted_written_and_unmounted(clean: container.Container) -> None:
    home = f"{CLONE}/.demo/home"
    clean.run("./dev", "run", cwd=CLONE)
    assert "fuse.hpkfs" in clean.run("findmnt", "--noheadings", home)
    clean.write(f"{home}/SOUL.md", "I was written in a container.\n")
    assert "mounted already" in clean.run("./dev", "run", cwd=CLONE)
    clean.run("./dev", "stop", cwd=CLONE)
    assert home not in clean.run("cat", "/proc/self/mounts")
    clean.run("./dev", "run", cwd=CLONE)
    assert clean.run("cat", f"{home}/SOUL.md") == "I was written in a container.\n"
    clean.run("./dev", "stop", cwd=CLONE)
    left = clean.run("find", "/root", "-name", "*hermes*", "-o", "-name", "*hpkfs*")
    assert left == "", "the example stays out of the user's home"
