"""Names of the private language that modules and classes once had do not come back.

Each was replaced by the word that people in this field use. If you want one of them for a new thing, look for the name
that the thing has elsewhere first."""

import ast
from collections.abc import Iterator
from pathlib import Path

import unstuck

SOURCE = Path(unstuck.__file__).parent

MODULES = """
admitting advancing alerting answering asking attention auditing beating beginnings begun bell bench blameless blaming
bookkeeping budget building carrier catching_up claiming clerk client_lines client_side coalescing companion
conversation counting crew crowd dag diagnosing door doorman draining dressing ear enqueueing envelope examining
exchanging explaining exposition failing fairlock fencing filling finding flights floor following foreign forgery
forksafety gathering guard halls handed handing handover hands happenings hearing herald holding homing hooking
housekeeping hub intervals journaling keeping kernel keyring knowing lanes last_words lazily leaving letters line_end
lining listing logbook looking lookout loop_watch meaning measuring migrating movement notebook notebooks nursery
one_turn opening operating ordering pace page patience pausing people piles planning plug preparing prospects pulse
quick reaper recovering refusals replacing requesting restoring reviving ring ringer rooms roster scales scene scribes
searching seats settling showing signs store strangers sweeping switching tallies telling templating ticking ties
tiles timekeeper turning turnstile undertaker unstopping verbs visiting vitality waiting waking watching watchman
weighing wheel worker_side
"""

CLASSES = """
AbsenceTally Answering Arrived AskedStacks AtCrew AtDesk Attempting Attention Beaten BeatsInFlight Bell BellState
Bells Bench BenchEvent Birth Blameless Book Bookkeeper Born Broom Bye Checkup Clerk ClientLines Coalescer Companion
Conversation CrashTally Crew Crowd DeathTally DemoDoor Desk Disband Doing Door Doorman Ear Equip Floor ForeignPulse
Gates Glance Grounds Hall Hands Heads Herald Hub InHand InLine Incarnations Keyring Lane Letter LineClosed LineEnd
LineRecord Logbook Lookout LoopWatch Meddler Neighbours Notebook Notebooks Nursery NurseryGone Overkept Piles Plug
PostgresBell PostgresMeddler Pulse Restorer Ringer Road Roster Rung Scales Scene Scribes Seat Seats Shop Sight Signs
SqliteBell SqliteMeddler Strange Tallies Tally TargetDesk Tell TellAgain Teller Tended Terms Ties TiesRecord Tile
Timekeeper ToNursery Told Undertaker Vitals Watchman Wheel Wish Wishes Witness WordsFile WorkerBirth
Estate Heir Late Visits
"""


def names_of_modules() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        yield from path.relative_to(SOURCE).with_suffix("").parts


def names_of_classes() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name


def test_no_module_has_a_retired_name() -> None:
    assert set(MODULES.split()) & set(names_of_modules()) == set()


def test_no_class_has_a_retired_name() -> None:
    assert set(CLASSES.split()) & set(names_of_classes()) == set()


def test_both_lists_are_compared_with_the_real_tree() -> None:
    assert {"recovery", "fork_server", "ledger_thread"} <= set(names_of_modules())
    assert {"WorkerLoop", "LedgerThread", "Reaper"} <= set(names_of_classes())
