"""Sequences of actions, and leaving loops early."""

from __future__ import annotations

from collections.abc import Sequence

from .scope import Action, Frame, Scope


class Break(Exception):
    """Leaves the innermost loop."""


class Continue(Exception):
    """Goes on with the innermost loop's next iteration."""


class Return(Exception):
    """Ends the program."""


def in_turn(actions: Sequence[Action]) -> Action:
    """The actions, one after the other."""
    if len(actions) == 1:
        return actions[0]

    def run(frame: Frame) -> None:
        for action in actions:
            action(frame)

    return run


def nothing(frame: Frame) -> None:
    """The action of statements without effect."""


def jump(signal: type[Exception], scope: Scope) -> Action:
    """An action that raises `signal`, for the loop around it to catch."""
    scope.jumps = True

    def run(frame: Frame) -> None:
        raise signal

    return run


def until(signal: type[Exception], action: Action) -> Action:
    """`action`, which ends without more ado when `signal` is raised."""

    def run(frame: Frame) -> None:
        try:
            action(frame)
        except signal:
            return

    return run
