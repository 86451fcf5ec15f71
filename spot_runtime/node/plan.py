"""Which slots denoise together: groups planned from the slots that can serve. Never forms a group, never asks who is busy."""

from __future__ import annotations

from collections.abc import Collection

SlotGroup = tuple[int, ...]
"""Slots of one group, ascending; the first is the lead's."""


def plan_groups(
    live: Collection[int], present: Collection[SlotGroup], degrees: Collection[int]
) -> tuple[SlotGroup, ...]:
    """A partition of `live` into groups of the sizes in `degrees` (1 is one of them), the largest first.

    As many groups of the highest degree as there are slots for, then of the next. Groups of `present` that are whole and have a wanted size
    stay as they are, so that a change touches as few as it can; the slots that are left go together in their order.
    """
    sizes = _sizes(len(live), degrees)
    free = set(live)
    plan: list[SlotGroup] = []
    for group in sorted(present, key=lambda group: (-len(group), group)):
        if len(group) in sizes and free.issuperset(group):
            sizes.remove(len(group))
            free.difference_update(group)
            plan.append(group)
    rest = sorted(free)
    for size in sizes:
        plan.append(tuple(rest[:size]))
        del rest[:size]
    return tuple(sorted(plan, key=lambda group: (-len(group), group)))


def _sizes(slots: int, degrees: Collection[int]) -> list[int]:
    sizes: list[int] = []
    for degree in sorted(degrees, reverse=True):
        sizes += [degree] * (slots // degree)
        slots %= degree
    return sizes
