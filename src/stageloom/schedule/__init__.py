"""The schedule: placement plus one tape a rank; its columns, its text form, its JSON form."""

from stageloom.schedule.reading import from_json, loads
from stageloom.schedule.text import FORMAT_VERSION, dumps, to_json, tokens
from stageloom.schedule.value import Links, Schedule, assemble, keep_first

__all__ = [
    "FORMAT_VERSION",
    "Links",
    "Schedule",
    "assemble",
    "dumps",
    "from_json",
    "keep_first",
    "loads",
    "to_json",
    "tokens",
]
