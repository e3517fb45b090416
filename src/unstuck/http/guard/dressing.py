"""Put the headers on every answer that keep a browser from doing more with it than it should."""

from starlette.types import Message, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ALWAYS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
NOT_KEPT = (b"cache-control", b"no-store")
KEPT_CHECKED = (b"cache-control", b"no-cache")
HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")


def dressed(send: Send, *, static: bool, https: bool) -> Send:
    wanted = (*ALWAYS, KEPT_CHECKED if static else NOT_KEPT, *((HTTPS_ONLY,) if https else ()))

    async def send_dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            there = {name.lower() for name, _ in headers}
            message = {**message, "headers": [*headers, *(pair for pair in wanted if pair[0] not in there)]}
        await send(message)

    return send_dressed
