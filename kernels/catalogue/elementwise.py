"""Cases of the kernels that compute every element of the output on its own: element-wise, transpose, gather, RoPE."""

from __future__ import annotations

from functools import partial

import torch

from kernels import elementwise
from kernels.embedding import embedding, embedding_reference
from kernels.packed import packed_attention, packed_attention_reference
from kernels.rope import packed_rope, packed_rope_reference, rope, rope_reference, rope_tables
from kernels.transpose import tile_transpose, transpose, transpose_reference

from .case import EXACT, FLOAT32, KernelCase, Sizes, integers, normal, tensors, uniform
from .sizes import MN

_BLOCKS = {"block_M": 8, "block_N": 16}


def _cast(dtype: torch.dtype, out: torch.dtype) -> KernelCase:
    names = {"dtype": str(dtype).removeprefix("torch."), "out_dtype": str(out).removeprefix("torch.")}
    return KernelCase(
        f"cast_{names['dtype']}_{names['out_dtype']}",
        partial(elementwise.cast, **_BLOCKS, **names),
        lambda a: a.to(out),
        MN,
        tensors(uniform("M N", -100.0, 100.0, dtype)),
        ("B",),
        EXACT,
    )


def _starts(generator: torch.Generator, rows: int, sequences: int, longest: int) -> torch.Tensor:
    """Where sequences of some lengths, at most `longest`, start in so many rows, and where the last one ends."""
    lengths = torch.ones(sequences, dtype=torch.int32)
    for _ in range(rows - sequences):
        shorter = (lengths < longest).nonzero()[:, 0]
        lengths[shorter[torch.randint(0, len(shorter), (1,), generator=generator)]] += 1
    return torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()


def _packed_tokens(generator: torch.Generator, s: Sizes) -> list[torch.Tensor]:
    """Packed sequences, the tokens in any order."""
    starts = _starts(generator, s["tokens"], s["sequences"], s["longest"])
    places = torch.tensor([(b, i) for b, length in enumerate(starts.diff().tolist()) for i in range(length)]).int()
    place_of = places[torch.randperm(s["tokens"], generator=generator)]
    x = torch.randn(s["tokens"], s["heads"], s["dim"], generator=generator)
    return [x, starts[:-1].contiguous(), place_of, *rope_tables(s["longest"], s["dim"])]


def _packed_rows(generator: torch.Generator, s: Sizes) -> list[torch.Tensor]:
    x = torch.randn(3, s["rows"], s["dim"], generator=generator)
    return [*x.unbind(), _starts(generator, s["rows"], s["sequences"], s["longest"])]


def _rope(name: str, interleaved: bool) -> KernelCase:
    return KernelCase(
        name,
        partial(rope, interleaved=interleaved, block_S=8),
        partial(rope_reference, interleaved=interleaved),
        (
            {"seq": 24, "heads": 4, "dim": 16},
            {"seq": 13, "heads": 3, "dim": 10},
            {"seq": 3, "heads": 5, "dim": 2},
        ),
        tensors(normal("seq heads dim"), uniform("seq dim/2", -1.0, 1.0), uniform("seq dim/2", -1.0, 1.0)),
        ("out",),
    )


ARITHMETIC_CASES = (
    KernelCase(
        "vector_add",
        partial(elementwise.vector_add, block_N=16),
        elementwise.add_reference,
        ({"N": 48}, {"N": 37}, {"N": 5}),
        tensors(normal("N"), normal("N")),
        ("C",),
        EXACT,
    ),
    KernelCase(
        "add",
        partial(elementwise.add, **_BLOCKS),
        elementwise.add_reference,
        MN,
        tensors(normal("M N"), normal("M N")),
        ("C",),
        EXACT,
    ),
    *(
        KernelCase(
            f"add_bias_dim{dim}",
            partial(elementwise.add_bias, **_BLOCKS, dim=dim),
            partial(elementwise.add_bias_reference, dim=dim),
            MN,
            tensors(normal("M N"), normal("MN"[dim])),
            ("C",),
            EXACT,
        )
        for dim in (0, 1)
    ),
    KernelCase(
        "activation_chain",
        partial(elementwise.activation_chain, **_BLOCKS),
        elementwise.activation_chain_reference,
        MN,
        tensors(normal("M N"), normal("M N")),
        ("C",),
        FLOAT32,
    ),
    KernelCase(
        "add_positions",
        partial(elementwise.add_positions, **_BLOCKS),
        elementwise.add_positions_reference,
        MN,
        tensors(normal("M N")),
        ("B",),
        EXACT,
    ),
    _cast(torch.float32, torch.float16),
    _cast(torch.float32, torch.bfloat16),
    _cast(torch.float16, torch.float32),
    _cast(torch.float32, torch.int32),
)

MOVEMENT_CASES = (
    *(
        KernelCase(
            kernel.__name__,
            partial(kernel, **_BLOCKS),
            transpose_reference,
            MN,
            tensors(normal("M N")),
            ("B",),
            EXACT,
        )
        for kernel in (transpose, tile_transpose)
    ),
    KernelCase(
        "embedding",
        partial(embedding, **_BLOCKS),
        embedding_reference,
        (
            {"tokens": 24, "vocabulary": 48, "features": 24},
            {"tokens": 13, "vocabulary": 30, "features": 7},
            {"tokens": 5, "vocabulary": 2, "features": 19},
        ),
        tensors(integers("tokens", 0, "vocabulary"), normal("vocabulary features")),
        ("out",),
        EXACT,
    ),
    _rope("rope", interleaved=False),
    _rope("rope_interleaved", interleaved=True),
    KernelCase(
        "packed_attention",
        partial(packed_attention, block=4),
        packed_attention_reference,
        (
            {"rows": 12, "sequences": 2, "longest": 8, "dim": 4},
            {"rows": 13, "sequences": 3, "longest": 7, "dim": 5},
            {"rows": 1, "sequences": 1, "longest": 1, "dim": 1},
        ),
        _packed_rows,
        ("Out",),
    ),
    KernelCase(
        "packed_rope",
        packed_rope,
        packed_rope_reference,
        (
            {"tokens": 8, "sequences": 2, "longest": 6, "heads": 2, "dim": 4},
            {"tokens": 7, "sequences": 2, "longest": 5, "heads": 1, "dim": 6},
            {"tokens": 1, "sequences": 1, "longest": 1, "heads": 1, "dim": 2},
        ),
        _packed_tokens,
        ("out",),
    ),
)

ELEMENTWISE_CASES = (*ARITHMETIC_CASES, *MOVEMENT_CASES)
