"""A homeserver on this machine: against its SDK one request after the other, and the other program.

Both sides of a row talk to the same homeserver, through the same proxy where 50 ms are added to
each request. What is stored for one user is read by both.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import hpkfs_native
import trio
from bench.bench_seal import changed_chunks, say
from bench.lib import NEVER_SEAL, Table, clock, rounds, work_folder
from support.big_store import big_store, cached_store
from support.homeserver import testnet
from support.machines import Machine
from support.peer_cli import Peer
from support.venvs import peer_on_hermes_python

from hpkfs.agent import Agent, AgentOptions
from hpkfs.core.documents import parse_snapshot
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.core.paths import DATABASE
from hpkfs.core.uris import agent as agent_store
from hpkfs.transport.pubky import PubkyTransport

if TYPE_CHECKING:
    from pathlib import Path

    from support.homeserver import Testnet, User

DELAY_S = 0.05
ROUNDS = 3
DOCUMENTS = 1_500
OBJECTS = 500
OBJECT_BYTES = 16_384
GETS = 1_000
LIMIT = 2 << 20
WAIT_S = 600.0
UPLOADS = 16
FOLDER = "/priv/hermes.pubky.app/v2/agents/default/"
READY_BYTES_MAX = 3e6
CANCEL_S = 0.05


def main() -> None:
    table = Table("A homeserver on this machine")
    peer_on_hermes_python()  # installed before anything is timed
    with work_folder() as root, testnet(root) as network:
        os.environ.update(network.environment)
        user = network.new_user()
        upload(session_of(user), big_store())
        hydrate(table, network, user, root)
        mount_ready(table, network, user, root)
        one_message(table, network, user, root)
        publish(table, network, root)
        fetch_all(table, network, root)
        many_reads(table, network)
    table.show()


def session_of(user: User) -> hpkfs_native.Session:
    client = hpkfs_native.Client(
        network="testnet", request_timeout_s=WAIT_S, read_timeout_s=60, idle_connections_max=UPLOADS
    )
    return client.restore(user.agent_grant()).wait(60)


def upload(session: hpkfs_native.Session, store: Path) -> None:
    """Put a store on the homeserver."""
    files = [path for path in store.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(UPLOADS) as pool:
        list(
            pool.map(
                lambda path: session.put(
                    FOLDER + str(path.relative_to(store)), path.read_bytes()
                ).wait(WAIT_S),
                files,
            )
        )


class Machines:
    """New machines of one user, one after the other."""

    def __init__(self, user: User, root: Path) -> None:
        self.user = user
        self._root = root
        self._count = 0

    def new(self) -> Machine:
        self._count += 1
        return Machine(self.user, self._root, name=f"m{self._count}").logged_in()


def hydrate(table: Table, network: Testnet, user: User, root: Path) -> None:
    """The conversation database of 211 MB."""
    machines = Machines(user, root / "hydrate")
    (root / "hydrate").mkdir()
    store = big_store()
    document = max((store / "snapshots").iterdir()).read_bytes()
    names = [piece.object for piece in parse_snapshot(document).files[DATABASE].pieces]
    session = session_of(user)

    def ours() -> float:
        machine = machines.new()
        machine.mount("--lazy", NEVER_SEAL)
        try:
            return clock(
                lambda: machine.run("fetch", str(machine.path), "state.db", timeout_s=WAIT_S)
            )
        finally:
            machine.clean()

    def one_by_one() -> None:
        for name in names:
            session.get(FOLDER + name, limit=LIMIT).wait(WAIT_S)

    times = rounds(ROUNDS, {"ours": ours, "other": one_by_one})
    table.ratio(
        "hydration of 211 MB, against the objects one by one with the SDK",
        must=1 / 1.7, ours=times["ours"], other=times["other"],
    )  # fmt: skip
    with network.proxy() as proxy:
        proxy.delay_s = DELAY_S
        times = rounds(ROUNDS, {"ours": ours, "other": one_by_one})
    table.ratio(
        "the same, 50 ms added to each request",
        must=1 / 5, ours=times["ours"], other=times["other"],
    )  # fmt: skip


def mount_ready(table: Table, network: Testnet, user: User, root: Path) -> None:
    """1,800 files and 211 MB on an empty cache, against what the other program needs."""
    place = root / "ready"
    place.mkdir()
    machines = Machines(user, place)
    down: list[float] = []
    with network.proxy() as proxy:

        def ours() -> float:
            machine = machines.new()
            before = sum(one.down for one in proxy.requests())
            spent = clock(lambda: machine.mount("--lazy", NEVER_SEAL))
            down.append(sum(one.down for one in proxy.requests()) - before)
            machine.clean()
            return spent

        def other() -> float:
            peer = Peer(place / f"peer-{time.monotonic_ns()}", user.agent_grant())
            return clock(lambda: must(peer.run("agent", "attach", user.uri())))

        times = rounds(ROUNDS, {"ours": ours, "other": other})
        what = (
            "mount of 1,800 files and 211 MB, ready, against `agent attach` of hermes-pubky 0.2.1"
        )
        table.ratio(what, must=1 / 10, ours=times["ours"], other=times["other"])
        table.value(
            "bytes down before it is ready", must=READY_BYTES_MAX / 1e6, got=max(down) / 1e6,
            unit="MB", detail="the background begins meanwhile",
        )  # fmt: skip
        proxy.delay_s = DELAY_S
        times = rounds(1, {"ours": ours, "other": other})
        table.ratio(
            "the same, 50 ms added to each request",
            must=1 / 15, ours=times["ours"], other=times["other"],
        )  # fmt: skip


def must(done: object) -> None:
    code = getattr(done, "returncode", 1)
    if code:
        raise RuntimeError(f"the other program failed with {code}: {done}")


def one_message(table: Table, network: Testnet, user: User, root: Path) -> None:
    """What goes up after one message more in the large database."""
    place = root / "message"
    place.mkdir()
    machine = Machines(user, place).new()
    ratios = []
    machine.mount("--lazy", NEVER_SEAL)
    try:
        with network.proxy() as proxy:
            for number in range(ROUNDS + 1):
                before = (machine.path / "state.db").read_bytes()
                say(machine, number)
                after = (machine.path / "state.db").read_bytes()
                sent = sum(one.up for one in proxy.requests("PUT"))
                machine.run("sync", str(machine.path), timeout_s=WAIT_S)
                sent = sum(one.up for one in proxy.requests("PUT")) - sent
                if number:  # the first seal on a machine compares with the store's database
                    ratios.append(sent / (changed_chunks(before, after) * PIECE_SIZE))
    finally:
        machine.clean()
    table.value(
        "bytes up after one message, against the chunks that changed", must=1.3, got=max(ratios),
        unit="x", detail="the worst round",
    )  # fmt: skip


def publish(table: Table, network: Testnet, root: Path) -> None:
    """500 new objects, against the same PUTs one by one."""
    user = network.new_user()
    session = session_of(user)
    made = 0

    def ours() -> float:
        nonlocal made
        made += 1
        return trio.run(publish_new, user, root / f"publish-{made}", made)

    def one_by_one() -> float:
        data = [os.urandom(OBJECT_BYTES) for _ in range(OBJECTS)]
        return clock(
            lambda: [
                session.put(f"{FOLDER}objects/{os.urandom(32).hex()}.bin", one).wait(WAIT_S)
                for one in data
            ]
        )

    times = rounds(ROUNDS, {"ours": ours, "other": one_by_one})
    what = "publish of 500 new objects, against the same PUTs one by one"
    table.ratio(what, must=1 / 1.2, ours=times["ours"], other=times["other"])
    with network.proxy() as proxy:
        proxy.delay_s = DELAY_S
        times = rounds(ROUNDS, {"ours": ours, "other": one_by_one})
    table.ratio(
        "the same, 50 ms added to each request",
        must=1 / 5, ours=times["ours"], other=times["other"],
    )  # fmt: skip


async def publish_new(user: User, state: Path, number: int) -> float:
    """Seal 500 new files of an agent of their own, and time the sending."""
    from support.agents import Desk

    grant = user.agent_grant(f"publish-{number}")
    store = agent_store(user.owner, f"publish-{number}")
    transport = PubkyTransport(store, network="testnet", grant=lambda: grant)
    agent = Agent(AgentOptions(str(store), str(state), f"{number:032x}"), transport)
    try:
        agent.set_owner(f"publish-{number}")
        desk = Desk(agent)
        await desk.write("SOUL.md", b"x")
        await agent.sync(pull=False)
        for count in range(OBJECTS):
            await desk.write(f"workspace/{count}.bin", os.urandom(OBJECT_BYTES))
        await agent.sync(pull=False, publish=False)
        started = time.perf_counter()
        await agent.sync(pull=False)
        return time.perf_counter() - started
    finally:
        await agent.close()


def fetch_all(table: Table, network: Testnet, root: Path) -> None:
    """1,500 small documents, against the other program's way."""
    place = root / "fetch"
    place.mkdir()
    user = network.new_user()
    upload(session_of(user), cached_store(DOCUMENTS, sessions=3, database_bytes=1 << 20))
    machine = Machines(user, place).new()
    machine.mount("--lazy", NEVER_SEAL)
    try:
        ours = clock(lambda: machine.run("fetch", str(machine.path), "--all", timeout_s=WAIT_S))
    finally:
        machine.clean()
    peer = Peer(place / "peer", user.agent_grant())
    must(peer.run("agent", "attach", user.uri()))
    other = clock(lambda: must(peer.run("agent", "files", "default", "fetch", "--all")))
    table.ratio(
        "1,500 small documents, against `agent files fetch --all` of hermes-pubky 0.2.1",
        must=1 / 20, ours=[ours], other=[other],
    )  # fmt: skip


def many_reads(table: Table, network: Testnet) -> None:
    """1,000 small reads at once through the module: threads, and how fast a cancelled one ends."""
    session = session_of(network.new_user())
    session.put(f"{FOLDER}small", b"x" * 100).wait(WAIT_S)
    before = threads()
    calls = [session.get(f"{FOLDER}small", limit=LIMIT) for _ in range(GETS)]
    highest = 0
    while not all(one.done for one in calls):
        highest = max(highest, threads())
        time.sleep(0.01)
    assert all(one.result() for one in calls)
    table.value(
        "threads that 1,000 small reads at once add", must=8, got=highest - before, unit="",
        detail=f"{before} before",
    )  # fmt: skip
    spent = []
    with network.proxy() as proxy:
        fault = proxy.fault("hang", method="GET", path="small")
        for _ in range(20):
            call = session.get(f"{FOLDER}small", limit=LIMIT)
            time.sleep(0.05)
            ended = threading.Event()
            call.on_done(ended.set)
            started = time.perf_counter()
            call.cancel()
            ended.wait(10)
            spent.append(time.perf_counter() - started)
        fault.times = 0
    table.value(
        "until a cancelled read has returned", must=CANCEL_S * 1e3,
        got=statistics.median(spent) * 1e3, unit="ms", detail=f"slowest {max(spent) * 1e3:.1f} ms",
    )  # fmt: skip


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
