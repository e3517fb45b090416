"""The version of this code; the package and every worker show it."""

VERSION = "0.1.0"
