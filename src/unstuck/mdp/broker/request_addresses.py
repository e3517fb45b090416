"""The address that goes with a request to a worker, and comes back with its reply.

It names the job, the attempt and the worker, which are shown to everyone or can be guessed. So it also has the key of
the worker: 128 random bits that only this worker hears. The ledger keeps a digest of the key in the row of the worker,
as its owner. A reply that comes by another connection, or to another broker, counts only with the key.
"""

import hashlib
import secrets
from dataclasses import dataclass

from unstuck.domain.frames import FRAMES
from unstuck.ledger.contract.workers import Claimed

MAX_DIGITS = 18
"""Of a number that every database takes."""
MAX_WORKER_ID_CHARS = 20
KEY_CHARS = 32
LEAST_INSTANCE_BYTES, MOST_INSTANCE_BYTES = 16, 200
OTHER = "j"
"""Behind the number of a job that came through another door: its result must be JSON."""


@dataclass(frozen=True)
class Address:
    job_id: int
    token: int
    worker_id: str
    framed: bool
    """The job came in frames, and so must its result."""
    key: str = ""
    """Empty in what a broker of before these keys gave out."""


def address_of(job: Claimed, worker_id: str, key: str, service: str) -> bytes:
    """Return the address of a job in a worker's hands."""
    kind = "" if job.payload_type == FRAMES else OTHER
    proof = f"-{key}" if key else ""
    return f"{job.job_id}{kind}.{job.token}{proof}.{worker_id}.{service}".encode("ascii")


def read_address(address: bytes) -> Address | None:
    """Read an address that a worker echoes; None for what is none of ours."""
    parts = address.split(b".", 3)
    if len(parts) != 4:
        return None
    job_id, (token, dash, key), worker_id = parts[0], parts[1].partition(b"-"), parts[2]
    framed = not job_id.endswith(OTHER.encode())
    job_id = job_id.removesuffix(OTHER.encode())
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
    """Return the key of a worker that says with READY which process it is: the same whenever it comes back."""
    if isinstance(instance, str):
        instance = instance.encode("utf-8", "surrogatepass")
    if not isinstance(instance, bytes) or not LEAST_INSTANCE_BYTES <= len(instance) <= MOST_INSTANCE_BYTES:
        return None
    return hashlib.sha256(b"key:" + instance).hexdigest()[:KEY_CHARS]


def owner_of(key: str) -> str | None:
    """Return what the ledger keeps of a key. It may be shown: the key cannot be found from it."""
    return f"mdp-{hashlib.sha256(b'owner:' + key.encode('ascii')).hexdigest()[:KEY_CHARS]}" if key else None
