"""Cases of the kernels that serve models: key heads in groups, pages, states along sequences, quantized products."""

from __future__ import annotations

from functools import partial

import torch

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
from kernels.paged import (
    paged_attention,
    paged_attention_reference,
    paged_latent_attention,
    paged_latent_attention_reference,
    put_and_attend,
    put_and_attend_reference,
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
from kernels.recurrences import (
    advantages,
    advantages_reference,
    delta_states,
    delta_states_reference,
    recurrent_network,
    recurrent_network_reference,
)
from kernels.stacked import layer_product, layer_product_reference, put_layer, put_layer_reference

from .case import EXACT, KernelCase, Sizes, integers, normal, tensors, uniform

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
_LAYERS = (
    {"M": 16, "N": 24, "K": 16, "layers": 4},
    {"M": 13, "N": 9, "K": 11, "layers": 5},
    {"M": 2, "N": 1, "K": 3, "layers": 2},
)
_CACHES = (
    {"tokens": 16, "features": 8, "layers": 4},
    {"tokens": 7, "features": 9, "layers": 5},
    {"tokens": 1, "features": 3, "layers": 2},
)
_NK = ({"N": 24, "K": 48}, {"N": 13, "K": 24}, {"N": 3, "K": 8})
_PAGES = (
    {"batch": 2, "heads": 4, "pages": 8, "table": 4, "dim": 8},
    {"batch": 3, "heads": 2, "pages": 7, "table": 3, "dim": 5},
    {"batch": 1, "heads": 1, "pages": 3, "table": 2, "dim": 3},
)


def _queries(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    return torch.randn((4 * sizes["M"], 16), generator=generator)


def _weights(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    return torch.rand((sizes["M"], 4), generator=generator)


_PACKED = integers("N K/2", 0, 256, torch.uint8)

INFERENCE_CASES: tuple[KernelCase, ...] = (
    KernelCase(
        "layer_product",
        partial(layer_product, layer=1, **_BLOCKS),
        partial(layer_product_reference, layer=1),
        _LAYERS,
        tensors(normal("M K"), normal("layers K N")),
        ("C",),
    ),
    KernelCase(
        "put_layer",
        partial(put_layer, layer=1, block_T=4, block_F=4),
        partial(put_layer_reference, layer=1),
        _CACHES,
        tensors(normal("tokens features"), normal("layers tokens features")),
        ("cache",),
        EXACT,
        inouts=("cache",),
    ),
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
        "recurrent_network",
        partial(recurrent_network, block=4),
        recurrent_network_reference,
        (
            {"steps": 8, "batch": 8, "hidden": 8},
            {"steps": 5, "batch": 7, "hidden": 3},
            {"steps": 1, "batch": 2, "hidden": 4},
        ),
        tensors(normal("steps batch hidden"), normal("hidden hidden"), normal("batch hidden")),
        ("Y", "HN"),
    ),
    KernelCase(
        "delta_states",
        partial(delta_states, chunk=4, block=4),
        partial(delta_states_reference, chunk=4),
        _SEQUENCES,
        tensors(
            uniform("batch length heads key_dim", -0.5, 0.5),
            uniform("batch length heads key_dim", -0.5, 0.5),
            normal("batch length heads value_dim"),
            uniform("batch length heads", -1, 0),
            normal("batch heads key_dim value_dim"),
        ),
        ("H", "final", "V_new"),
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
        "put_and_attend",
        put_and_attend,
        put_and_attend_reference,
        (
            {"batch": 4, "heads": 8, "groups": 4, "seq": 8, "dim": 8},
            {"batch": 3, "heads": 6, "groups": 3, "seq": 5, "dim": 3},
            {"batch": 1, "heads": 2, "groups": 1, "seq": 2, "dim": 5},
        ),
        tensors(
            normal("batch heads dim"),
            normal("batch groups dim"),
            normal("batch groups dim"),
            normal("batch seq groups dim"),
            normal("batch seq groups dim"),
            integers("batch", 0, "seq"),
        ),
        ("K_cache", "V_cache", "Out"),
        inouts=("K_cache", "V_cache"),
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
        "index_scores",
        index_scores,
        index_scores_reference,
        ({"M": 32, "N": 48}, {"M": 13, "N": 30}, {"M": 3, "N": 7}),
        tensors(_queries, lambda generator, sizes: torch.randn((sizes["N"], 16), generator=generator), _weights),
        ("S",),
    ),
)
