"""Errors as problem+json: one table from error class to status, code and cure."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from unstuck.errors import (
    ConfigError,
    DuplicateJob,
    LedgerUnavailable,
    PayloadError,
    RefusedValue,
    SchemaAhead,
    SchemaMismatch,
    SignalRefused,
    UnknownName,
    UnstuckError,
    WrongArguments,
)
from unstuck.http.schemas import ResponseModel
from unstuck.logs import logger


class WrongPlace(ResponseModel):
    where: str
    what: str


class ProblemDetails(ResponseModel):
    """A problem by RFC 9457. Further members say more where there is more to say."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:unstuck:problem:not_found"])
    title: str
    status: int = Field(examples=[404])
    code: str = Field(description="For programs; stable.", examples=["not_found"])
    detail: str = Field(description="What happened, for people.")
    cure: str = Field(description="What to do about it.")
    errors: list[WrongPlace] = Field(default=[], description="Which parts of the request are wrong.")


MEDIA_TYPE = "application/problem+json"
MAX_DETAIL_CHARS = 2_000

log = logger("unstuck.http")


class Problem(Exception):
    """Raised by handlers; becomes the answer. `facts` are further members of the body."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        cure: str = "",
        headers: dict[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.cure = cure
        self.headers = headers or {}
        self.facts = facts

    def response(self) -> JSONResponse:
        body = {
            "type": f"urn:unstuck:problem:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status,
            "code": self.code,
            "detail": _text(self.detail[:MAX_DETAIL_CHARS]),
            "cure": self.cure or _cure_of(self.status),
            **self.facts,
        }
        return JSONResponse(body, self.status, self.headers, MEDIA_TYPE)


_CURES: dict[int, str] = {
    400: "Send it as HTTP/1.1 and /api/v1/openapi.json ask for it.",
    403: "Ask from the page itself, or with a token that may do this.",
    404: "Look it up: /api/v1/jobs, /workers, /queues and /tasks list what there is, /api/v1/openapi.json all paths.",
    405: "See /api/v1/openapi.json for what this path takes.",
    409: "Look at the state it is in now, and decide anew.",
    414: "Send what is long in the body.",
    422: "Put right the value that is named, and send it again.",
    431: "Send fewer and shorter headers.",
    500: "Look into the log of the server, and report it.",
    503: "Try again after the time in Retry-After.",
}
"""What to do where nobody could say it better."""


def _cure_of(status: int) -> str:
    return _CURES.get(status, "Send it again as /api/v1/openapi.json describes it.")


def _text(said: str) -> str:
    # What is quoted from a request may hold half a character.
    return said.encode("utf-8", "backslashreplace").decode("utf-8")


_STATUSES: list[tuple[type[UnstuckError], int, str, str]] = [
    (UnknownName, 404, "not_found", ""),
    (DuplicateJob, 409, "duplicate_job", "Use another unique_key, or on_duplicate `return` or `replace`."),
    (PayloadError, 422, "payload_refused", "Send JSON within the limits."),
    (WrongArguments, 422, "wrong_arguments", "Send arguments that fit the task's signature."),
    (RefusedValue, 422, "value_refused", "The database cannot store this value, for example a NUL character."),
    (SignalRefused, 409, "signal_refused", ""),
    (ConfigError, 422, "not_valid", ""),
    (SchemaAhead, 503, "schema_ahead", "Upgrade Unstuck on the server to the version that is named."),
    (SchemaMismatch, 503, "schema_mismatch", "Run `unstuck migrate`."),
    (LedgerUnavailable, 503, "ledger_unavailable", "Try again: the database is away, locked or full."),
]


def problem_of(error: UnstuckError) -> Problem:
    for kind, status, code, cure in _STATUSES:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status == 503 else {}
            facts = {"job_id": error.job_id} if isinstance(error, DuplicateJob) else {}
            return Problem(status, code, str(error), cure=cure, headers=headers, **facts)
    return Problem(500, "internal_error", str(error))


def explain_errors(app: FastAPI) -> None:
    """Have every error of this app answered as a problem."""

    @app.exception_handler(Problem)
    def _problem(request: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(UnstuckError)
    def _unstuck(request: Request, error: UnstuckError) -> JSONResponse:
        return problem_of(error).response()

    @app.exception_handler(RequestValidationError)
    def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = [
            {"where": _text(".".join(str(part) for part in item["loc"])), "what": _text(str(item["msg"]))}
            for item in error.errors()[:20]
        ]
        # A parameter that a dependency reads too is complained of twice.
        wrong = [item for at, item in enumerate(wrong) if item not in wrong[:at]]
        detail = "; ".join(f"{item['where']}: {item['what']}" for item in wrong[:3])
        cure = "See /api/v1/openapi.json for what this path takes."
        return Problem(422, "not_valid", detail, cure=cure, errors=wrong).response()

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
        headers = dict(error.headers or {})
        if error.status_code == 404:
            return nothing_at(request.url.path).response()
        if error.status_code == 405 and "Allow" in headers:
            return method_not_allowed(request.method, request.url.path, headers["Allow"].split(", ")).response()
        return Problem(error.status_code, code, str(error.detail), headers=headers).response()

    @app.exception_handler(Exception)
    def _bug(request: Request, error: Exception) -> JSONResponse:
        return bug(request.url.path, error).response()


def nothing_at(path: str) -> Problem:
    return Problem(404, "not_found", f"There is nothing at {path}.")


def method_not_allowed(method: str, path: str, allowed: Iterable[str]) -> Problem:
    names = ", ".join(sorted(allowed))
    return Problem(
        405, "method_not_allowed", f"{method} is not for {path}.", cure=f"Use {names}.", headers={"Allow": names}
    )


def bug(path: str, error: Exception) -> Problem:
    """Write down what nobody expected, and give what the caller hears of it: nothing from the inside."""
    log.exception("A request failed", path=path, exc_info=error)
    return Problem(500, "internal_error", "This is a defect of Unstuck; its log says more.")
