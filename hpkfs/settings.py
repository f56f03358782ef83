"""What a user set once for all agents: `$XDG_CONFIG_HOME/hpkfs/config.yaml`.

    relay: https://relay.example.com/inbox/

A variable of the environment goes before the file, an option of the command before both.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from hpkfs import places
from hpkfs.errors import UsageError

RELAY_VARIABLE: Final = "HPKFS_RELAY"
TESTNET_RELAY: Final = "http://localhost:15412/inbox/"
KEYS: Final = frozenset({"relay"})
BYTES_MAX: Final = 64 * 1024
# Without encryption only on this machine: the address of a request for a grant goes through it.
_RELAY: Final = re.compile(
    r"(?:https://[^\s/?#@]+|http://(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?)"
    r"(?:/[^\s?#]*)?"
)


def config_file() -> str:
    """Return the path of the configuration; it may not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(home, "hpkfs", "config.yaml")


def relay(named: str | None) -> str | None:
    """Return the HTTP relay through which a login is approved; None for the SDK's own.

    Args:
        named: the one that the command names.

    Raises:
        UsageError: it is no address of a relay, or the configuration cannot be read.
    """
    found: object = named
    where = "--relay"
    if found is None:
        found, where = os.environ.get(RELAY_VARIABLE) or None, f"${RELAY_VARIABLE}"
    if found is None:
        found, where = _configured().get("relay"), config_file()
    if found is None:
        return TESTNET_RELAY if places.network() == "testnet" else None
    if not isinstance(found, str) or not _RELAY.fullmatch(found):
        raise UsageError(
            f"{found!r} in {where} is no address of a relay.",
            kept="Nothing was changed.",
            next_step="Give https://HOST/inbox/, or http:// on this machine.",
        )
    return found if found.endswith("/") else found + "/"


def _configured() -> dict[str, Any]:
    """The configuration; empty without one."""
    path = config_file()
    try:
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error.strerror}") from error
    import yaml  # here, since every command imports this module and few have a configuration

    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError) as error:
        raise _bad(path, "it is no YAML") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _bad(path, "it is no mapping of settings")
    unknown = sorted(str(key) for key in found.keys() - KEYS)
    if unknown:
        raise _bad(path, f"there is no setting {unknown[0]!r}")
    return found


def _bad(path: str, why: str) -> UsageError:
    return UsageError(
        f"The configuration {path} is refused: {why}.",
        kept="Nothing was changed.",
        next_step=f"Mend it. The settings are: {', '.join(sorted(KEYS))}.",
    )
