"""Cases of the kernels that serve models: key heads in groups, quantized and sparse products, schedules, scalars."""

from __future__ import annotations

from functools import partial

import torch

from kernels import schedules, sparse
from kernels.grouped_gradient import grouped_weight_gradient, grouped_weight_gradient_reference
from kernels.grouped_query import (
    grouped_decode,
    grouped_decode_reference,
    grouped_key_gradient,
    grouped_key_gradient_reference,
    split_decode,
    split_decode_reference,
)
from kernels.indexer import index_scores, index_scores_reference
from kernels.linear_attention import (
    linear_attention,
    linear_attention_reference,
    query_and_value_gradients,
    query_and_value_gradients_reference,
    value_gradient,
    value_gradient_reference,
)
from kernels.matmul import matmul_reference
from kernels.paged import (
    paged_attention,
    paged_attention_reference,
    paged_latent_attention,
    paged_latent_attention_reference,
    staged_histogram,
)
from kernels.quantized import (
    block_scaled_matmul,
    block_scaled_matmul_reference,
    dequantize,
    dequantize_reference,
    packed_matmul,
    packed_matmul_reference,
)
from kernels.recurrences import advantages, advantages_reference

from .case import EXACT, FLOAT32, KernelCase, KernelFactory, Maker, Sizes, integers, normal, tensors, uniform
from .sizes import MN, MNK

_BLOCKS = {"block_M": 8, "block_N": 8, "block_K": 8}
_HEADS = (
    {"batch": 2, "heads": 8, "groups": 4, "seq": 16, "dim": 8},
    {"batch": 3, "heads": 6, "groups": 3, "seq": 13, "dim": 5},
    {"batch": 1, "heads": 4, "groups": 1, "seq": 7, "dim": 8},
)
_SEQUENCES = (
    {"batch": 2, "length": 16, "heads": 4, "key_dim": 8, "value_dim": 4},
    {"batch": 3, "length": 12, "heads": 3, "key_dim": 5, "value_dim": 7},
    {"batch": 1, "length": 4, "heads": 1, "key_dim": 3, "value_dim": 2},
)
_GROUPED_K = ({"M": 24, "N": 48, "K": 48}, {"M": 13, "N": 30, "K": 24}, {"M": 3, "N": 5, "K": 8})
_NK = ({"N": 24, "K": 48}, {"N": 13, "K": 24}, {"N": 3, "K": 8})
_PARTS_OF_K = ({"M": 24, "N": 16, "K": 32}, {"M": 13, "N": 30, "K": 64}, {"M": 3, "N": 5, "K": 32})
_EXPERTS = (
    {"groups": 4, "rows": 48, "N": 16, "K": 24},
    {"groups": 3, "rows": 24, "N": 13, "K": 10},
    {"groups": 2, "rows": 8, "N": 7, "K": 3},
)
_MIXTURES = (
    {"experts": 4, "tokens": 12, "hidden": 16, "model": 24},
    {"experts": 3, "tokens": 13, "hidden": 10, "model": 7},
)
_LENGTHS = ({"batch": 4, "rows": 24, "N": 12}, {"batch": 3, "rows": 13, "N": 7}, {"batch": 1, "rows": 5, "N": 3})
_PAGES = (
    {"batch": 2, "heads": 4, "pages": 8, "table": 4, "dim": 8},
    {"batch": 3, "heads": 2, "pages": 7, "table": 3, "dim": 5},
    {"batch": 1, "heads": 1, "pages": 3, "table": 2, "dim": 3},
)
_ROWS = ({"rows": 48, "dim": 8}, {"rows": 30, "dim": 13}, {"rows": 7, "dim": 3})


def _offsets(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """Where groups of rows start and end; some have none."""
    inner = torch.randint(0, sizes["rows"] + 1, (sizes["groups"] - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([sizes["rows"]])]).int()


def _counts(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """How many rows groups have; some have none."""
    return _offsets(generator, sizes).diff()


def _mask(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """Which blocks of 8 count."""
    return torch.rand([-(-sizes[name] // 8) for name in "MNK"], generator=generator) < 0.6


def _product(kernel: KernelFactory, *more: Maker, **options: object) -> KernelCase:
    name = "_".join([kernel.__name__, *(str(key) for key in options)])
    inputs = tensors(normal("M K"), normal("K N"), *more)
    return KernelCase(name, partial(kernel, **_BLOCKS, **options), matmul_reference, MNK, inputs, ("C",))


def _scaled_mean(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a.double() @ b.double() / d.double() + bias.double()).float()


def _causal(name: str, start: str) -> KernelCase:
    def reference(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = s.double().triu() if start in ("row", "on") else s.double().tril()
        return (seen @ v.double()).float()

    build = partial(schedules.causal_product, block=8, start=start)
    return KernelCase(name, build, reference, _ROWS, tensors(normal("rows rows"), normal("rows dim")), ("C",))


def _ragged(a: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(a.shape[1])[None, :, None] < lengths[:, None, None]
    return (a.double() * seen).sum(1).float()


def _queries(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    return torch.randn((4 * sizes["M"], 16), generator=generator)


def _weights(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    return torch.rand((sizes["M"], 4), generator=generator)


_PACKED = integers("N K/2", 0, 256, torch.uint8)

INFERENCE_CASES: tuple[KernelCase, ...] = (
    KernelCase(
        "grouped_decode",
        partial(grouped_decode, block_H=2, block_N=8),
        grouped_decode_reference,
        _HEADS,
        tensors(
            normal("batch heads dim"),
            normal("batch seq groups dim"),
            normal("batch seq groups dim"),
            integers("batch", 1, "seq"),
        ),
        ("Out",),
    ),
    KernelCase(
        "split_decode",
        partial(split_decode, parts=4, block_N=4),
        split_decode_reference,
        _HEADS,
        tensors(
            normal("batch heads dim"),
            normal("batch seq groups dim"),
            normal("batch seq groups dim"),
        ),
        ("lse", "partial", "Out"),
    ),
    *(
        KernelCase(
            name,
            partial(linear_attention, chunk=4, decay=decay),
            partial(linear_attention_reference, decay=decay),
            _SEQUENCES,
            tensors(
                normal("batch length heads key_dim"),
                normal("batch length heads key_dim"),
                normal("batch length heads value_dim"),
            ),
            ("Out", "H"),
        )
        for name, decay in (("linear_attention", None), ("retention", 0.75))
    ),
    KernelCase(
        "value_gradient",
        partial(value_gradient, chunk=4),
        value_gradient_reference,
        _SEQUENCES,
        tensors(
            normal("batch length heads key_dim"),
            normal("batch length heads key_dim"),
            normal("batch length heads value_dim"),
        ),
        ("dV",),
    ),
    KernelCase(
        "query_and_value_gradients",
        partial(query_and_value_gradients, chunk=4),
        query_and_value_gradients_reference,
        _SEQUENCES,
        tensors(*[normal("batch length heads key_dim")] * 2, *[normal("batch length heads value_dim")] * 2),
        ("dQ", "dV"),
    ),
    KernelCase(
        "advantages",
        partial(advantages, block=8),
        advantages_reference,
        ({"steps": 16, "width": 16}, {"steps": 13, "width": 11}, {"steps": 1, "width": 2}),
        tensors(normal("steps width"), normal("steps width"), integers("steps width", 0, 2)),
        ("A",),
    ),
    KernelCase(
        "expert_mlp",
        partial(sparse.expert_mlp, **_BLOCKS),
        sparse.expert_mlp_reference,
        _MIXTURES,
        tensors(normal("experts tokens model"), normal("experts model hidden"), normal("experts hidden model")),
        ("up", "Y"),
    ),
    KernelCase(
        "grouped_key_gradient",
        partial(grouped_key_gradient, block_M=8, block_N=8),
        grouped_key_gradient_reference,
        _HEADS,
        tensors(normal("batch heads seq dim"), normal("batch heads seq seq"), normal("batch groups seq dim")),
        ("dK",),
        inouts=("dK",),
    ),
    KernelCase(
        "block_scaled_matmul",
        partial(block_scaled_matmul, group=8, block_M=8, block_N=8),
        block_scaled_matmul_reference,
        _GROUPED_K,
        tensors(
            normal("M K"),
            normal("N K"),
            uniform("M K/8", 0.5, 2.0),
            lambda generator, s: torch.rand(-(-s["N"] // 8), s["K"] // 8, generator=generator) + 0.5,
        ),
        ("C",),
        reads_padding=True,
    ),
    KernelCase(
        "packed_matmul",
        partial(packed_matmul, **_BLOCKS),
        packed_matmul_reference,
        _GROUPED_K,
        tensors(normal("M K"), _PACKED),
        ("C",),
    ),
    KernelCase(
        "dequantize",
        partial(dequantize, group=8, block_N=8),
        dequantize_reference,
        _NK,
        tensors(_PACKED, uniform("N K/8", 0.5, 2.0), uniform("N K/8", 0.0, 15.0)),
        ("W",),
        reads_padding=True,
    ),
    KernelCase(
        "block_sparse_matmul",
        partial(sparse.block_sparse_matmul, **_BLOCKS, swizzle=True),
        partial(sparse.block_sparse_matmul_reference, block=8),
        MNK,
        tensors(normal("M K"), normal("K N"), _mask),
        ("C",),
    ),
    KernelCase(
        "grouped_matmul_rows",
        partial(sparse.grouped_matmul_rows, **_BLOCKS),
        sparse.grouped_matmul_rows_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), _offsets),
        ("C",),
    ),
    KernelCase(
        "grouped_weight_gradient",
        partial(grouped_weight_gradient, block_N=8, block_K=8, block_rows=8),
        grouped_weight_gradient_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("rows N"), _offsets),
        ("dB",),
    ),
    KernelCase(
        "padded_grouped_matmul",
        partial(sparse.padded_grouped_matmul, **_BLOCKS),
        partial(sparse.padded_grouped_matmul_reference, block=8),
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), integers("rows/8", 0, "groups")),
        ("C",),
    ),
    KernelCase(
        "scaled_grouped_matmul",
        partial(sparse.scaled_grouped_matmul, **_BLOCKS),
        partial(sparse.scaled_grouped_matmul_reference, block=8),
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), integers("rows/8", 0, "groups"), uniform("groups", 0.5, 2.0)),
        ("C",),
    ),
    KernelCase(
        "searched_grouped_matmul",
        partial(sparse.searched_grouped_matmul, **_BLOCKS),
        sparse.searched_grouped_matmul_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), _counts),
        ("C",),
    ),
    _product(schedules.hinted_matmul),
    _product(schedules.waves_matmul, programs=5, group=2),
    KernelCase(
        "waves_split_k",
        partial(schedules.waves_split_k, **_BLOCKS, programs=5),
        schedules.waves_split_k_reference,
        _PARTS_OF_K,
        tensors(normal("M K"), normal("K N")),
        ("partial", "C"),
    ),
    _causal("upper_product", "row"),
    _causal("lower_product", "zero"),
    _causal("backward_product", "back"),
    KernelCase(
        "paged_latent_attention",
        partial(paged_latent_attention, page=4),
        partial(paged_latent_attention_reference, page=4),
        _PAGES,
        tensors(
            normal("batch heads dim"),
            lambda generator, s: torch.randn((4 * s["pages"], s["dim"]), generator=generator),
            integers("batch table", 0, "pages"),
            lambda generator, s: torch.randint(1, 4 * s["table"] + 1, (s["batch"],), generator=generator).int(),
        ),
        ("Out",),
    ),
    KernelCase(
        "paged_attention",
        partial(paged_attention, page=4, skip=True),
        paged_attention_reference,
        _PAGES,
        tensors(
            normal("batch heads dim"),
            normal("pages 4 dim"),
            normal("pages 4 dim"),
            integers("batch table", 0, "pages"),
            lambda generator, s: torch.randint(1, 4 * s["table"] + 1, (s["batch"],), generator=generator).int(),
        ),
        ("Out",),
    ),
    KernelCase(
        "staged_histogram",
        staged_histogram,
        lambda ids, counts: counts + torch.bincount(ids, minlength=counts.numel()).int(),
        ({"N": 48, "bins": 12}, {"N": 37, "bins": 7}, {"N": 5, "bins": 3}),
        tensors(integers("N", 0, "bins"), integers("bins", 0, 10)),
        ("counts",),
        EXACT,
        inouts=("counts",),
    ),
    KernelCase(
        "backwards_rows",
        partial(schedules.backwards_rows, block=8),
        lambda a: 2 * a,
        MN,
        tensors(normal("M N")),
        ("B",),
        EXACT,
    ),
    KernelCase(
        "running_sums",
        partial(schedules.running_sums, block_M=8),
        lambda a: a.double().cumsum(1).float(),
        MN,
        tensors(normal("M N")),
        ("B",),
        FLOAT32,
    ),
    KernelCase(
        "ragged_sums",
        partial(schedules.ragged_sums, block_M=8),
        _ragged,
        _LENGTHS,
        tensors(normal("batch rows N"), integers("batch", 0, "rows")),
        ("C",),
    ),
    KernelCase(
        "scaled_mean_matmul",
        partial(schedules.scaled_mean_matmul, **_BLOCKS),
        _scaled_mean,
        MNK,
        tensors(normal("M K"), normal("K N"), uniform("1", 4.0, 8.0), normal("N")),
        ("C",),
        reads_padding=True,
    ),
    KernelCase(
        "matmul_with_workspace",
        partial(schedules.matmul_with_workspace, **_BLOCKS),
        lambda a, b, workspace: matmul_reference(a, b),
        MNK,
        tensors(normal("M K"), normal("K N"), normal("M N")),
        ("C",),
    ),
    KernelCase(
        "index_scores",
        index_scores,
        index_scores_reference,
        ({"M": 32, "N": 48}, {"M": 13, "N": 30}, {"M": 3, "N": 7}),
        tensors(_queries, lambda generator, sizes: torch.randn((sizes["N"], 16), generator=generator), _weights),
        ("S",),
    ),
)
