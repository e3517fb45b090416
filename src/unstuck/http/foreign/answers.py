"""What foreign workers are told: the shapes, for the API's description."""

from typing import Any, Literal

from pydantic import BaseModel


class Cancel(BaseModel):
    job_id: int
    token: int


class Death(BaseModel):
    """Why the worker that asks is not the one it was."""

    id: str
    state: str
    at: str | None
    detector: str | None
    evidence: str | None
    detail: str


class Orders(BaseModel):
    id: str
    name: str
    state: str
    next_heartbeat_in: float
    drain: bool
    """Finish what runs, claim nothing, then shut down."""
    stop: bool
    """The same, soon."""
    disabled: bool
    """An operator switched it off: claims give nothing."""
    cancel: list[Cancel]


class HeartbeatAnswer(Orders):
    success: Literal[True]
    message: str
    declared_dead: Death | None
    """Set in the first answer to a new incarnation: nothing that the old one held is its own any more."""


class Superseded(BaseModel):
    job_id: int
    token: int
    detail: str
    job: dict[str, Any] | None
    worker: dict[str, Any] | None


class BeatAnswerBody(Orders):
    lost: list[Superseded]
    """Of the jobs that it named: those that are no longer its own. It must stop working on them."""
    unknown: list[Cancel]
    """Jobs that it holds and did not name: a claim with `have` hands them out again."""


class Registered(Orders):
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    queues: list[str]
    tasks: list[str]


class JournalEntry(BaseModel):
    seq: int
    kind: Literal["step", "sleep", "wait", "signal", "timeout", "checkpoint"]
    name: str
    value: Any
    age_s: float
    """Since it was written."""


class KeptSignal(BaseModel):
    number: int
    name: str
    value: Any


class ClaimedJob(BaseModel):
    job_id: int
    token: int
    task: str
    queue: str
    state: Literal["claimed", "running"]
    attempt: int
    failures: int
    crashes: int
    payload: Any
    payload_type: str
    payload_base64: str | None
    on_crash: str
    timeout_s: float | None
    heartbeat_timeout_s: float
    journal: list[JournalEntry]
    """What earlier tries wrote down, in order: what is in it must not be done again."""
    signals: list[KeptSignal]
    """Sent to it, and not taken yet."""
    again: bool
    """It was handed out before, and the answer was lost."""


class ClaimAnswer(Orders):
    jobs: list[ClaimedJob]


class ItemResult(BaseModel):
    job_id: int
    token: int
    ok: bool
    status: str
    """What it is now, `already` where an earlier call did it, or why it was not done."""
    detail: str = ""
    job: dict[str, Any] | None = None
    worker: dict[str, Any] | None = None


class Results(BaseModel):
    id: str
    results: list[ItemResult]


class TurnTaken(ClaimAnswer):
    results: list[ItemResult]
    """How each job was settled, in the order in which they came."""


class Gone(BaseModel):
    id: str
    state: str
    released: int
    left_running: int
