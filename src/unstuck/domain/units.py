"""Read and write durations ("30s", "2h30m") and sizes ("512MB")."""

import math
import re
from datetime import timedelta

from unstuck.errors import ConfigError

type_hint = "a duration like '30s', '5m', '1h30m', a number of seconds or a timedelta"

Duration = str | int | float | timedelta

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_WHOLE = re.compile(rf"(?:{_PART.pattern}\s*)+")
MAX_DURATION_S = 10 * 365 * 86400.0
MAX_CHARS = 100


def seconds(value: Duration, what: str = "duration") -> float:
    """Turn a duration into seconds, or raise ConfigError naming `what`."""
    result = value if type(value) is float else _parse(value, what)
    if not math.isfinite(result) or result < 0 or result > MAX_DURATION_S:
        raise ConfigError(f"{what} must be between 0 and ten years, not {value!r:.80}.")
    return result


def _parse(value: Duration, what: str) -> float:
    if isinstance(value, bool):
        raise ConfigError(f"{what} must be {type_hint}, not {value!r}.")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float):
        # An integer may have more digits than a float has room for, and than Python writes.
        return float(min(value, 2 * MAX_DURATION_S)) if value > MAX_DURATION_S else float(max(value, -1.0))
    if isinstance(value, str) and len(value) <= MAX_CHARS:
        text = value.strip().lower()
        if _WHOLE.fullmatch(text):
            return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
        try:
            return float(text)
        except ValueError:
            pass
    raise ConfigError(f"{what} must be {type_hint}, not {value!r:.80}.")


def brief(value_s: float) -> str:
    """Write seconds the way people say them: 60s, 2m, 1h30m, 350ms."""
    if value_s < 1:
        return f"{value_s * 1000:.0f}ms"
    if value_s < 120:
        return f"{value_s:.3g}s"
    whole = round(value_s)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, whole = divmod(whole, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts[:2])


_WORDS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def in_words(value_s: float) -> str:
    """Write seconds as words in a sentence: 6 ms, 4.2 seconds, 3 minutes 20 seconds, 2 hours 5 minutes."""
    if value_s < 0.9995:
        return f"{max(value_s, 0.0) * 1000:.0f} ms" if value_s >= 0.0095 else f"{max(value_s, 0.0) * 1000:.2g} ms"
    if value_s < 9.95:
        return f"{value_s:.2g} second{'' if f'{value_s:.2g}' == '1' else 's'}"
    whole = round(value_s)
    parts = []
    for word, size in _WORDS:
        amount, whole = divmod(whole, size)
        if amount:
            parts.append(f"{amount} {word}{'' if amount == 1 else 's'}")
        elif parts:
            break
    return " ".join(parts[:2])


Size = str | int

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "t": 1024**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
MAX_SIZE_BYTES = 2**60


def size_bytes(value: Size, what: str = "size") -> int:
    """Turn a size into bytes, or raise ConfigError naming `what`."""
    result: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        result = value
    elif isinstance(value, str) and len(value) <= MAX_CHARS:
        match = _SIZE.fullmatch(value.strip().lower())
        if match is not None and match[2] in _UNITS:
            result = float(match[1]) * _UNITS[match[2]]
    if result is None:
        raise ConfigError(f"{what} must be a size like '512MB', '2GiB' or a number of bytes, not {value!r:.80}.")
    if not 0 <= result <= MAX_SIZE_BYTES:
        raise ConfigError(f"{what} must be between 0 and 1 EiB, not {value!r:.80}.")
    return int(result)


def brief_size(value_bytes: float) -> str:
    """Write bytes the way people say them: 512 B, 1.5 MB, 12 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if value_bytes < 999.5:
            return f"{value_bytes:.0f} {unit}" if value_bytes >= 10 or unit == "B" else f"{value_bytes:.1f} {unit}"
        value_bytes /= 1000
    return f"{value_bytes:,.1f} TB"
