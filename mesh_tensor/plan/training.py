"""A training step as one function: forward, backward, and the optimizer's step on every parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, relax

from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR, relax_function, source_names
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call_text import info_of
from mesh_tensor.rules.operator.narrowed import narrowed_call
from mesh_tensor.rules.operator.update import NUMBERS, slots_of

from .accumulate import Accumulated, Microbatches, Recompute, Seed, accumulated
from .gradient import SEED, Writer, forward_part, gradients_made, loss_of, reverse, taken_backward
from .ir import STATE_ATTR, Value, leaves
from .recompute import AUTO, Again, computed_again
from .updates import AnyOptimizer, Updates

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
    scale = _scale(writer.emit, list(gradients.values()), clip_norm, loss_scale)
    numbers = relax.Var(NUMBERS_NAME, info_of(NUMBERS))
    slots = {name: _slots(optimizer, value) for name, value in values.items()}
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
    """The loss and the gradients of the parameters."""
    if microbatches is not None:
        return accumulated(mod, function, parameters, microbatches, seed, recompute)
    joint = forward_part(mod, function)
    results = leaves(joint.graph.result)
    loss = loss_of(results, 0, function)
    if len(results) != 1 + len(buffers):
        refuse(f"{function!r} has {len(results)} results", fix="return the loss alone")
    values = [value for value in joint.graph.params if value.name in parameters]
    taken = Again(joint, recompute(joint.graph))
    reverse(joint, {loss: seed(joint.writer, loss)}, values, taken)
    made = gradients_made(joint, values, mod, function)
    gradients = {value.name: gradient for value, gradient in zip(values, made, strict=True)}
    copies: dict[str, tuple[str, ...]] = {name: (again,) for name, again in taken.copies.items()}
    return Accumulated(joint, joint.env[loss], gradients, copies)


def _slots(optimizer: AnyOptimizer, value: Value) -> dict[str, relax.Var]:
    kept = slots_of(optimizer, value.type.dtype)
    infos = {slot: relax.TensorStructInfo(value.type.shape, dtype) for slot, dtype in kept.items()}
    return {slot: relax.Var(f"opt_{slot}_{value.name}", info) for slot, info in infos.items()}


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


def _scale(
    emit: Emit, gradients: list[relax.Expr], clip_norm: float | None, loss_scale: relax.Var | None
) -> relax.Expr | None:
    """What gradients are multiplied with: min(1, clip_norm / the norm of all of them together), both of gradients that
    are divided by `loss_scale`."""
    one = relax.const(1.0, "float32")
    back = None if loss_scale is None else emit(relax.op.divide(one, loss_scale))
    if clip_norm is None:
        return back
    wide = [emit(relax.op.astype(g, "float32")) if g.struct_info.dtype != "float32" else g for g in gradients]
    total: relax.Expr | None = None
    for gradient in wide:
        square = emit(relax.op.sum(emit(relax.op.multiply(gradient, gradient))))
        total = square if total is None else emit(relax.op.add(total, square))
    root = emit(relax.op.sqrt(total))
    root = root if back is None else emit(relax.op.multiply(root, back))
    norm = emit(relax.op.add(root, relax.const(_EPSILON, "float32")), "gradient_norm")
    clip = emit(relax.op.minimum(emit(relax.op.divide(relax.const(clip_norm, "float32"), norm)), one), "clip")
    return clip if back is None else emit(relax.op.multiply(clip, back))
