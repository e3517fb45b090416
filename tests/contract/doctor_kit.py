"""What tests of the doctor's conditions share: a calm worker, and what it says of a ledger."""

from typing import Any

from unstuck import config
from unstuck.client.doctor.examining import examine
from unstuck.client.doctor.facts import Limits
from unstuck.client.doctor.gathering import gather
from unstuck.store.contract import Ledger

CALM: dict[str, Any] = {"heartbeat_interval_s": 5.0, "suspect_after_s": 30.0, "running_stale_after_s": 30.0}
HOST_S_OWN = frozenset({"oom-group"})
"""What the machine under test brings along, and no test can mend."""


def codes(ledger: Ledger, settings: config.Settings, limits: Limits | None = None) -> set[str]:
    """Give the codes of all that the doctor finds, information too."""
    return {finding.code.value for finding in examine(gather(ledger, settings, limits), limits)} - HOST_S_OWN
