"""API keys: who may call, and which tenant a caller is."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from server.settings import Settings

log = logging.getLogger("onerow")

OPERATOR = ""  # the tenant of the unnamed key, and of everyone where there are no keys
SHORTEST = 16  # characters of a key in a file
LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:\s*:\s*|\s+)(?P<key>\S+)")


class KeyFileError(Exception):
    """A key file that cannot be used: one line with the place and the reason, without the key."""


class Keys:
    """The unnamed key of the settings, and the named ones of the key file.

    Only digests are kept: all of one length, so that comparing them takes the same time whatever
    was sent.
    """

    def __init__(self, settings: Settings) -> None:
        single = settings.api_key and settings.api_key.get_secret_value()
        self.file = settings.api_key_file
        self._single = {_digest(single.encode()): OPERATOR} if single else {}
        self._tenants = self._read()

    def tenant(self, authorization: bytes) -> str | None:
        """The tenant that a header speaks for; None if it holds no key of ours."""
        if not self._tenants:
            return OPERATOR
        scheme, _, key = authorization.partition(b" ")
        sent, found = _digest(key.strip()), None
        for known, tenant in self._tenants.items():  # all of them, wherever it is
            if hmac.compare_digest(known, sent):
                found = tenant
        return found if scheme.lower() == b"bearer" else None

    def reload(self) -> None:
        """Read the file again. If it is broken, the keys stay as they are."""
        try:
            self._tenants = self._read()
        except KeyFileError as error:
            log.error("the API keys stay as they are: %s", error)
        else:
            log.info("%d API keys", len(self._tenants))

    def _read(self) -> dict[bytes, str]:
        if self.file is None:
            return self._single
        return self._single | read_keys(self.file, taken=self._single)


def read_keys(file: Path, taken: dict[bytes, str]) -> dict[bytes, str]:
    """The tenants of a key file by the digest of their key: a line `name: key` or `name key` for
    each; empty lines and those that begin with # say nothing.
    """
    try:
        lines = file.read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise KeyFileError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{file}: it is not text in UTF-8") from error
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        where = f"{file}:{number}"
        parts = LINE.fullmatch(line)
        if parts is None:
            raise KeyFileError(f"{where}: a line is `name: key`; names are letters, digits, . _ -")
        name, key = parts["name"], parts["key"]
        if len(key) < SHORTEST:
            raise KeyFileError(f"{where}: the key of {name} is shorter than {SHORTEST} characters")
        digest = _digest(key.encode())
        if name in tenants.values():
            raise KeyFileError(f"{where}: there is a key of {name} already")
        if digest in taken | tenants:
            raise KeyFileError(f"{where}: the key of {name} is another one's, too")
        tenants[digest] = name
    if not tenants:
        raise KeyFileError(f"{file}: there is no key in it")
    return tenants


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
