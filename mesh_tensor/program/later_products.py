"""Products behind a collective that nothing else would run beside: in a backward, the gradient of a layer's weights
comes when that of its input is on its way already, as Megatron-LM has it.

    product dW = X^T dY           product dX = dY W^T
    product dX = dY W^T           start all_reduce dX
    all_reduce dX                 product dW = X^T dY
                                  wait for dX
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.machine_presets import CPU

from .steps import OpStep, Step

_MOST = CPU.tuning.products_ahead


def products_later(steps: Sequence[Step], stored: Mapping[str, str]) -> list[Step]:
    """The steps, where products that what a collective sends doesn't need come after it. None goes past two of these:
    what was behind one stays there. `stored`: the storages of values."""
    return _Order(steps, stored).result


class _Order:
    def __init__(self, steps: Sequence[Step], stored: Mapping[str, str]) -> None:
        self._stored, self.result = stored, list[Step]()
        self._made, self._used = set[str](), 0  # what collectives made, and the last step that uses something of it
        for index, step in enumerate(steps):
            if self._made and self._uses(step) & self._made:
                self._used = len(self.result)
            self._append(step, islice(steps, index + 1, None))

    def _append(self, step: Step, rest: Iterable[Step]) -> None:
        collective = step.starts
        if collective is None or not collective.wait or not COLLECTIVES[collective.kind].sends:
            self.result.append(step)
            return
        later = [] if self._is_hidden(step, rest) else self._independent(step)
        taken = [self.result.pop(place) for place in later]
        self.result += [step, *reversed(taken)]
        self._made.add(self._stored[collective.dst])

    def _is_hidden(self, step: Step, rest: Iterable[Step]) -> bool:
        """Whether something long runs between a collective's start and the first use of its result already."""
        ends = self._writes(step)
        for each in rest:
            if self._uses(each) & ends:
                return False
            if each.is_long:
                return True
        return True  # nobody waits for it

    def _independent(self, step: Step) -> list[int]:
        """Where the last products are before what makes what is sent that neither that nor the collective needs, the
        last one first."""
        found, uses, writes = list[int](), self._uses(step), self._writes(step)
        sent = self._stored[step.starts.src] if step.starts else ""
        is_made = False
        for place in range(len(self.result) - 1, self._used - 1, -1):
            each = self.result[place]
            free = not (self._writes(each) & uses or self._uses(each) & writes)
            if free and isinstance(each, OpStep) and each.is_long:
                if not is_made:
                    return []  # it starts before that
                found.append(place)
                if len(found) == _MOST:
                    break
                continue
            is_made = is_made or sent in self._writes(each)
            uses, writes = uses | self._uses(each), writes | self._writes(each)
        return found

    def _uses(self, step: Step) -> set[str]:
        return {self._stored[name] for name in step.uses}

    def _writes(self, step: Step) -> set[str]:
        return {self._stored[name] for name in step.writes}
