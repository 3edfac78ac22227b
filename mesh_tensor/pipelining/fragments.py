"""Fragments: a stage's forward, and its backward as a whole or in halves, cut out of one joint function.

What a gradient needs of the forward is saved by it, once for both halves; what follows from weights alone (a transposed
weight) is computed again instead, as it costs next to nothing and would be held for every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax

from mesh_tensor.plan.manual import leaves_devices

from .flow import Flow
from .stages import FUNCTION, Stage, part


@dataclass(frozen=True, eq=False)
class FragmentFunction:
    """A function of `module`, called as its kind: its parameters are the values `takes`, it returns those of `gives`.

    Names are of the stage's values; `d_x` is the gradient of x. `own` has the function's own names of them."""

    kind: str
    module: ir.IRModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    own: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class JointStage:
    """A stage with its gradients: `module`'s function takes the stage's parameters, then gradients of what it gives;
    returns what the stage gives, then gradients of `wrt`: parameters, and values that the stage takes. What follows
    from the parameters `constant` alone is computed again, as what follows from weights with gradients is."""

    stage: Stage
    module: ir.IRModule
    wrt: tuple[str, ...]
    constant: tuple[str, ...] = ()


def gradient_name(value: str) -> str:
    """What the gradient of a value is called between stages."""
    return f"d_{value}"


def saved_name(value: str) -> str:
    """What a value is called that a forward leaves for its stage's backward, and nobody else takes."""
    return f"saved.{value}"


def fragments_of(joint: JointStage, recompute: bool = False) -> dict[str, FragmentFunction]:
    """F, B, I and W of a stage; without the halves that compute nothing.

    `recompute` saves nothing of the forward but what the stage takes: the backward runs it again.
    """
    return _Fragments(joint, recompute).made()


class _Fragments:
    def __init__(self, joint: JointStage, recompute: bool) -> None:
        self.flow, self.stage = Flow(joint.module, "stage"), joint.stage
        self.recompute, self.constant = recompute, joint.constant
        results = self.flow.results
        count = len(self.stage.gives)
        self.gives = dict(zip(self.stage.gives, results[:count], strict=True))
        self.gradients = dict(zip(map(gradient_name, joint.wrt), results[count:], strict=True))
        inner = [gradient_name(name) for name in joint.wrt if name in self.stage.takes]
        self.of_inputs = {name: own for name, own in self.gradients.items() if name in inner}
        self.of_weights = {name: own for name, own in self.gradients.items() if name not in inner}
        self.names = self._stage_names()
        self._divide()

    def _stage_names(self) -> dict[str, str]:
        """The function's own names -> the stage's."""
        names = {own: name for name, own in reversed(list(self.gives.items()))}
        taken = [*self.stage.params, *self.stage.takes]
        seeds = [name for name in self.flow.params if name not in taken]
        seeded = [own for name, own in self.gives.items() if name not in self.stage.only_state]
        floats = [own for own in dict.fromkeys(seeded) if self.flow.is_float(own)]
        gradients = {seed: gradient_name(names[own]) for seed, own in zip(seeds, floats, strict=True)}
        return names | gradients | {name: name for name in taken}

    def _divide(self) -> None:
        """Which bindings are of the forward, of the input gradients, and of the weights'."""
        flow = self.flow
        held = {*self.stage.params} - {name for name in self.stage.params if gradient_name(name) in self.gradients}
        moving = [name for name in flow.params if name in held or name not in self.stage.params]
        varying = flow.below([name for name in moving if name not in self.constant])
        used = flow.above(flow.results)
        self.forward = self._with_kept(self._with_fields(flow.above(self.gives.values()), used))
        self.inputs = self._with_fields(flow.above(self.of_inputs.values()) - self.forward, used)
        self.weights = flow.above(self.of_weights.values()) - self.forward - self.inputs
        again = self.forward if self.recompute else self.forward - varying
        self.inputs = self._with(self.inputs, again)
        self.weights = self._with(self.weights, again - self.inputs if self.recompute else again)
        self.both = self._with(self.inputs | self.weights, again)

    def _with_fields(self, mine: set[str], used: set[str]) -> set[str]:
        """The bindings with all fields of their tuples: a fragment gives tensors."""
        for name, binding in self.flow.bindings.items():
            if name in used and isinstance(binding.value, relax.TupleGetItem) and self.flow.operands[name][0] in mine:
                mine.add(name)
        return mine

    def _with_kept(self, mine: set[str]) -> set[str]:
        """The bindings with what the backward takes of what devices have of their own, along a dim of devices."""
        ends = [n for n, b in self.flow.bindings.items() if isinstance(b.value, relax.Call) and leaves_devices(b.value)]
        return mine | {name for name in ends if set(self.flow.operands[name]) <= mine}

    def _with(self, mine: set[str], again: set[str]) -> set[str]:
        """The bindings with those of `again` that they need."""
        needed = [value for name in mine for value in self.flow.operands[name] if value in again]
        return mine | self.flow.above(needed, again)

    def made(self) -> dict[str, FragmentFunction]:
        saved = [name for name in self._outside(self.both) if name in self.forward]
        later = self._outside(self.weights)
        halfway = {self._saved(name): name for name in later if name in self.inputs}
        early = {name: own for name, own in self.of_weights.items() if own in self.inputs}  # those of norms
        late = {name: own for name, own in self.of_weights.items() if name not in early}
        saved = list(dict.fromkeys([*saved, *(name for name in later if name in self.forward - self.inputs)]))
        forward = {**self.gives, **{self._saved(name): name for name in saved}}
        found = {"F": self._function("F", self.forward, forward)}
        if self.gradients:
            found["B"] = self._function("B", self.both, self.gradients)
        if self.of_inputs:
            found["I"] = self._function("I", self.inputs, {**self.of_inputs, **early, **halfway})
        if late:
            found["W"] = self._function("W", self.weights, late)
        return found

    def _outside(self, mine: set[str]) -> list[str]:
        """What bindings take that is bound elsewhere."""
        taken = (value for name in self.flow.bindings if name in mine for value in self.flow.operands[name])
        return [name for name in dict.fromkeys(taken) if name in self.flow.bindings and name not in mine]

    def _saved(self, own: str) -> str:
        return self.names.get(own, saved_name(own))

    def _function(self, kind: str, mine: set[str], gives: Mapping[str, str]) -> FragmentFunction:
        flow = self.flow
        operands = {value for name in mine for value in flow.operands[name]}
        operands |= {own for own in gives.values() if own not in mine}
        takes = [name for name in (*flow.params, *flow.bindings) if name in operands and name not in mine]
        module = part(flow, mine, takes, list(gives.values()), kind)
        own = {self._saved(name): name for name in takes} | dict(gives)
        return FragmentFunction(kind, module, tuple(self._saved(name) for name in takes), tuple(gives), own)


def without_gradient(joint: JointStage) -> frozenset[str]:
    """Those of `wrt` on which nothing that the stage gives depends so that it has a gradient."""
    flow = Flow(joint.module, FUNCTION)
    made = zip(joint.wrt, flow.results[len(joint.stage.gives) :], strict=True)
    values = {name: flow.bindings[own].value for name, own in made if own in flow.bindings}
    return frozenset(name for name, value in values.items() if _is_zero(value))


def _is_zero(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.zeros"


def trained_values(flow: Flow, weights: Sequence[str]) -> set[str]:
    """The values of floats that depend on weights: those whose gradients go from stage to stage."""
    return {name for name in flow.below(weights) if flow.is_float(name)}
