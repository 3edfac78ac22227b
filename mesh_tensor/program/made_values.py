"""What is known of steps while operators are taken together: which step made a value, how often it is used, and until
when its memory stays as it is."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from mesh_tensor.rules.operator import OpCall

from .program import ProgramValue
from .steps import OpStep, Step


@dataclass(frozen=True)
class Made:
    """By which step, and when, a value is made."""

    step: OpStep
    at: int


def is_plain(step: OpStep, operator: str) -> bool:
    """Whether a step is torch's operator of that name, whose operands are not looked at."""
    return step.call.name == operator and step.kernel is None and not step.checked


class MadeValues:
    """Of steps, of which those that were taken already are known. `others`: the numbers of those that are no operators;
    `lasting`: values that somebody uses afterwards."""

    def __init__(
        self,
        steps: Sequence[Step],
        others: Sequence[int],
        values: Mapping[str, ProgramValue],
        lasting: Collection[str],
        constants: Mapping[str, relax.Constant],
    ) -> None:
        self.lasting, self._constants = lasting, constants
        self.uses = Counter([*lasting, *(name for step in steps for name in step.reads)])
        self._values = values
        self._writes: dict[str, list[int]] = {}  # per storage, when others than operators write it
        self._others = others
        for number in others:
            for name in steps[number].writes:
                self._writes.setdefault(values[name].storage, []).append(number)
        self._made: dict[str, Made] = {}
        self._calls: dict[Hashable, OpCall] = {}

    def add(self, step: OpStep, number: int) -> None:
        """A step that is taken."""
        self._made |= dict.fromkeys(step.results, Made(step, number))

    def maker(self, name: str, *operators: str) -> Made | None:
        """The step that made a value, if it is one of these operators."""
        made = self._made.get(name)
        return made if made is not None and any(is_plain(made.step, operator) for operator in operators) else None

    def number(self, name: str) -> float | None:
        """What a value is, if it is a constant without dims."""
        constant = self._constants.get(name)
        return float(constant.data.numpy()) if constant is not None and not constant.data.shape else None

    def call(self, key: Hashable, make: Callable[[], OpCall]) -> OpCall:
        """The call of this key: alike layers have one."""
        if key not in self._calls:
            self._calls[key] = make()
        return self._calls[key]

    def stays(self, name: str, since: int, until: int) -> bool:
        """Whether nothing but operators writes a value's memory between two steps."""
        return not any(since < at < until for at in self._writes.get(self._values[name].storage, ()))

    def follows(self, inner: Made, number: int) -> bool:
        """Whether there are only operators between the two steps."""
        return bisect_right(self._others, inner.at) == bisect_right(self._others, number)

    def are_within(self, inner: Sequence[Made], sources: Sequence[str], number: int) -> bool:
        """Whether the steps run among operators alone up to that one, what they make is used once, and what they are
        made of stays."""
        alone = all(self.uses[each.step.results[0]] == 1 and self.follows(each, number) for each in inner)
        return alone and all(self.stays(name, min(each.at for each in inner), number) for name in sources)
