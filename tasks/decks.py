"""Flyte decks with the parts of the report. Owns which parts a task shows; the parts themselves are the report's."""

from __future__ import annotations

from collections.abc import Iterable

from flytekit import Deck

from tasks.report import Part, fragment


def show(parts: Iterable[Part]) -> None:
    """One deck a part, for the task that is running."""
    for part in parts:
        Deck(part.title, fragment(part))
