"""Who may come in over ZeroMQ: this machine alone, or those whose CURVE keys are known."""

import ipaddress
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from unstuck.config import MdpSettings
from unstuck.errors import ConfigError

PUBLIC, SECRET = ".key", ".key_secret"
KEY_CHARS = 40


def check_place(settings: MdpSettings) -> None:
    """Refuse to listen beyond this machine without CURVE, unless that is what was asked for."""
    curve = bool(settings.curve_secret_file)
    if curve and not settings.curve_clients_dir:
        raise ConfigError("CURVE needs the keys of those who may come in: set mdp curve_clients_dir.")
    if curve or settings.insecure or is_local(settings.bind):
        return
    raise ConfigError(
        f"Everybody who reaches {settings.bind} could call and serve. Make keys with `unstuck keygen` and set mdp "
        "curve_secret_file and curve_clients_dir, listen on tcp://127.0.0.1:…, or say --insecure."
    )


def is_local(bind: str) -> bool:
    parts = urlsplit(bind)
    if parts.scheme == "ipc":
        return True
    host = (parts.hostname or "").strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


@contextmanager
def secured(
    context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", settings: MdpSettings
) -> Iterator[None]:
    """Set the broker's keys and keep the list of those who may come in; call it before `bind`."""
    if not settings.curve_secret_file:
        yield
        return
    public, secret = read_keys(Path(settings.curve_secret_file))
    clients = Path(settings.curve_clients_dir)
    if not clients.is_dir():
        raise ConfigError(f"mdp curve_clients_dir {str(clients)!r} is no directory.")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        authenticator.configure_curve(domain="*", location=str(clients))
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_PUBLICKEY, public)
        router.set(zmq.CURVE_SECRETKEY, secret)
        yield
    finally:
        authenticator.stop()


def write_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys: NAME.key to give away, NAME.key_secret to keep. Neither is ever written over."""
    public, secret = zmq.curve_keypair()
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / f"{name}{PUBLIC}", directory / f"{name}{SECRET}"
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists already. Choose another name, or remove it if nobody uses it.")
    _write(paths[0], f'curve\n    public-key = "{public.decode()}"\n', 0o644)
    _write(paths[1], f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n', 0o600)
    return paths


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"# CURVE key of ZeroMQ, made by `unstuck keygen`.\nmetadata\n{text}")


def read_keys(path: Path) -> tuple[bytes, bytes]:
    """Give both keys of a secret file."""
    keys = _read(path)
    if "secret-key" not in keys or "public-key" not in keys:
        raise ConfigError(f"{path} holds no pair of keys. Make one with `unstuck keygen`.")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} can be read by others. Take that away: chmod 600 {path}")
    return keys["public-key"], keys["secret-key"]


def read_public_key(path: Path) -> bytes:
    keys = _read(path)
    if "public-key" not in keys:
        raise ConfigError(f"{path} holds no public key.")
    return keys["public-key"]


def _read(path: Path) -> dict[str, bytes]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The keys in {path} cannot be read: {error}") from None
    found = {}
    for line in lines:
        name, equals, value = line.partition("=")
        key = value.strip().strip('"').encode()
        if equals and name.strip() in ("public-key", "secret-key"):
            if len(key) != KEY_CHARS or not _is_key(key):
                raise ConfigError(f"{path}: {name.strip()} is no CURVE key.")
            found[name.strip()] = key
    return found


def _is_key(key: bytes) -> bool:
    try:
        return len(z85.decode(key)) == 32
    except (ValueError, KeyError):
        return False
