"""Where a program writes, torch itself takes it apart, and overrides each of 500 operators that are made of others
while it does, registering 20 functions for each: most of what the import of a small program takes. Which functions
these are depends on the operator and on what overrides it; tests import a thousand programs, so here they are made
once, and put in place and taken away together.

It also looks up each such operator in each namespace of operators; here only where there are others than before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import exported_program

_override, _materialize = exported_program._override_composite_implicit_decomp, utils._materialize_cpp_cia_ops
Kernels = dict[Any, Any]


@dataclass(frozen=True)
class _Overridden:
    """What an operator has while `made_of` overrides it: its kernels, and what fake tensors do, if it has no rule of
    its own; `before`: the kernels that it had."""

    made_of: Callable[..., Any]
    before: Kernels
    kernels: Kernels
    fake: Callable[..., Any] | None


_known: dict[Any, _Overridden] = {}
_materialized: set[str] = set()


def _of(op: Any, made_of: Callable[..., Any]) -> _Overridden:
    known = _known.get(op)
    if known is None or known.made_of is not made_of or known.before != op.py_kernels:
        before, had_rule = op.py_kernels.copy(), op in fake_impls.op_implementations_dict
        with _override({op: made_of}):
            fake = None if had_rule else fake_impls.op_implementations_dict[op]
            known = _known[op] = _Overridden(made_of, before, op.py_kernels.copy(), fake)
    return known


@contextmanager
def overridden(made_of: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """What torch's `_override_composite_implicit_decomp` does."""
    rules = fake_impls.op_implementations_dict
    found = {op: _of(op, how) for op, how in made_of.items()}
    for op, one in found.items():
        op.py_kernels.clear()
        op.py_kernels.update(one.kernels)
        op._dispatch_cache.clear()
        if one.fake is not None:
            rules.setdefault(op, one.fake)
    try:
        yield
    finally:
        for op, one in found.items():
            op.py_kernels.clear()
            op.py_kernels.update(one.before)
            op._dispatch_cache.clear()
            rules.pop(op, None)


def materialized() -> None:
    """What torch's `_materialize_cpp_cia_ops` does: look up operators, which stay then."""
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    if not registered <= _materialized:
        _materialize()
        _materialized.update(registered)


def install() -> None:
    """From now on, in this process."""
    exported_program._override_composite_implicit_decomp = overridden
    utils._materialize_cpp_cia_ops = materialized
