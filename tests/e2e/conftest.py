"""What the end-to-end tests share: the real programs, a model that answers from a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import hermes, venvs
from support.fake_model import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = {"hermes": venvs.HERMES, "peer": venvs.PEER}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test of a program that is not installed yet need the package index too."""
    absent = [marker for marker, venv in PROGRAMS.items() if not venvs.is_made(venv)]
    for item in items:
        if any(item.get_closest_marker(marker) for marker in absent):
            item.add_marker(pytest.mark.net)


@pytest.fixture
def model() -> Iterator[FakeModel]:
    """Provide a running model that knows `hermes.SCRIPT`."""
    with FakeModel(hermes.SCRIPT) as running:
        yield running


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> hermes.RealHome:
    """Provide a home made by real runs, once for all tests: copy it, do not change it."""
    return hermes.make_real_home(tmp_path_factory.mktemp("real"))
