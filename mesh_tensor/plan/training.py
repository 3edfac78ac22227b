"""A training step as one function: forward, backward, and the optimizer's step on every parameter, as what a
function computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from tvm import ir, relax

from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR, relax_function, source_names
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.optimizer import Optimizer
from mesh_tensor.rules.operator.call_text import info_of
from mesh_tensor.rules.operator.elementwise import narrowed_call
from mesh_tensor.rules.operator.update import NUMBERS, slots_of, update_call

from .accumulate import Accumulated, Microbatches, Recompute, Seed, accumulated
from .gradient import SEED, forward_part, gradients_made, loss_with, reverse, taken_backward
from .ir import STATE_ATTR, Value, leaves
from .joint import Writer
from .recompute import AUTO, Again, computed_again

NUMBERS_NAME = "opt_numbers"
LOSS_SCALE_NAME = "opt_loss_scale"
Emit = Callable[..., relax.Var]
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Kept:
    """What is kept for a parameter: slot -> the name of the function's parameter for it."""

    parameter: str
    slots: dict[str, str]


@dataclass(frozen=True, eq=False)
class TrainingFunction:
    """A module whose function is a step of training; what is kept per parameter; and the names of the same value in
    later microbatches."""

    mod: ir.IRModule
    kept: list[Kept]
    copies: dict[str, tuple[str, ...]]


def training_function(
    mod: ir.IRModule,
    function: str,
    parameters: list[str],
    optimizer: AnyOptimizer,
    clip_norm: float | None,
    buffers: Sequence[str] = (),
    *,
    scaled: bool = False,
    microbatches: Microbatches | None = None,
    recompute: str | int | Sequence[str] = (),
    reduce_dtype: str | None = None,
) -> TrainingFunction:
    """The module whose `function` takes, after what is no parameter to be trained, the numbers of a step, the
    parameters, what is kept for each, and the buffers; and returns the loss, then what is new of these, in the same
    order. Before, it returned the loss and, if there are any, new values for the parameters `buffers`. The attribute
    `mesh_tensor_state` says so: results lie on a mesh as what they replace.

    scaled        what gradients are taken of is the loss times a number, which comes after the numbers of the step
    microbatches  the function is that of one of these
    recompute     what the backward part computes again (see `computed_again`)
    reduce_dtype  what devices add up their parts of gradients in; None: in float32 at least

    Raises:
        MeshTensorError: as `gradient_function`, and as `accumulated`.
    """
    loss_scale = relax.Var(LOSS_SCALE_NAME, relax.TensorStructInfo((), "float32")) if scaled else None
    func = relax_function(mod, function)
    asks = recompute == AUTO or isinstance(recompute, int)
    taken = taken_backward(mod, function, parameters) if asks else ()
    again = partial(computed_again, recompute=recompute, func=func, taken=taken)
    found = _gradients(mod, function, parameters, buffers, microbatches, partial(_seed, loss_scale), again)
    joint, gradients = found.joint, found.gradients
    if reduce_dtype is not None:
        narrow = {name: narrowed_call(gradient, reduce_dtype) for name, gradient in gradients.items()}
        gradients = {name: joint.writer.emit(call, f"d_{name}") for name, call in narrow.items()}
    writer, graph = joint.writer, joint.graph
    values = {value.name: value for value in graph.params if value.name in parameters}
    if isinstance(optimizer, WrittenOptimizer):  # widened once: what clips them takes the same sums
        wide = {name: "float32" if v.type.dtype in NARROW else v.type.dtype for name, v in values.items()}
        gradients = {name: _typed(writer.emit, gradient, wide[name]) for name, gradient in gradients.items()}
    scale = _scale(writer.emit, list(gradients.values()), clip_norm, loss_scale)
    numbers = relax.Var(NUMBERS_NAME, info_of(NUMBERS))
    slots = {name: _slots(optimizer, value, writer) for name, value in values.items()}
    update = Updates(optimizer, writer, numbers, scale)
    made = {  # in the order of the gradients: the first ones are updated while the last ones are on their way
        name: update(name, joint.env[value], gradients[name], list(slots[name].values()))
        for name, value in reversed(values.items())
    }
    new = [made[name][0] for name in values]
    new_slots = [slot for name in values for slot in made[name][1:]]
    variables = dict(zip((value.name for value in graph.params), joint.params, strict=True))
    state = [*(variables[name] for name in values), *(var for mine in slots.values() for var in mine.values())]
    state += [variables[name] for name in buffers]
    given = [numbers] if loss_scale is None else [numbers, loss_scale]
    joint.params = [*(var for var in variables.values() if var not in state), *given, *state]
    rest = [joint.env[value] for value in leaves(graph.result)[1:]]
    joint.gradients = {value: d for value, d in joint.gradients.items() if value not in values.values()}
    written = writer.module(mod, function, joint, relax.Tuple([found.loss, *new, *new_slots, *rest]))
    written.update(ir.IRModule(dict(update.functions)))
    func = written[function].with_attr(STATE_ATTR, {var.name_hint: n for n, var in enumerate(state, 1)})
    func = func.with_attr(SOURCE_NAMES_ATTR, {**source_names(func), **_source_names(source_names(func), slots)})
    written.update_func(written.get_global_var(function), func)
    kept = [Kept(name, {slot: var.name_hint for slot, var in mine.items()}) for name, mine in slots.items()]
    return TrainingFunction(written, kept, found.copies)


def _gradients(
    mod: ir.IRModule,
    function: str,
    parameters: list[str],
    buffers: Sequence[str],
    microbatches: Microbatches | None,
    seed: Seed,
    recompute: Recompute,
) -> Accumulated:
    if microbatches is not None:
        return accumulated(mod, function, parameters, microbatches, seed, recompute, buffers)
    joint = forward_part(mod, function)
    results = leaves(joint.graph.result)
    loss = loss_with(results, len(buffers), function)
    values = [value for value in joint.graph.params if value.name in parameters]
    taken = Again(joint, recompute(joint.graph))
    reverse(joint, {loss: seed(joint.writer, loss)}, values, taken)
    made = gradients_made(joint, values, mod, function)
    gradients = {value.name: gradient for value, gradient in zip(values, made, strict=True)}
    copies: dict[str, tuple[str, ...]] = {name: (again,) for name, again in taken.copies.items()}
    return Accumulated(joint, joint.env[loss], gradients, copies)


def _slots(optimizer: AnyOptimizer, value: Value, writer: Writer) -> dict[str, relax.Var]:
    kept = slots_of(optimizer, value.type.dtype)
    infos = {slot: relax.TensorStructInfo(value.type.shape, dtype) for slot, dtype in kept.items()}
    return {slot: writer.kept(f"opt_{slot}_{value.name}", info) for slot, info in infos.items()}


def _source_names(names: dict[str, str], slots: dict[str, dict[str, relax.Var]]) -> dict[str, str]:
    """What is kept for "fc.weight" is called "opt.exp_avg.fc.weight"."""
    known = {ours: theirs for theirs, ours in reversed(names.items())}
    return {
        f"opt.{slot}.{known.get(name, name)}": var.name_hint
        for name, mine in slots.items()
        for slot, var in mine.items()
    }


def _seed(loss_scale: relax.Var | None, writer: Writer, loss: Value) -> relax.Expr:
    """The gradient of the loss by itself, times `loss_scale`."""
    emit = writer.emit
    if loss_scale is None:
        return emit(relax.op.ones(loss.type.shape, loss.type.dtype), SEED)
    scale = loss_scale if loss.type.dtype == "float32" else emit(relax.op.astype(loss_scale, loss.type.dtype))
    return emit(relax.op.reshape(scale, loss.type.shape), SEED)


def _typed(emit: Emit, gradient: relax.Expr, dtype: str) -> relax.Expr:
    return gradient if gradient.struct_info.dtype == dtype else emit(relax.op.astype(gradient, dtype))


def _scale(
    emit: Emit, gradients: list[relax.Expr], clip_norm: float | None, loss_scale: relax.Var | None
) -> relax.Expr | None:
    """What gradients are multiplied with: min(1, clip_norm / the norm of all of them together), both of gradients that
    are divided by `loss_scale`."""
    one = relax.const(1.0, "float32")
    back = None if loss_scale is None else emit(relax.op.divide(one, loss_scale))
    if clip_norm is None:
        return back
    wide = [_typed(emit, gradient, "float32") for gradient in gradients]
    total: relax.Expr | None = None
    for gradient in wide:
        square = emit(relax.op.sum(emit(relax.op.multiply(gradient, gradient))))
        total = square if total is None else emit(relax.op.add(total, square))
    root = emit(relax.op.sqrt(total))
    root = root if back is None else emit(relax.op.multiply(root, back))
    norm = emit(relax.op.add(root, relax.const(_EPSILON, "float32")), "gradient_norm")
    clip = emit(relax.op.minimum(emit(relax.op.divide(relax.const(clip_norm, "float32"), norm)), one), "clip")
    return clip if back is None else emit(relax.op.multiply(clip, back))


op = relax.op


@dataclass(frozen=True, eq=False)
class WrittenOptimizer:
    """An optimizer that somebody wrote: `function(shape, dtype)` takes (parameter, gradient, learning rate, number of
    the step, *slots) and returns (new parameter, *new slots)."""

    name: str
    slots: tuple[str, ...]
    function: Callable[[tuple[int, ...], str], relax.Function]
    options: Mapping[str, float] = field(default_factory=dict)

    def numbers(self, step: int, lr: float) -> tuple[float, ...]:
        """As `Optimizer.numbers`."""
        return lr, 1.0, 1.0, float(step)


AnyOptimizer: TypeAlias = "Optimizer | WrittenOptimizer"


class Updates:
    """Writes the steps; `functions` are those that they call."""

    def __init__(self, optimizer: AnyOptimizer, writer: Writer, numbers: relax.Var, scale: relax.Expr | None) -> None:
        self._optimizer, self._writer, self._numbers, self._scale = optimizer, writer, numbers, scale
        self._by_type: dict[tuple[tuple[int, ...], str], ir.GlobalVar] = {}
        self._scalars: tuple[relax.Expr, relax.Expr] | None = None
        self.functions: dict[ir.GlobalVar, relax.Function] = {}

    def __call__(
        self, name: str, parameter: relax.Expr, gradient: relax.Expr, slots: list[relax.Expr]
    ) -> list[relax.Expr]:
        """The new parameter and its new slots."""
        emit = self._writer.emit
        if isinstance(self._optimizer, WrittenOptimizer):
            return self._called(self._optimizer, name, parameter, gradient, slots)
        call = update_call(self._optimizer, parameter, gradient, slots, self._numbers, self._scale)
        made = emit(call, f"new_{name}")
        names = [name, *(slot.name_hint for slot in slots)]
        return [emit(relax.TupleGetItem(made, n), f"new_{each}") for n, each in enumerate(names)]

    def _called(
        self,
        optimizer: WrittenOptimizer,
        name: str,
        parameter: relax.Expr,
        gradient: relax.Expr,
        slots: list[relax.Expr],
    ) -> list[relax.Expr]:
        """By a call of its function. Where the gradient is not finite the parameter is not, whatever is made of it."""
        emit, narrow = self._writer.emit, parameter.struct_info.dtype
        wide = slots[-1] if narrow in NARROW else parameter
        shape, dtype = tuple(map(int, wide.struct_info.shape)), wide.struct_info.dtype
        if self._scale is not None:
            factor = self._scale if dtype == "float32" else emit(op.astype(self._scale, dtype))
            gradient = emit(op.multiply(gradient, factor))
        own = slots[: len(optimizer.slots)]
        callee = self._function(optimizer, shape, dtype)
        made = emit(relax.Call(callee, [wide, gradient, *self._lr_and_step(), *own]), f"new_{name}")
        new, *kept = [emit(relax.TupleGetItem(made, n), f"new_{name}") for n in range(1 + len(own))]
        nothing = relax.const(float("nan"), dtype)
        new = emit(op.where(emit(op.isfinite(gradient)), new, nothing), f"new_{name}")
        if wide is parameter:
            return [new, *kept]
        return [emit(op.astype(new, narrow), f"new_{name}"), *kept, new]

    def _function(self, optimizer: WrittenOptimizer, shape: tuple[int, ...], dtype: str) -> ir.GlobalVar:
        if (shape, dtype) not in self._by_type:
            function = optimizer.function(shape, dtype)
            var = ir.GlobalVar(f"optimizer_{len(self._by_type)}")
            relax.expr._update_struct_info(var, function.struct_info)
            self._by_type[shape, dtype], self.functions[var] = var, function
        return self._by_type[shape, dtype]

    def _lr_and_step(self) -> tuple[relax.Expr, relax.Expr]:
        """As numbers in float32."""
        if self._scalars is None:
            self._scalars = self._number(0, "lr"), self._number(3, "step")
        return self._scalars

    def _number(self, index: int, name: str) -> relax.Expr:
        emit = self._writer.emit
        part = emit(op.squeeze(emit(op.strided_slice(self._numbers, [0], [index], [index + 1])), [0]))
        return emit(op.astype(part, "float32"), name)
