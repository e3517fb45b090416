"""The watchman: finds the dead by evidence, settles what they held, keeps the house."""

from unstuck.reaper.ring import Neighbours
from unstuck.reaper.rounds import Round
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.watchman import Watchman, run_daemon, run_once

__all__ = ["Neighbours", "Reaper", "Round", "Watchman", "run_daemon", "run_once"]
