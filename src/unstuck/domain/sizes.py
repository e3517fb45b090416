"""Read sizes of memory as people write them: "512MB", "2GiB", a number of bytes."""

import re

from unstuck.domain.errors import ConfigError

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
MAX_CHARS = 100


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
