"""Which relay carries a login: option, environment, configuration, network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpkfs import settings
from hpkfs.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HPKFS_RELAY", raising=False)
    monkeypatch.delenv("HERMES_PUBKY_TESTNET", raising=False)
    return tmp_path / "hpkfs"


def configure(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(text)


def test_the_nearest_word_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.relay(None) is None
    monkeypatch.setenv("HERMES_PUBKY_TESTNET", "1")
    assert settings.relay(None) == "http://localhost:15412/inbox/"
    configure(folder, "relay: https://file.example/inbox\n")
    assert settings.relay(None) == "https://file.example/inbox/"
    monkeypatch.setenv("HPKFS_RELAY", "https://environment.example")
    assert settings.relay(None) == "https://environment.example/"
    assert settings.relay("http://127.0.0.1:1/in/") == "http://127.0.0.1:1/in/"


def test_an_empty_configuration_says_nothing(folder: Path) -> None:
    configure(folder, "# nothing\n")
    assert settings.relay(None) is None


@pytest.mark.parametrize(
    "text",
    ["", "relay", "http://example.com/", "https://", "https://a b/", "https://u@h/", "ftp://h/",
     "https://h/?q", "file:///x"],
)  # fmt: skip
def test_what_is_no_relay_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address of a relay"):
        settings.relay(text)


@pytest.mark.parametrize("text", ["[", "- a", "rely: x", "relay: 3", "a: !!python/name:os", "\0"])
def test_a_bad_configuration_is_refused(folder: Path, text: str) -> None:
    configure(folder, text)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        settings.relay(None)
