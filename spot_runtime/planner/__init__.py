"""Pure core: the exploration planner (paper §4.3)."""
