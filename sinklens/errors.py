"""Every error sinklens raises on purpose; each message names the rule, what was expected and what came."""

from __future__ import annotations


class SinklensError(Exception):
    """Base of all errors that sinklens raises on purpose.

    Args:
        rule: The rule that was broken, a full clause.
        expected: What would have been right.
        got: What came instead.
    """

    def __init__(self, rule: str, *, expected: object, got: object) -> None:
        self.rule, self.expected, self.got = rule, expected, got
        super().__init__(f"{rule}: expected {expected}, got {got}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default reduction replays positional arguments only; worker processes must be able to pass these on.
        return _rebuild, (type(self), self.rule, self.expected, self.got)


def _rebuild(kind: type[SinklensError], rule: str, expected: object, got: object) -> SinklensError:
    return kind(rule, expected=expected, got=got)


class InputError(SinklensError, ValueError):
    """An argument, file or setting that cannot be used."""


class HeadRangeError(SinklensError, IndexError):
    """A head that the model does not have."""


class UnsupportedModelError(SinklensError):
    """A model whose attention cannot be watched or changed faithfully."""


class PatchNotAppliedError(SinklensError):
    """An edit or observation that did not reach the model's computation."""


class MemoryLimitError(SinklensError):
    """A run whose estimated memory exceeds the caller's limit."""


def hub_errors() -> tuple[type[Exception], ...]:
    """What a request to the hub may raise: its own error extends that of whichever HTTP library it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *HfHubHTTPError.__bases__)
