"""Let a person in at the page: a token, typed once, becomes a cookie."""

import time
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from unstuck.domain.api_tokens import proof_of
from unstuck.http.auth import sessions
from unstuck.http.auth.limits import RateLimiter, form_field
from unstuck.http.auth.middleware import address_of
from unstuck.http.auth.tokens import TokenCache
from unstuck.http.dashboard.rendering import render

MISTAKES_PER_S = 1 / 6
MISTAKES_AT_ONCE = 10
MAX_NEXT_CHARS = 2_000

router = APIRouter()


@router.get("/login")
async def login_form(request: Request) -> Response:
    return render(request, "login.html", next=safe_next(request.query_params.get("next", "")), complaint="")


@router.post("/login")
async def log_in(request: Request) -> Response:
    tokens: TokenCache = request.app.state.tokens
    mistakes: RateLimiter = request.app.state.mistakes
    who = address_of(request.scope.get("client"))
    headers, body = dict(request.headers), await request.body()
    there = safe_next(form_field(headers, body, "next"))
    if (wait_s := mistakes.wait_s(who)) > 0:
        complaint = "Too many wrong tokens. Wait a moment."
        answer: Response = render(request, "login.html", status=429, next=there, complaint=complaint)
        answer.headers["Retry-After"] = str(int(wait_s) + 1)
        return answer
    text = form_field(headers, body, "token").strip()
    key = await tokens.find(text)
    if key is None:
        mistakes.take(who)
        complaint = "This token is not valid: it never was, has expired, or was revoked."
        return render(request, "login.html", status=401, next=there, complaint=complaint)
    root = request.scope.get("root_path", "")
    answer = RedirectResponse(f"{root}{there}", 303)
    answer.set_cookie(
        sessions.COOKIE,
        sessions.begin(key, proof_of(text), time.time()),
        max_age=sessions.LASTS_S,
        path=f"{root}/",
        secure=_secure(request),
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request) -> Response:
    root = request.scope.get("root_path", "")
    answer = RedirectResponse(f"{root}/login", 303)
    answer.delete_cookie(sessions.COOKIE, path=f"{root}/", secure=_secure(request), httponly=True, samesite="strict")
    return answer


def safe_next(text: str) -> str:
    """Give where to go after the login: a place of our own, whatever the address says."""
    plain = text.isascii() and text.isprintable() and "\\" not in text and len(text) <= MAX_NEXT_CHARS
    if not plain or not text.startswith("/") or text.startswith("//"):
        return "/"
    try:
        parts = urlsplit(text)
    except ValueError:
        return "/"
    return "/" if parts.scheme or parts.netloc or parts.path in ("/login", "/logout") else text


def _secure(request: Request) -> bool:
    return request.url.scheme == "https" or bool(request.app.state.services.http.secure_cookies)
