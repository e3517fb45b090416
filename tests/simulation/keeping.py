"""Keep the scenarios that once failed: as data, so that they mean the same however scenarios are drawn later."""

from pathlib import Path

import msgspec
from tests.simulation.scenario import Scenario

FOLDER = Path(__file__).parent / "kept"


class Kept(msgspec.Struct, frozen=True):
    found: str
    """What went wrong when it was found."""
    scenario: Scenario


def keep(scenario: Scenario, found: str, ledger: str) -> Path:
    """Write a scenario where `kept` finds it."""
    path = FOLDER / f"{ledger}-{scenario.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(Kept(found, scenario)), indent=2) + b"\n")
    return path


def kept(ledger: str) -> dict[str, Kept]:
    """Return all that were found on this ledger, by the names of their files."""
    paths = sorted(FOLDER.glob(f"{ledger}-*.json"))
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Kept) for path in paths}
