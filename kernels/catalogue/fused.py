"""Cases of the kernels that do the same to several tensors."""

from __future__ import annotations

from functools import partial

import torch

from kernels.fused import (
    gate_and_up,
    projections,
    projections_reference,
    put_both,
    put_both_reference,
    rope_of_both,
    rope_of_both_reference,
    updates_of_both,
    updates_of_both_reference,
)

from .case import EXACT, KernelCase, Sizes, normal, tensors, uniform

_BLOCKS = {"block_M": 8, "block_N": 4, "block_K": 8}


def _put_both(generator: torch.Generator, s: Sizes) -> list[torch.Tensor]:
    shapes = {
        "K": (s["tokens"], s["heads"], s["key_dim"]),
        "V": (s["tokens"], s["value_heads"], s["value_dim"]),
        "K_cache": (s["slots"], s["heads"], s["key_dim"]),
        "V_cache": (s["slots"], s["value_heads"], s["value_dim"]),
    }
    k, v, k_cache, v_cache = (torch.randn(shape, generator=generator) for shape in shapes.values())
    slot_of = torch.randperm(s["slots"], generator=generator)[: s["tokens"]].to(torch.int32)
    return [k, v, slot_of, k_cache, v_cache]


FUSED_CASES = (
    KernelCase(
        "rope_of_both",
        partial(rope_of_both, block_S=8),
        rope_of_both_reference,
        (
            {"seq": 24, "q_heads": 8, "k_heads": 4, "dim": 8},
            {"seq": 13, "q_heads": 6, "k_heads": 3, "dim": 6},
            {"seq": 3, "q_heads": 2, "k_heads": 2, "dim": 2},
        ),
        tensors(
            normal("seq q_heads dim"),
            normal("seq k_heads dim"),
            uniform("seq dim/2", -1.0, 1.0),
            uniform("seq dim/2", -1.0, 1.0),
        ),
        ("Q_out", "K_out"),
    ),
    KernelCase(
        "projections",
        partial(projections, **_BLOCKS),
        projections_reference,
        (
            {"rows": 16, "inner": 16, "q": 16, "kv": 8},
            {"rows": 13, "inner": 11, "q": 20, "kv": 12},
            {"rows": 3, "inner": 2, "q": 8, "kv": 4},
        ),
        tensors(normal("rows inner"), normal("inner q"), normal("inner kv"), normal("inner kv")),
        ("Q", "K", "V"),
    ),
    KernelCase(
        "gate_and_up",
        partial(gate_and_up, **_BLOCKS),
        projections_reference,
        (
            {"rows": 16, "inner": 16, "hidden": 16},
            {"rows": 13, "inner": 11, "hidden": 12},
            {"rows": 3, "inner": 2, "hidden": 4},
        ),
        tensors(normal("rows inner"), normal("inner hidden"), normal("inner hidden")),
        ("Gate", "Up"),
    ),
    KernelCase(
        "updates_of_both",
        partial(updates_of_both, block=8),
        updates_of_both_reference,
        ({"first": 32, "second": 16}, {"first": 29, "second": 45}, {"first": 3, "second": 1}),
        tensors(*[normal("first")] * 3, *[normal("second")] * 3),
        ("P", "M", "P2", "M2"),
        inouts=("P", "M", "P2", "M2"),
    ),
    KernelCase(
        "put_both",
        put_both,
        put_both_reference,
        (
            {"tokens": 4, "slots": 12, "heads": 4, "key_dim": 4, "value_heads": 8, "value_dim": 2},
            {"tokens": 5, "slots": 9, "heads": 3, "key_dim": 5, "value_heads": 5, "value_dim": 3},
            {"tokens": 1, "slots": 2, "heads": 1, "key_dim": 2, "value_heads": 2, "value_dim": 1},
        ),
        _put_both,
        ("K_cache", "V_cache"),
        EXACT,
        inouts=("K_cache", "V_cache"),
    ),
)
