"""Which top-level names are worth a word."""

from __future__ import annotations

import pytest

from hpkfs.core.known import is_known


@pytest.mark.parametrize("name", ["SOUL.md", "logs", ".env", "kanban.db-wal", "x.lock", "temp_1"])
def test_what_hermes_makes_is_known(name: str) -> None:
    assert is_known(name)


@pytest.mark.parametrize("name", ["brain.db", "LOGS", "new-feature", ""])
def test_other_names_are_not(name: str) -> None:
    assert not is_known(name)
