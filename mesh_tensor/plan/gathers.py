"""What is gathered of a transposed tensor is gathered of the tensor itself.

    w_t = permute_dims(w)                   w_whole = all_gather(w)
    w_t_whole = all_gather(w_t)             w_t_whole = permute_dims(w_whole)

So a weight that is split by rows arrives as it was sent, is never copied transposed, and may be on its way as soon as
it is there; products take the transpose with them (`program.fuse`). What is needed again at once, as the last layer's
weight is by its gradient, is not gathered again, and what devices had whole a moment ago isn't either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mesh_tensor.annotations.names import Fresh
from mesh_tensor.base.collectives import BETWEEN
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.placement import Replicate, Shard
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.cost import class_of

from .explicit import Change, ExplicitGraph, ExplicitStep, Form, Run
from .ir import Scopes, Value

_ALL_GATHER = BETWEEN[Shard, Replicate].name
_AGAIN = CPU.tuning.products_ahead  # products after which what was gathered is still there


def gathered_first(made: ExplicitGraph) -> ExplicitGraph:
    """The same graph; transposes whose results nothing takes any more are left in."""
    return replace(made, steps=_Swaps(made).steps)


class _Swaps:
    def __init__(self, made: ExplicitGraph) -> None:
        self._transposes = {
            step.outputs[0]: step
            for step in made.steps
            if step.node is not None and step.node.call.name == "permute_dims"
        }
        # By value, layout, dtype and scopes: when it was made so, and as what.
        self._known: dict[tuple[Value, Sharding, str, Scopes], tuple[int, Form]] = {}
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
        """The step, or the gather of what was transposed, then the transposes."""
        if step.node is not None:
            self._products += class_of(step.node.call.name) == "product"
        source = self._transposed(step)
        if source is None or step.move is None:
            yield step
            return
        (dim,) = {p.dim for axis in step.move.axes if isinstance(p := source.sharding.placement(axis), Shard)}
        sharding = source.sharding
        for axis in step.move.axes:
            sharding = sharding.with_replicate(axis)
        at, whole = self._known.get((source.value, sharding, source.dtype, step.scopes), (0, None))
        if whole is None or self._products - at > _AGAIN:
            whole = Form(self._fresh.name(source.value.name), source.value, sharding, source.dtype)
            move = replace(step.move, after=sharding, src_dim=dim)
            yield from self._noted(Change(source, whole, step.scopes, move, step.reason))
        run = self._transposes[step.src]
        split = {axis: factor for axis, factor in run.split.items() if axis not in step.move.axes}
        yield Run(run.node, (whole,), (step.dst,), split)

    def _transposed(self, step: ExplicitStep) -> Form | None:
        """What is gathered after it was transposed, if it lies so that it can be before."""
        if step.move is None or step.move.kind != _ALL_GATHER or step.src not in self._transposes:
            return None
        (source,) = self._transposes[step.src].inputs
        placements = {source.sharding.placement(axis) for axis in step.move.axes}
        is_split = len(placements) == 1 and isinstance(next(iter(placements)), Shard)
        return source if is_split and not source.sharding.partial else None
