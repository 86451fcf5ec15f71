"""The one error tree. Owns exit codes and the one-line wording; never prints and never exits."""

from __future__ import annotations

from typing import ClassVar


class SpotlightError(Exception):
    """Base of every operating error. `str(error)` is one line that names field, value and bound."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class InputError(SpotlightError):
    """What the user gave cannot be used: an option, a file, a line of a file."""

    exit_code = 2


class ModelError(InputError):
    """A model folder that lacks a part, or does not fit the asked resolution."""

    exit_code = 3


class UnreachableError(SpotlightError):
    """Nobody answered within the deadline."""

    exit_code = 4


class PortInUseError(SpotlightError):
    """The address that a daemon was told to bind is taken."""

    exit_code = 5


class ProtocolError(SpotlightError):
    """A frame of another protocol version, malformed or too large."""

    exit_code = 6


class StoreError(SpotlightError):
    """The tensor store refused, lost or corrupted an object."""

    exit_code = 7


class CorruptObjectError(StoreError):
    """An object is torn, truncated or altered: it counts as not committed."""

    exit_code = 8


class ObjectFormatError(CorruptObjectError):
    """An object of another version of this package. Nothing here reads it, but it may be whole: it is neither replaced nor collected."""


class MissingObjectError(StoreError):
    """No such object."""

    exit_code = 9


class RewardError(SpotlightError):
    """The reward service failed. A failure is never a reward."""

    exit_code = 10


class LostInputError(StoreError):
    """What a job needs was stored and is gone or damaged: whoever made it makes it again."""

    exit_code = 19


class LostEmbeddingError(LostInputError):
    """Embeddings of prompts: the trainer encodes them again. `prompts` are (embedding key, prompt), where the raiser knows them."""

    def __init__(self, message: str, prompts: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.prompts = prompts


class LostPolicyError(LostInputError):
    """A policy: the trainer stores it again, from its own state of that version."""


class LostStateError(LostInputError):
    """The trainer's state of a policy version: the training step that wrote it is taken again."""


class LostSamplesError(LostInputError):
    """Samples of a rollout, or its manifest: `request_ids` are drawn again."""

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class PolicyMismatchError(SpotlightError):
    """A sample or a worker carries another policy version or digest than asked."""

    exit_code = 11


class TrainingError(SpotlightError):
    """Training data or gradients cannot be trusted: NaN, a missing log-prob, half a group, an unchanged policy."""

    exit_code = 12


class JobFailedError(SpotlightError):
    """A job ended without a result."""

    exit_code = 13


class SilenceError(SpotlightError):
    """Nobody asked for a job's status for so long that control gave it up; submitted again, it goes on."""

    exit_code = 15


class ClusterError(SpotlightError):
    """A process of the embedded cluster did not start or died more often than allowed."""

    exit_code = 14


class GroupError(SpotlightError):
    """A sequence-parallel group is of no use any more: a rank died, is silent or does something else. Names generation and rank."""

    exit_code = 16


class UnseededError(SpotlightError):
    """A worker without whole, checked weights was asked to serve or to pass them on, or was given others than its peers have."""

    exit_code = 17


class AuthenticationError(SpotlightError):
    """The peer takes no connection under this key, or under none."""

    exit_code = 18


def error_tree() -> dict[str, type[SpotlightError]]:
    """All classes by name, so that an error that crossed a socket keeps its class and exit code."""
    found: dict[str, type[SpotlightError]] = {}
    queue: list[type[SpotlightError]] = [SpotlightError]
    while queue:
        cls = queue.pop()
        found[cls.__name__] = cls
        queue.extend(cls.__subclasses__())
    return found
