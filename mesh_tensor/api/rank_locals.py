"""Local tensors as arguments: what a rank holds of every tensor tells how large the whole tensors are, or is checked
against what the caller says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tvm import tirx

from mesh_tensor.annotations.annotate import evaluate, fits
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.runtime.ambient import why_not_plain
from mesh_tensor.runtime.ranks.dtensor import is_dtensor
from mesh_tensor.runtime.ranks.tiling import Tiling

from .signature import Param, Signature, Sizes, words

Shapes = Mapping[str, Sequence[int]]


def global_sizes(
    signature: Signature, layouts: Mapping[str, Sharding], given: Mapping[str, Any], shapes: Shapes, where: str
) -> tuple[Sizes, bool]:
    """The sizes of the symbols: from `shapes`, global ones by parameter; else from dims that are not split; else from
    split ones, as if their tiles were even; and whether `shapes` says them all. `layouts`: how the annotated parameters
    lie."""
    exact = _said_sizes(signature, shapes, where)
    if signature.symbols and len(exact) == len(signature.symbols):
        _check_scalars(signature, given, exact, where)
        return exact, True
    even: dict[tirx.Var, dict[int, str]] = {var: {} for var in signature.symbols}
    for name, value in given.items():
        if name not in signature.tensors and isinstance(value, int):
            exact.setdefault(next(p.var for p in signature.params if p.name == name), value)
    for name, param in signature.tensors.items():
        for dim, size in enumerate(param.shape or ()):
            if not isinstance(size, tirx.Var):
                continue
            value, layout = given.get(name), layouts.get(name)
            if layout is None or not isinstance(value, torch.Tensor) or value.ndim != layout.ndim:
                continue
            shards = layout.num_shards(dim)
            if shards == 1:
                exact.setdefault(size, value.shape[dim])
            else:
                even[size].setdefault(value.shape[dim] * shards, f"dim {dim} of {name!r} as {shards} tiles")
    problems = [
        f"local tensors don't say how large {var.name} is{_candidates(even[var])}"
        for var in signature.symbols
        if var not in exact and len(even[var]) != 1
    ]
    if problems:
        refuse(problems, where=where, why="the kernel has symbolic dims", fix=_say(signature))
    return {var: exact.get(var, next(iter(even[var]), 0)) for var in signature.symbols}, False


def guesses(signature: Signature, layouts: Mapping[str, Sharding], given: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether some size is taken from tiles as if they were even. Ranks may differ in what they guess, not in whether
    they do: that is alike on all that make the same call, whatever their tensors are."""
    said = shapes if isinstance(shapes, Mapping) else {}
    known = {p.var for p in signature.params if not p.is_tensor and p.name in given}
    for name, param in signature.tensors.items():
        layout = layouts.get(name) if name in given else None
        for dim, size in enumerate(param.shape or ()):
            if name in said or (layout is not None and layout.num_shards(dim) == 1):
                known.add(size)
    return any(var not in known for var in signature.symbols)


def said_key(shapes: Any) -> str:
    """Equal for shapes that say the same, whatever they are made of."""
    return repr([(name, _dims(shape)) for name, shape in shapes.items()] if isinstance(shapes, Mapping) else shapes)


def shares_memory(value: object) -> str:
    """What is wrong with a tensor to be written, if there is something: several of its elements are one in memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return f"is written, but has elements in one place of memory (strides {value.stride()})"
    return ""


def problem(tiling: Tiling, device: torch.device, value: Any) -> str:
    """What is wrong with a local tensor, if there is something: it is neither a valid part nor a whole tile."""
    if isinstance(value, torch.Tensor) and (found := why_not_plain(value)):
        return found[0]
    if (
        isinstance(value, torch.Tensor)
        and not is_dtensor(value)
        and value.dtype is tiling.dtype
        and (value.shape == tiling.tile_shape or value.shape == tiling.valid_shape)
        and value.device == device
    ):
        return ""
    if is_dtensor(value) or not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, but expected a plain torch tensor"
    shapes = " or ".join(str(tuple(s)) for s in dict.fromkeys((tiling.valid_shape, tiling.tile_shape)))
    is_ = f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return f"{is_}, but expected {shapes} {tiling.dtype} on {device}"


def _said_sizes(signature: Signature, shapes: Shapes, where: str) -> Sizes:
    """The sizes of symbols that follow from the global shapes that the caller says. These have to fit the parameters
    and each other."""
    problems, sizes = [], dict[tirx.Var, int]()
    if not isinstance(shapes, Mapping):
        refuse(f"shapes is a {type(shapes).__name__}, but expected a dict", where=where, fix=_say(signature))
    for name, said in shapes.items():
        shape = _dims(said)
        param = signature.tensors.get(name)
        if param is None:
            problems.append(f"shapes has {name!r}, but the tensors are {listing(tuple(signature.tensors))}")
        elif not _fits(param, shape, sizes):
            problems.append(f"shapes says {name!r} is {shape}, but it is {words(param.shape, sizes)}")
    if problems:
        refuse(problems, where=where, fix=_say(signature))
    return sizes


def _dims(said: Any) -> tuple[Any, ...]:
    return tuple(said) if isinstance(said, Sequence) else (said,)


def _check_scalars(signature: Signature, given: Mapping[str, Any], sizes: Sizes, where: str) -> None:
    """Numbers among the arguments that are sizes, too, are those that the shapes say."""
    problems = [
        f"parameter {p.name!r}: {given[p.name]}, but shapes says it is {sizes[p.var]}"
        for p in signature.params
        if not p.is_tensor and p.var in sizes and given.get(p.name, sizes[p.var]) != sizes[p.var]
    ]
    if problems:
        refuse(problems, where=where, fix=_say(signature))


def _fits(param: Param, shape: Sequence[int], sizes: Sizes) -> bool:
    """Learns what the symbols are."""
    learnt, expected = dict(sizes), param.shape or ()
    if not all(isinstance(size, int) and size >= 0 for size in shape) or not fits(expected, shape, learnt):
        return False
    if any(evaluate(size, learnt) not in (None, actual) for size, actual in zip(expected, shape, strict=True)):
        return False
    sizes.update(learnt)
    return True


def _candidates(found: Mapping[int, str]) -> str:
    return f": {', '.join(f'{size} by {words}' for size, words in found.items())}" if found else ""


def _say(signature: Signature) -> str:
    name, param = next(iter(signature.tensors.items()))
    return f"say the whole tensors' shapes: local(..., shapes={{{name!r}: {words(param.shape)}}}), or pass DTensors"
