"""What hpkfs relies on in the Pubky module, against a real homeserver."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import hpkfs_native
import pytest

if TYPE_CHECKING:
    from support.homeserver import Testnet, User

pytestmark = pytest.mark.pubky
FOLDER = "/priv/hermes.pubky.app/v2/agents/default/"
CAPABILITY = f"{FOLDER}:rw"
LIMIT = 10_000_000
WAIT_S = 60


@pytest.fixture
def client() -> hpkfs_native.Client:
    return hpkfs_native.Client(network="testnet", request_timeout_s=30, read_timeout_s=20)


@pytest.fixture
def user(testnet: Testnet) -> User:
    return testnet.new_user()


@pytest.fixture
def session(client: hpkfs_native.Client, user: User) -> hpkfs_native.Session:
    return client.restore(user.agent_grant()).wait(WAIT_S)


def error_of(call: hpkfs_native.Call[Any]) -> tuple[str, int | None]:
    with pytest.raises(hpkfs_native.NativeError) as failed:
        call.wait(WAIT_S)
    return failed.value.kind, failed.value.status


# -- grants ---------------------------------------------------------------------------------


def ask(client: hpkfs_native.Client, testnet: Testnet) -> hpkfs_native.Login:
    login = client.start_login(CAPABILITY, client_id="hermes.pubky.app", relay=testnet.relay)
    return login.wait(WAIT_S)


def test_a_grant_is_asked_for_exported_and_restored(
    client: hpkfs_native.Client, testnet: Testnet, user: User
) -> None:
    login = ask(client, testnet)
    assert "relay=http%3A%2F%2F127.0.0.1%3A15412" in login.url
    approval = login.approval()
    user.approve(login.url)
    session = approval.wait(WAIT_S)
    assert (session.owner, session.capabilities) == (user.owner, [CAPABILITY])
    session.put(f"{FOLDER}head.json", b"x").wait(WAIT_S)
    again = client.restore(session.export_grant()).wait(WAIT_S)
    assert again.get(f"{FOLDER}head.json", limit=LIMIT).wait(WAIT_S) == b"x"
    assert session.export_grant() not in repr(session) + repr(again) + repr(login)


def test_a_narrowed_approval_is_told_as_it_is(
    client: hpkfs_native.Client, testnet: Testnet, user: User
) -> None:
    login = ask(client, testnet)
    approval = login.approval()
    user.approve(login.url, f"{FOLDER}:r")
    assert approval.wait(WAIT_S).capabilities == [f"{FOLDER}:r"]


def test_a_wait_for_an_approval_can_be_given_up(
    client: hpkfs_native.Client, testnet: Testnet
) -> None:
    approval = ask(client, testnet).approval()
    with pytest.raises(TimeoutError):
        approval.wait(0.2)
    approval.cancel()
    assert error_of(approval) == ("cancelled", None)


@pytest.mark.parametrize("grant", ["", "x", "pubky-grant-credential-v1:a:b:c", "\0", "ä" * 1_000])
def test_what_is_no_grant_is_refused(client: hpkfs_native.Client, grant: str) -> None:
    assert error_of(client.restore(grant))[0] in {"auth", "invalid"}


def test_a_signed_out_grant_cannot_be_restored(
    client: hpkfs_native.Client, session: hpkfs_native.Session
) -> None:
    grant = session.export_grant()
    session.sign_out().wait(WAIT_S)
    assert error_of(client.restore(grant))[0] in {"auth", "http"}


# -- storage --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "ä/ö", "文件", "100%", "q?x=1", "#", "a+b", "'\"", "~"])
def test_a_name_is_what_it_is(name: str, session: hpkfs_native.Session) -> None:
    session.put(FOLDER + name, name.encode()).wait(WAIT_S)
    assert session.get(FOLDER + name, limit=LIMIT).wait(WAIT_S) == name.encode()
    assert [entry.path for entry in session.list(FOLDER).wait(WAIT_S)] == [FOLDER + name]
    session.delete(FOLDER + name).wait(WAIT_S)
    assert error_of(session.get(FOLDER + name, limit=LIMIT)) == ("http", 404)


def test_a_folder_is_listed_in_pages(session: hpkfs_native.Session) -> None:
    names = [f"{FOLDER}{number:03}" for number in range(7)]
    for call in [session.put(name, b"") for name in names]:
        call.wait(WAIT_S)
    found: list[str] = []
    cursor = None
    while page := session.list(FOLDER, limit=3, cursor=cursor).wait(WAIT_S):
        found += [entry.path for entry in page]
        cursor = page[-1].cursor
    assert found == names
    assert error_of(session.list(f"{FOLDER}none/")) == ("http", 404)


def test_much_is_streamed_both_ways(session: hpkfs_native.Session) -> None:
    data = os.urandom(9_000_000)
    upload = session.upload(f"{FOLDER}big")
    for start in range(0, len(data), 1_000_000):
        upload.write(data[start : start + 1_000_000]).wait(WAIT_S)
    upload.finish().wait(WAIT_S)
    download = session.open(f"{FOLDER}big").wait(WAIT_S)
    assert download.size == len(data)
    pieces = []
    while piece := download.read().wait(WAIT_S):
        pieces.append(piece)
    assert b"".join(pieces) == data
    assert session.stats(f"{FOLDER}big").wait(WAIT_S).size == len(data)
    assert error_of(session.get(f"{FOLDER}big", limit=1_000))[0] == "too-long"


def test_what_is_outside_the_grant_is_refused_without_a_request(
    testnet: Testnet, session: hpkfs_native.Session
) -> None:
    with testnet.proxy() as proxy:
        for path in (
            "/priv/hermes.pubky.app/v2/agents/other/head.json",
            "/priv/hermes.pubky.app/v2/agents/default",
            f"{FOLDER}../other/head.json",
            "/pub/x",
            "relative",
            "",
        ):
            assert error_of(session.put(path, b""))[0] in {"scope", "invalid"}, path
            assert error_of(session.delete(path))[0] in {"scope", "invalid"}, path
        assert proxy.count() == 0


def test_a_reader_of_what_is_public_needs_no_grant(
    client: hpkfs_native.Client, user: User, session: hpkfs_native.Session
) -> None:
    session.put(f"{FOLDER}head.json", b"x").wait(WAIT_S)
    public = client.public(user.owner)
    assert error_of(public.get(f"{FOLDER}head.json", limit=LIMIT)) == ("scope", None)
    assert error_of(public.get("/pub/none", limit=LIMIT)) == ("http", 404)


# -- locks and events -------------------------------------------------------------------------


def test_a_lock_keeps_all_others_out(
    client: hpkfs_native.Client, user: User, session: hpkfs_native.Session
) -> None:
    path = f"{FOLDER}head.json"
    other = client.restore(user.agent_grant()).wait(WAIT_S)
    lock = session.lock(path, seconds=20).wait(WAIT_S)
    assert (lock.path, lock.seconds) == (path, 20)
    assert error_of(other.lock(path)) == ("http", 423)
    assert error_of(other.put(path, b"theirs")) == ("http", 423)
    session.put_locked(lock, b"ours").wait(WAIT_S)
    session.refresh_lock(lock, seconds=30).wait(WAIT_S)
    session.unlock(lock).wait(WAIT_S)
    assert error_of(session.put_locked(lock, b"late")) == ("http", 412)
    assert error_of(session.unlock(lock)) == ("http", 409)
    other.put(path, b"theirs").wait(WAIT_S)


def test_events_go_on_behind_their_cursor(session: hpkfs_native.Session) -> None:
    for number in range(3):
        session.put(f"{FOLDER}{number}", b"").wait(WAIT_S)
    stream = session.events([FOLDER], live=False).wait(WAIT_S)
    seen = []
    while (event := stream.next().wait(WAIT_S)) is not None:
        seen.append(event)
    assert [(one.type, one.path) for one in seen] == [("put", f"{FOLDER}{n}") for n in range(3)]
    session.delete(f"{FOLDER}1").wait(WAIT_S)
    behind = session.events([FOLDER], cursor=seen[-1].cursor, live=True).wait(WAIT_S)
    event = behind.next().wait(WAIT_S)
    assert event is not None
    assert (event.type, event.path) == ("delete", f"{FOLDER}1")
    behind.close()


# -- calls ------------------------------------------------------------------------------------


def test_a_callback_is_called_once_also_when_it_comes_late(session: hpkfs_native.Session) -> None:
    called: list[int] = []
    done = threading.Event()
    call = session.put(f"{FOLDER}x", b"")
    call.on_done(done.set)
    assert done.wait(WAIT_S)
    call.on_done(lambda: called.append(1))
    assert called == [1]
    assert call.done
    call.cancel()  # too late: nothing changes
    assert call.result() is None


def test_a_thousand_reads_share_a_few_threads(session: hpkfs_native.Session) -> None:
    session.put(f"{FOLDER}x", b"small").wait(WAIT_S)
    calls = [session.get(f"{FOLDER}x", limit=LIMIT) for _ in range(1_000)]
    highest = len(os.listdir("/proc/self/task"))
    assert {call.wait(WAIT_S) for call in calls} == {b"small"}
    assert highest < 64


def test_a_cancelled_read_is_aborted(testnet: Testnet, session: hpkfs_native.Session) -> None:
    session.put(f"{FOLDER}x", b"small").wait(WAIT_S)
    with testnet.proxy() as proxy:
        proxy.fault("hang", method="GET", path="/x")
        call = session.get(f"{FOLDER}x", limit=LIMIT)
        with pytest.raises(TimeoutError):
            call.wait(0.3)
        with pytest.raises(RuntimeError):
            call.result()
        call.cancel()
        assert error_of(call) == ("cancelled", None)


@pytest.mark.parametrize(
    "settings",
    [
        {"network": "other", "request_timeout_s": 1, "read_timeout_s": 1},
        {"network": "testnet", "request_timeout_s": 0, "read_timeout_s": 1},
        {"network": "testnet", "request_timeout_s": 1, "read_timeout_s": -1},
        {"network": "testnet", "request_timeout_s": float("nan"), "read_timeout_s": 1},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, hpkfs_native.NativeError)):
        hpkfs_native.Client(**settings)
