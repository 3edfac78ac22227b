"""The ways to call a kernel: which parameters are passed, and which are made and returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tvm import tirx

from mesh_tensor.annotations.annotation import is_int
from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown

from .signature import Signature

OutIdx = int | str | Sequence[int | str] | None


@dataclass(frozen=True)
class CallForm:
    """One way to call a kernel: the parameters that are passed, and those that are returned."""

    passed: tuple[str, ...]
    returned: tuple[str, ...]


def given_out_idx(func: tirx.PrimFunc, out_idx: OutIdx) -> list[Any] | None:
    """`out_idx` as the caller states it, or else the kernel's own `tilelang_out_idx`, as a list."""
    if out_idx is None:
        of_kernel = (func.attrs or {}).get("tilelang_out_idx")
        return None if of_kernel is None else [int(index) for index in of_kernel]
    return list(out_idx) if isinstance(out_idx, Iterable) and not isinstance(out_idx, str) else [out_idx]


def checked_out_idx(out_idx: list[Any], signature: Signature, writes: frozenset[str]) -> tuple[str, ...]:
    """The names of the parameters that are made and returned, or a MeshTensorError with all that is wrong."""
    names = [param.name for param in signature.params]
    problems: list[str] = []
    made: list[str] = []
    for index in out_idx:
        if isinstance(index, str) and index not in names:
            problems.append(f"out_idx has {index!r}, which is no parameter{did_you_mean(index, names)}")
        elif not isinstance(index, str) and (not is_int(index) or not -len(names) <= index < len(names)):
            problems.append(f"out_idx has {shown(index)}, but there are {len(names)} parameters")
        elif (name := index if isinstance(index, str) else names[index]) not in writes:
            problems.append(f"out_idx has {index!r}, but the kernel does not write parameter {name!r}")
        elif name in made:
            problems.append(f"out_idx has parameter {name!r} twice")
        else:
            made.append(name)
    if problems:
        written = ", ".join(f"{index}: {name}" for index, name in enumerate(names) if name in writes)
        fix = f"use the positions, or the names, of what it writes ({written})"
        refuse(problems, where=f"kernel {signature.name!r}", fix=fix)
    return tuple(made)


def call_forms(
    signature: Signature, out_idx: list[Any] | None, reads: frozenset[str], writes: frozenset[str]
) -> dict[int, CallForm]:
    """The ways to call a kernel that reads and writes these parameters, by the number of arguments."""
    names = tuple(param.name for param in signature.params)
    written = tuple(name for name in names if name in writes)
    if out_idx is not None:
        made = checked_out_idx(out_idx, signature, writes)
        passed = tuple(name for name in names if name not in made)
        return {len(passed): CallForm(passed, made)}
    needed = tuple(name for name in names if name in reads or name not in writes)
    return {len(names): CallForm(names, written), len(needed): CallForm(needed, written)}


def refuse_count(kernel: str, count: int, forms: Mapping[int, CallForm]) -> NoReturn:
    """Raise a MeshTensorError: `kernel` can't be called with that many arguments."""
    expected = sorted(f"{len(form.passed)} ({', '.join(form.passed)})" for form in forms.values())
    refuse(
        f"{count} arguments, but expected {' or '.join(expected)}",
        where=f"call of kernel {kernel!r}",
        fix="pass the tensors in the order of the kernel's parameters",
    )


def in_order(
    kernel: str, params: Sequence[str], args: Sequence[Any], named: Mapping[str, Any], forms: Mapping[int, CallForm]
) -> tuple[Any, ...]:
    """The arguments of a call in the order of a form's parameters, those given by name in their places.

    Raises:
        MeshTensorError: names all the arguments that are missing, unknown, or given twice.
    """
    wrong = {count: _misfits(form, params, args, named) for count, form in forms.items()}
    best = min(wrong, key=lambda count: (len(wrong[count]), -count))
    if wrong[best]:
        calls = " or ".join(f"{kernel}({', '.join(form.passed)})" for _, form in sorted(forms.items()))
        refuse(wrong[best], where=f"call of kernel {kernel!r}", fix=f"call it as {calls}, by position or by name")
    return (*args, *(named[name] for name in forms[best].passed[len(args) :]))


def _misfits(form: CallForm, params: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Why these arguments are not those of the form."""
    by_position, expected = form.passed[: len(args)], form.passed[len(args) :]
    found = (
        [f"{len(args)} arguments by position, but it takes {len(form.passed)}"] if len(args) > len(form.passed) else []
    )
    found += [f"no argument is given for {name!r}" for name in expected if name not in named]
    for name in named:
        if name in by_position:
            found.append(f"{name!r} is given twice, by position and by name")
        elif name not in form.passed and name in params:
            found.append(f"{name!r} is made by the kernel and returned")
        elif name not in form.passed:
            found.append(f"there is no parameter {name!r} (parameters: {listing(params)}){did_you_mean(name, params)}")
    return found
