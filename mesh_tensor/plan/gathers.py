"""What is gathered of a transposed tensor is gathered of the tensor itself.

    w_t = permute_dims(w)                   w_whole = all_gather(w)
    w_t_whole = all_gather(w_t)             w_t_whole = permute_dims(w_whole)

And so is what is gathered of a tensor that repeats the elements of another one, or has them in more bits: of keys of
fewer heads than queries have, those are gathered that there are. Of several views of one tensor, as einsums make them
of what they share, the tensor is gathered, once.

So a weight that is split by rows arrives as it was sent, is never copied transposed, and may be on its way as soon as
it is there; products take the transpose with them (`program.fuse`). What is needed again at once, as the last layer's
weight is by its gradient, is not gathered again, and what devices had whole a moment ago isn't either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mesh_tensor.annotations.names import Fresh
from mesh_tensor.base.collectives import BETWEEN
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.placement import Replicate, Shard
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.cost import class_of

from .explicit import Change, ExplicitGraph, ExplicitStep, Form, Run
from .ir import Scopes, Value

_ALL_GATHER = BETWEEN[Shard, Replicate].name
_TRANSPOSE = "permute_dims"
_REPEATING = (_TRANSPOSE, "broadcast_to", "repeat", "reshape", "expand_dims", "squeeze", "astype")
_AGAIN = CPU.tuning.products_ahead  # products after which what was gathered is still there


def gathered_first(made: ExplicitGraph) -> ExplicitGraph:
    """The same graph; transposes whose results nothing takes any more are left in."""
    return replace(made, steps=_Swaps(made).steps)


class _Swaps:
    def __init__(self, made: ExplicitGraph) -> None:
        self._makers = {
            step.outputs[0]: step for step in made.steps if step.node is not None and step.node.call.name in _REPEATING
        }
        # By value, layout, dtype and scopes: when it was made, or taken last, and as what.
        self._known: dict[tuple[Value, Sharding, str, Scopes], tuple[int, Form]] = {}
        self._shared = Counter(key for step in made.steps if _gathers(step) for key in self._ways(step))
        self._products = 0
        forms = [form for step in made.steps for form in step.outputs]
        taken = [form.name for form in (*made.params, *made.constants, *forms)]
        self._fresh = Fresh([*taken, *(value.name for value in made.graph.values())])
        self.steps = [new for step in made.steps for new in self._noted(step)]

    def _noted(self, step: ExplicitStep) -> Iterator[ExplicitStep]:
        """What the step becomes, of which the results are known from there on."""
        for new in self._swapped(step):
            yield new
            for form in new.outputs:
                self._known[form.value, form.sharding, form.dtype, new.scopes] = self._products, form

    def _swapped(self, step: ExplicitStep) -> Iterator[ExplicitStep]:
        """The step, or the gather of what its operand was made of, then all that makes it."""
        if step.node is not None:
            self._products += class_of(step.node.call.name) == "product"
        runs = self._before(step)
        if not runs or step.move is None:
            yield step
            return
        (source,), axes = runs[0].inputs, step.move.axes
        (dim,) = {p.dim for axis in axes if isinstance(p := source.sharding.placement(axis), Shard)}
        sharding = source.sharding.with_replicate(*axes)
        key = source.value, sharding, source.dtype, step.scopes
        at, whole = self._known.get(key, (0, None))
        if whole is not None and self._products - at <= _AGAIN:
            self._known[key] = self._products, whole
        else:
            whole = self._form(source, sharding)
            move = replace(step.move, after=sharding, src_dim=dim)
            yield from self._noted(Change(source, whole, step.scopes, move, step.reason))
        for run in runs:
            (made,) = run.outputs
            split = {axis: factor for axis, factor in run.split.items() if axis not in axes}
            result = step.dst if run is runs[-1] else self._form(made, made.sharding.with_replicate(*axes))
            yield Run(run.node, (whole,), (result,), split)
            whole = result

    def _form(self, like: Form, sharding: Sharding) -> Form:
        return Form(self._fresh.name(like.value.name), like.value, sharding, like.dtype)

    def _before(self, step: ExplicitStep) -> list[Run]:
        """What made of a smaller tensor, of one that is gathered more often, or of a transposed one, what is gathered,
        in order; nothing if it does not lie so that it can be gathered before."""
        if step.move is None or not _gathers(step):
            return []
        runs, best, form, axes = list[Run](), list[Run](), step.src, step.move.axes
        first = least = self._bytes(form), -self._shared[form, axes]
        for run in self._runs(step):
            runs.insert(0, run)
            (form,) = run.inputs
            found = self._bytes(form), -self._shared[form, axes]
            if found < least:
                best, least = list(runs), found
        if least == first and runs and runs[-1].node.call.name == _TRANSPOSE:
            return runs[-1:]
        return best

    def _runs(self, step: ExplicitStep) -> Iterator[Run]:
        """The steps that made what is gathered, the last one first, as far back as it lies so that it can be gathered
        before."""
        assert step.move is not None
        form = step.src
        while (run := self._makers.get(form)) is not None and _is_split_along(run.inputs[0], step.move.axes):
            yield run
            (form,) = run.inputs

    def _ways(self, step: ExplicitStep) -> Iterator[tuple[Form, tuple[str, ...]]]:
        """What could be gathered instead, itself first."""
        assert step.move is not None
        for form in (step.src, *(run.inputs[0] for run in self._runs(step))):
            yield form, step.move.axes

    def _bytes(self, form: Form) -> int:
        return form.value.type.elements * itemsize(form.dtype)


def _gathers(step: ExplicitStep) -> bool:
    return step.move is not None and step.move.kind == _ALL_GATHER


def _is_split_along(form: Form, axes: tuple[str, ...]) -> bool:
    """Whether these axes split one dim of a form, of which no sum is pending."""
    placements = {form.sharding.placement(axis) for axis in axes}
    return len(placements) == 1 and isinstance(next(iter(placements)), Shard) and not form.sharding.partial
