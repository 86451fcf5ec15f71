"""Which sequence-parallel degrees a model allows. Imports no torch, so that whoever plans groups can ask."""

from __future__ import annotations

from spot_runtime.errors import InputError


def check_degree(degree: int, heads: int) -> None:
    """Raises InputError unless a model with `heads` attention heads can be spread over `degree` ranks: each takes as many heads."""
    if degree < 1 or heads % degree:
        allowed = ", ".join(str(d) for d in allowed_degrees(heads, heads))
        raise InputError(
            f"sequence_parallel_degree = {degree}: must divide the {heads} attention heads of the model, so be one of {allowed}"
        )


def allowed_degrees(heads: int, degree_max: int) -> tuple[int, ...]:
    """All degrees up to `degree_max`, rising; 1 is always among them."""
    return tuple(degree for degree in range(1, degree_max + 1) if heads % degree == 0)
