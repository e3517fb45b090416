"""The address that is sent with a request to a worker, and comes back with its reply.

It names the job, the attempt and the worker, which are public or can be guessed. So it also has the key of the worker:
128 random bits that only this worker receives. The ledger keeps a digest of the key in the row of the worker, as its
owner. A reply through another connection, or to another broker, counts only with the key.
"""

import hashlib
import secrets
from dataclasses import dataclass

from unstuck.domain.frames import FRAMES
from unstuck.ledger.contract.workers import Claimed

MAX_DIGITS = 18
"""Maximum number of digits of an integer that every database stores."""
MAX_WORKER_ID_CHARS = 20
KEY_CHARS = 32
LEAST_INSTANCE_BYTES, MOST_INSTANCE_BYTES = 16, 200
NOT_FRAMED = "j"
"""Follows the id of a job that was enqueued through another interface. Its result must be JSON."""


@dataclass(frozen=True)
class Address:
    job_id: int
    token: int
    worker_id: str
    framed: bool
    """The job was enqueued as frames, and its result must be frames too."""
    key: str = ""
    """Empty in addresses of brokers that had no keys."""


def address_of(job: Claimed, worker_id: str, key: str, service: str) -> bytes:
    """Return the address of a job that is assigned to a worker."""
    kind = "" if job.payload_type == FRAMES else NOT_FRAMED
    proof = f"-{key}" if key else ""
    return f"{job.job_id}{kind}.{job.token}{proof}.{worker_id}.{service}".encode("ascii")


def read_address(address: bytes) -> Address | None:
    """Read an address that a worker sends back; None if it is not one of a broker of Unstuck."""
    parts = address.split(b".", 3)
    if len(parts) != 4:
        return None
    job_id, (token, dash, key), worker_id = parts[0], parts[1].partition(b"-"), parts[2]
    framed = not job_id.endswith(NOT_FRAMED.encode())
    job_id = job_id.removesuffix(NOT_FRAMED.encode())
    if not (job_id.isdigit() and token.isdigit() and worker_id.isalnum()):
        return None
    if max(len(job_id), len(token)) > MAX_DIGITS or len(worker_id) > MAX_WORKER_ID_CHARS:
        return None
    if dash and not (len(key) == KEY_CHARS and key.isalnum()):
        return None
    return Address(int(job_id), int(token), worker_id.decode("ascii"), framed, key.decode("ascii"))


def new_key() -> str:
    return secrets.token_hex(KEY_CHARS // 2)


def key_of(instance: object) -> str | None:
    """Return the key of a worker from the random `instance` that it sends with each READY; None if it sends none."""
    if isinstance(instance, str):
        instance = instance.encode("utf-8", "surrogatepass")
    if not isinstance(instance, bytes) or not LEAST_INSTANCE_BYTES <= len(instance) <= MOST_INSTANCE_BYTES:
        return None
    return hashlib.sha256(b"key:" + instance).hexdigest()[:KEY_CHARS]


def owner_of(key: str) -> str | None:
    """Return the digest of a key for the ledger. It may be public, since the key cannot be computed from it."""
    return f"mdp-{hashlib.sha256(b'owner:' + key.encode('ascii')).hexdigest()[:KEY_CHARS]}" if key else None
