"""The settings: frozen, checked once, with messages that name the cure."""

from unstuck.config.groups import Alerts as Alerts
from unstuck.config.groups import HttpSettings as HttpSettings
from unstuck.config.groups import MdpSettings as MdpSettings
from unstuck.config.groups import Recovery as Recovery
from unstuck.config.groups import Retention as Retention
from unstuck.config.ledger_url import IN_MEMORY as IN_MEMORY
from unstuck.config.ledger_url import check_url as check_url
from unstuck.config.ledger_url import resolved_url as resolved_url
from unstuck.config.ledger_url import sqlite_file as sqlite_file
from unstuck.config.loading import SETTING_NAMES as SETTING_NAMES
from unstuck.config.loading import build as build
from unstuck.config.loading import dump as dump
from unstuck.config.loading import load as load
from unstuck.config.loading import misspelt_variables as misspelt_variables
from unstuck.config.loading import overruled as overruled
from unstuck.config.loading import restore as restore
from unstuck.config.settings import DEFAULT_QUEUE as DEFAULT_QUEUE
from unstuck.config.settings import DEFAULT_URL as DEFAULT_URL
from unstuck.config.settings import GROUPS as GROUPS
from unstuck.config.settings import LEAST_PROCESSES as LEAST_PROCESSES
from unstuck.config.settings import GivenSettings as GivenSettings
from unstuck.config.settings import Settings as Settings
from unstuck.config.urls import ledger_name as ledger_name
from unstuck.config.urls import public_url as public_url
from unstuck.domain.recovery_rules import EVIDENCE as EVIDENCE
