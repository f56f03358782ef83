from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from hpkfs import places
from hpkfs.core.ids import is_hex32
from hpkfs.core.uris import FileStore, PubkyAgent, agent, template
from hpkfs.errors import BusyError, FormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

OWNER = "y" * 52
HOLD_THE_LOCK = """
import sys
from hpkfs.places import RunLock
RunLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(places.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.delenv(places.TESTNET_VARIABLE, raising=False)
    return tmp_path / "home"


def test_state_directory_of_a_file_store_is_the_digest_of_its_address(home: Path) -> None:
    store = FileStore("/srv/a b")
    digest = sha256(b"file:///srv/a%20b").hexdigest()
    assert places.state_dir(store) == str(home / "stores" / digest)


def test_two_spellings_of_a_store_have_one_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    spellings = [f"file://{tmp_path}/real", f"{tmp_path}/link/", "link", "./real/../real"]
    found = {places.state_dir(places.resolve_uri(text)[0]) for text in spellings}
    assert len(found) == 1


def test_state_directories_of_pubky_stores_are_where_the_peer_has_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = home / "networks"
    assert places.state_dir(agent(OWNER, "ada")) == str(below / f"mainnet/{OWNER}/agents/ada")
    assert places.state_dir(template(OWNER, "t")) == str(below / f"mainnet/{OWNER}/templates/t")
    monkeypatch.setenv(places.TESTNET_VARIABLE, "1")
    assert places.state_dir(agent(OWNER, "ada")) == str(below / f"testnet/{OWNER}/agents/ada")


def test_without_the_variable_the_home_is_below_the_users_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(places.HOME_VARIABLE)
    monkeypatch.setenv("HOME", "/nowhere")
    assert places.home() == "/nowhere/.hermes-pubky"


def test_the_checkpoint_comes_from_the_address_or_from_the_option(tmp_path: Path) -> None:
    wanted = "0123456789abcdef" * 2
    assert places.resolve_uri(f"{tmp_path}@{wanted}")[1] == wanted
    assert places.resolve_uri(str(tmp_path), at="2026-11-30T00:00:00Z")[1] == "2026-11-30T00:00:00Z"
    assert places.resolve_uri(str(tmp_path))[1] is None
    with pytest.raises(UsageError, match="--at names"):
        places.resolve_uri(f"{tmp_path}@{wanted}", at="ffffff")


def test_known_state_directories_are_those_that_hold_something_of_ours(home: Path) -> None:
    file_state = places.state_dir(FileStore("/srv/a"))
    places.note_store(file_state, "file:///srv/a")
    (home / "stores" / "foreign").mkdir()
    pubky = agent(OWNER, "ada")
    assert isinstance(pubky, PubkyAgent)
    places.note_store(places.state_dir(pubky), str(pubky))
    known = places.known_state_dirs()
    assert {places.noted_store(path) for path in known} == {"file:///srv/a", str(pubky)}


def test_no_state_directory_is_known_where_there_is_no_home() -> None:
    assert places.known_state_dirs() == []


def test_made_folders_are_private(tmp_path: Path) -> None:
    places.make_private(str(tmp_path / "a" / "b"))
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# -- the device id


def test_the_device_id_is_made_once_and_private(home: Path) -> None:
    state = places.state_dir(FileStore("/srv/a"))
    first = places.device_id(state)
    assert is_hex32(first)
    assert places.device_id(places.state_dir(FileStore("/srv/b"))) == first
    file = home / "device.json"
    assert json.loads(file.read_bytes()) == {"deviceId": first}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(home) == ["device.json"], "nothing temporary is left"


def test_a_named_state_directory_is_a_machine_of_its_own(tmp_path: Path) -> None:
    usual = places.device_id(places.state_dir(FileStore("/srv/a")))
    named = places.device_id(str(tmp_path / "second"))
    assert named != usual
    assert (tmp_path / "second" / "device.json").exists()


def test_the_device_id_of_the_peer_is_used(home: Path) -> None:
    home.mkdir()
    (home / "device.json").write_text('{"deviceId": "00112233445566778899aabbccddeeff"}')
    state = places.state_dir(FileStore("/srv/a"))
    assert places.device_id(state) == "00112233445566778899aabbccddeeff"


def test_an_empty_device_file_is_made_anew(home: Path) -> None:
    home.mkdir()
    (home / "device.json").touch()
    made = places.device_id(places.state_dir(FileStore("/srv/a")))
    assert places.device_id(places.state_dir(FileStore("/srv/a"))) == made


@pytest.mark.parametrize("text", ["[]", "{}", '{"deviceId": 3}', '{"deviceId": "ABC"}', "garbage"])
def test_a_device_file_of_another_shape_is_refused_and_kept(home: Path, text: str) -> None:
    home.mkdir()
    (home / "device.json").write_text(text)
    with pytest.raises(FormatError, match=r"device\.json"):
        places.device_id(places.state_dir(FileStore("/srv/a")))
    assert (home / "device.json").read_text() == text


# -- sockets


def test_the_runtime_folder_is_the_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "x"
    session.mkdir()
    monkeypatch.setattr(places, "RUNTIME_BYTES_MAX", 1_000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert places.runtime_dir() == str(session / "hpkfs")
    assert stat.S_IMODE((session / "hpkfs").stat().st_mode) == 0o700


@pytest.mark.parametrize("session", ["", "/nonexistent-folder", "/tmp/" + "x" * 100])
def test_without_a_usable_session_the_runtime_folder_is_in_tmp(
    session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    assert places.runtime_dir() == f"/tmp/hpkfs-{os.getuid()}"


def test_a_runtime_folder_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "RUNTIME_BYTES_MAX", 1_000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "hpkfs").symlink_to("/tmp")
    with pytest.raises(UsageError, match="not a folder of yours"):
        places.runtime_dir()


def test_a_read_only_mount_has_a_socket_of_its_own(tmp_path: Path) -> None:
    state = str(tmp_path)
    paths = {places.socket_path(state), places.socket_path(state, mountpoint="/mnt/a")}
    assert len(paths) == 2
    digest = sha256(str(tmp_path).encode()).hexdigest()[:16]
    assert places.socket_path(state).endswith(f"/{digest}.sock")
    assert all(len(path) <= 107 for path in paths)


def test_a_registered_mount_is_found_until_it_is_taken_out(tmp_path: Path) -> None:
    path = places.socket_path(str(tmp_path))
    try:
        places.register(path, {"uri": "file:///x", "pid": 1})
        assert (path, {"uri": "file:///x", "pid": 1}) in places.registered()
        assert stat.S_IMODE(os.stat(places.record_path(path)).st_mode) == 0o600
    finally:
        places.unregister(path)
    assert path not in dict(places.registered())
    places.unregister(path)  # a second time is no failure


# -- the lock


def test_the_lock_names_its_holder_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LOCK_ATTEMPTS", 2)
    state = tmp_path / "state"
    with subprocess.Popen(
        (sys.executable, "-c", HOLD_THE_LOCK, str(state)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid}"):
            places.RunLock(str(state)).acquire()
        holder.kill()
    with places.RunLock(str(state)):
        pid, held_since = (state / "run.lock").read_text().splitlines()
        assert int(pid) == os.getpid()
        assert held_since.endswith("Z")
    assert (state / "run.lock").exists()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_a_lock_that_is_let_go_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with places.RunLock(str(tmp_path)):
            pass
