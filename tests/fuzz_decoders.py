"""Fuzz every decoder of foreign bytes, and see that none raises what it may not, or costs more than it may.

    python -m tests.fuzz_decoders --seconds 60 [--seed 7] [--reader NAME] [--mutations] [--again FILE]

With atheris (`make fuzz-decoders` installs it) inputs are guided by what they reach in the code. Without it, or with
`--mutations`, they are mutations of known inputs, drawn from a printed seed. An input is the number of a reader, how it
is grown to 8 MB, and bytes. What is found is kept in `fuzz-findings/`; `--again FILE` plays one again.
"""

import argparse
import hashlib
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FOUND = Path("fuzz-findings")
SMALL_BYTES = 64 * 1024
GROWN_EVERY = 50
"""One in so many inputs is grown to 8 MB: those take a thousand times as long."""
SLOWER = 4
"""Code that reports what it does is so much slower, and the machine may be busy."""
TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u", b"\\ud800", b"1e308", b"5e-324", b"null", b"NaN"),
    *(b"9" * 4301, b"JobID", b"\x65JobID", b"\x61a", b'"a":', b"%41", b"&", b"=", b" ", b"\x00", b"\xf0\x9f\x98\x80"),
    *(b"1h", b"*/5", b"."),
    *map(
        bytes.fromhex,
        ["a1", "bf", "9f", "ff", "81", "60", "7f", "5f", "c2", "c482", "d81c", "d9d9f7", "f8", "ba00100000"],
    ),
    *map(bytes.fromhex, ("9b7fffffffffffffff", "1bffffffffffffffff")),
]
PLAIN = [
    *(b'{"args":[1],"kwargs":{"a":"b"}}', b"\xa2\x61a\x01\x65JobID\x02"),
    *(b"1h30m", b"*/5 * * * *", b"a=1&token=x", b"12.3.4"),
]


class Decoders:
    """All readers, one of which is tried with each input."""

    def __init__(self, only: str | None) -> None:
        from tests.support import foreign_bytes

        texts = {name: _of_bytes(reader) for name, reader in foreign_bytes.TEXTS.items()}
        self.readers = {name: one for name, one in {**foreign_bytes.STORED, **texts}.items() if only in (None, name)}
        if not self.readers:
            sys.exit(f"There is no reader {only!r}. There are: {', '.join({**foreign_bytes.STORED, **texts})}.")
        self.names = list(self.readers)
        self.refusals = foreign_bytes.REFUSALS
        self.tried: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.largest: dict[str, int] = {}

    def try_one(self, data: bytes) -> None:
        """Try an input, or raise AssertionError or whatever the reader raised that it may not."""
        from tests.support.decoding_bombs import MAX_BYTES, MAX_S, cost_of

        if len(data) < 3:
            return
        name = self.names[data[0] % len(self.names)]
        grown = data[1] % GROWN_EVERY == 0
        content = _grown(data[2:]) if grown else data[2:]
        self.tried[name] += 1
        if not grown:
            began_s = time.process_time()
            try:
                self.readers[name](content)
            except self.refusals:
                pass
            took_s = time.process_time() - began_s
        else:
            cost = cost_of(lambda: self.readers[name](content), self.refusals)
            took_s = cost.cpu_s
            self.largest[name] = max(self.largest.get(name, 0), cost.peak_bytes)
            assert cost.peak_bytes < MAX_BYTES, f"{name}: {cost.peak_bytes:,} bytes"
        self.slowest[name] = max(self.slowest.get(name, 0.0), took_s)
        assert took_s < MAX_S * SLOWER, f"{name}: {took_s:.2f} s"

    def report(self) -> str:
        lines = [f"{sum(self.tried.values()):,} inputs", f"{'reader':34} {'inputs':>9} {'slowest':>9} {'largest':>9}"]
        for name in self.names:
            slowest_s, largest_mb = self.slowest.get(name, 0), self.largest.get(name, 0) / 1e6
            lines.append(f"{name:34} {self.tried[name]:9,} {slowest_s:7.3f} s {largest_mb:6.0f} MB")
        return "\n".join(lines)


def _of_bytes(reader: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: reader(data.decode("utf-8", "replace"))


def _grown(data: bytes) -> bytes:
    """Repeat what stands between the first and the last few bytes until all of it has 8 MB."""
    from tests.support.decoding_bombs import SIZE_BYTES

    edge = min(data[0] % 8, len(data) // 3)
    first, middle, last = data[:edge], data[edge : len(data) - edge], data[len(data) - edge :]
    return (first + middle * ((SIZE_BYTES - 2 * edge) // max(1, len(middle))) + last)[:SIZE_BYTES]


def known_inputs(count: int) -> list[bytes]:
    """Return small forms of the known bombs and a few plain inputs, for each reader."""
    from tests.support.decoding_bombs import cbor_bombs, json_bombs

    units = [make()[:500] for make in (*json_bombs().values(), *cbor_bombs().values())]
    small = [bytes([reader, 1]) + unit for unit in [*units, *PLAIN] for reader in range(count)]
    # Grown, each bomb for one of the readers: all of them for all would take minutes.
    return small + [bytes([place % count, 0]) + unit for place, unit in enumerate(units)]


def mutate(dice: random.Random, known: list[bytes]) -> bytes:
    data = bytearray(dice.choice(known))
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(6):
            case 0 if data:
                data[at % len(data)] = dice.randrange(256)
            case 1:
                data[at:at] = dice.choice(TOKENS) * dice.choice((1, 1, 2, 30))
            case 2:
                del data[at : at + dice.randrange(1, 9)]
            case 3:
                other = dice.choice(known)
                data[at:] = other[dice.randrange(len(other)) :]
            case 4:
                data[at:at] = data[at : at + dice.randrange(1, 40)] * dice.randrange(1, 20)
            case _:
                data[at:at] = dice.randbytes(dice.randrange(1, 9))
    # Grown ones are few.
    head = bytes([dice.randrange(256), 0 if dice.random() < 1 / GROWN_EVERY else dice.randrange(1, GROWN_EVERY)])
    return (head + bytes(data[2:]))[:SMALL_BYTES]


def run_mutations(decoders: Decoders, seconds: float, seed: int) -> None:
    print(f"Mutations of known inputs for {seconds:g} s, seed {seed}.", flush=True)
    dice, known = random.Random(seed), known_inputs(len(decoders.names))
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        data = mutate(dice, known)
        try:
            decoders.try_one(data)
        except Exception:
            keep(data)
            raise
    print(decoders.report())


def run_atheris(decoders: Decoders, seconds: float, seed: int) -> None:
    import atheris

    corpus = FOUND / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in known_inputs(len(decoders.names)):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    tokens = FOUND / "tokens.txt"
    tokens.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in token[:60]) + '"\n' for token in TOKENS))
    end_s = time.monotonic() + seconds

    def one_input(data: bytes) -> None:
        if time.monotonic() > end_s:
            # libFuzzer ends the process itself, and says nothing of what was measured.
            print(decoders.report(), flush=True)
            os._exit(0)
        decoders.try_one(data)

    flags = [f"-max_total_time={seconds + 30:.0f}", f"-seed={seed}", f"-max_len={SMALL_BYTES}", "-timeout=20"]
    flags += ["-rss_limit_mb=4096", f"-dict={tokens}", f"-artifact_prefix={FOUND}/", "-print_final_stats=1"]
    print(f"atheris for {seconds:g} s, seed {seed}.", flush=True)
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one_input)
    atheris.Fuzz()


def keep(data: bytes) -> None:
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"found-{hashlib.sha1(data).hexdigest()[:12]}"
    path.write_bytes(data)
    print(f"Kept as {path}. Play it again: python -m tests.fuzz_decoders --again {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--reader", default=None, help="only this one")
    parser.add_argument("--mutations", action="store_true", help="do not use atheris")
    parser.add_argument("--again", type=Path, default=None, help="play this input again")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1, 2**31) if asked.seed is None else asked.seed
    guided = importlib.util.find_spec("atheris") is not None and not asked.mutations
    if guided and asked.again is None:
        import atheris

        # Whatever is imported from here on reports what it does.
        with atheris.instrument_imports(include=["unstuck"]):
            decoders = Decoders(asked.reader)
        run_atheris(decoders, asked.seconds, seed)
        return
    decoders = Decoders(asked.reader)
    if asked.again is not None:
        decoders.try_one(asked.again.read_bytes())
        print(decoders.report())
        return
    run_mutations(decoders, asked.seconds, seed)


if __name__ == "__main__":
    main()
