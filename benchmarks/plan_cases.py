"""Kernels, the ways in which one would split them, and the bytes that each device then has to receive: what whoever
writes the distributed program by hand would move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from kernels.attention_sinks import sink_attention
from kernels.catalogue.case import KernelFactory
from kernels.combined import delta_rule, largest_of_rows, one_pass_variance
from kernels.convolution import convolution_2d
from kernels.cross_entropy import labelled_cross_entropy
from kernels.elementwise import activation_chain, add_bias, vector_add
from kernels.embedding import embedding
from kernels.flash_attention import flash_attention
from kernels.fused import gate_and_up, projections, put_both, rope_of_both, updates_of_both
from kernels.gemv import gemv, gevm
from kernels.grouped_gradient import grouped_weight_gradient
from kernels.grouped_query import grouped_decode, grouped_key_gradient, split_decode
from kernels.indexer import index_scores
from kernels.layer_norm import add_layer_norm, layer_norm, layer_norm_gradient
from kernels.linear_attention import linear_attention, query_and_value_gradients, value_gradient
from kernels.low_rank import low_rank
from kernels.matmul import batched_matmul, matmul, split_k_matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.mlp import mlp_up
from kernels.neighbourhoods import escape_times, filter_2d, max_pool, periodic_neighbours, sliding_attention, upsample
from kernels.packed import packed_attention
from kernels.padded import block_logsumexp, block_variance, fragment_layer_norm
from kernels.paged import paged_attention, paged_latent_attention, put_and_attend, staged_histogram
from kernels.quantized import block_scaled_matmul, dequantize, packed_matmul, promoted_matmul
from kernels.recurrences import advantages, delta_states, recurrent_network
from kernels.reduce import reduce_columns, reduce_rows
from kernels.rms_norm import padded_rms_norm, rms_norm, two_pass_rms_norm
from kernels.rope import packed_rope, rope
from kernels.rounds import balanced, top_k
from kernels.schedules import (
    backwards_rows,
    causal_product,
    chunk_sums,
    hinted_matmul,
    matmul_with_workspace,
    ragged_sums,
    running_sums,
    scaled_mean_matmul,
    waves_matmul,
    waves_split_k,
)
from kernels.softmax import online_softmax, softmax
from kernels.sparse import (
    block_sparse_attention,
    block_sparse_matmul,
    expert_mlp,
    grouped_matmul_rows,
    padded_grouped_matmul,
    scaled_grouped_matmul,
    searched_grouped_matmul,
)
from kernels.stacked import layer_product, put_layer
from kernels.statistics import nearest_points, row_norms, row_statistics
from kernels.transpose import transpose

Dims = Mapping[str, int | None]
_LOCAL = "each device has what its part of the result is made of"
_PARTIAL = "ring all-reduce of the partial result: 2 (n - 1) / n of it"


@dataclass(frozen=True)
class Way:
    """One way to split a kernel over one axis: the dim of each tensor that the axis splits (others are replicated).

    `reduced`: the tensors, in elements of 4 bytes, that are summed over all devices, each (n - 1) / n twice;
    `gathered`: what every device needs of every other. `received`: other bytes."""

    name: str
    dims: Dims
    why: str = _LOCAL
    reduced: int = 0
    received: int = 0
    gathered: int = 0

    def expert(self, devices: int) -> int:
        """The bytes that one device receives in the program of an expert."""
        reduced = -(-2 * (devices - 1) * self.reduced * 4 // devices)
        return reduced + (devices - 1) * self.gathered * 4 + self.received


@dataclass(frozen=True)
class PlanCase:
    """A kernel of a size at which moving its tensors takes time, and the ways to split it."""

    group: str
    build: partial[tirx.PrimFunc]
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        return self.build.func.__name__


def _dims(text: str) -> dict[str, int]:
    """`"A0 B1"`: dim 0 of A, dim 1 of B."""
    return {name[:-1]: int(name[-1]) for name in text.split()}


def _case(group: str, factory: KernelFactory, sizes: Mapping[str, object], **ways: str | tuple) -> PlanCase:
    """`ways`: from a name to `"A0 B1"`, or to that with a reason, and with what is reduced."""
    made = []
    for name, way in ways.items():
        dims, *rest = (way,) if isinstance(way, str) else way
        made.append(Way(name, _dims(dims), *rest))
    return PlanCase(group, partial(factory, **sizes), tuple(made))


_BIG, _BLOCKS = 2048, {"block_M": 64, "block_N": 64, "block_K": 64}
_MNK = {"M": _BIG, "N": _BIG, "K": _BIG, **_BLOCKS}
_SQUARE = _BIG * _BIG
_MATMUL = {"rows": "A0 C0", "columns": "B1 C1", "K": ("A1 B0", _PARTIAL, _SQUARE)}
_ATTENTION = {"batch": 4, "heads": 32, "seq_q": 1024, "seq_kv": 1024, "dim": 64, "groups": 4, "dtype": "float32"}
_HEADS = {"batch": "Q0 K0 V0 Out0", "heads": "Q1 K1 V1 Out1", "rows": "Q2 Out2"}
_DECODE = {"batch": 8, "heads": 32, "groups": 8, "seq": 4096, "dim": 64}
_DECODE_HEADS = "Q1 K2 V2 Out1"
_STATES = "the states of online softmax (maximum, sum, output) of every query are combined, not the keys gathered"
_HANDED_ON = "every device starts from what those before it come to: the states of all are gathered"
_HANDED_BACK = "every device starts from what those after it come to: the states of all are gathered"
_DECODE_STATES = 8 * 32 * (64 + 2)


def _of_the_catalogue() -> Iterator[PlanCase]:
    """The kernels that everybody has."""
    yield _case("plain", matmul, _MNK, **_MATMUL)
    yield _case(
        "plain", matmul, {**_MNK, "trans_B": True}, rows="A0 C0", columns="B0 C1", K=("A1 B1", _PARTIAL, _SQUARE)
    )
    yield _case("plain", batched_matmul, {"batch": 8, "M": 512, "N": 512, "K": 512}, batch="A0 B0 C0", rows="A1 C1")
    yield _case("plain", split_k_matmul, {"M": _BIG, "N": _BIG, "K": _BIG}, rows="A0 C0", columns="B1 C1")
    yield _case(
        "plain",
        matmul_bias_gelu,
        {**_MNK, "dtype": "float32", "out_dtype": "float32"},
        rows="A0 C0",
        columns="B1 bias0 C1",
        K=("A1 B0", _PARTIAL, _SQUARE),
    )
    inner = "what the first product sums over K, before the second one"
    yield _case(
        "plain",
        low_rank,
        {"M": 32, "N": 4096, "K": 4096, "rank": 128, "block_M": 16},
        rows="X0 Y0",
        columns="B1 Y1",
        rank=("A1 B0", _PARTIAL, 32 * 4096),
        K=("X1 A0", inner, 32 * 128),
    )
    yield _case("plain", mlp_up, {"tokens": _BIG, "hidden": 4096, "model": 1024}, tokens="x0 h0", hidden="w11 h1")
    yield _case("plain", gemv, {"M": 4096, "K": 4096}, rows="A0 y0", K=("A1 x0", _PARTIAL, 4096))
    yield _case("plain", gevm, {"N": 4096, "K": 4096}, columns="B1 y0", K=("B0 x0", _PARTIAL, 4096))
    yield _case("plain", vector_add, {"N": 1 << 22}, elements="A0 B0 C0")
    yield _case("plain", activation_chain, {"M": _BIG, "N": _BIG}, rows="A0 B0 C0", columns="A1 B1 C1")
    yield _case("plain", add_bias, {"M": _BIG, "N": _BIG}, rows="A0 C0", columns="A1 bias0 C1")
    yield _case("plain", transpose, {"M": _BIG, "N": _BIG}, rows="A0 B1", columns="A1 B0")
    yield _case("plain", reduce_rows, {"M": _BIG, "N": _BIG}, rows="A0 B0", columns=("A1", _PARTIAL, _BIG))
    yield _case("plain", reduce_columns, {"M": _BIG, "N": _BIG}, columns="A1 B0", rows=("A0", _PARTIAL, _BIG))
    yield _case("plain", rope, {"seq": 4096, "heads": 16, "dim": 64}, rows="x0 cos0 sin0 out0", heads="x1 out1")
    yield _case(
        "plain",
        embedding,
        {"tokens": 8192, "vocabulary": 8192, "features": 512},
        tokens="ids0 out0",
        features="table1 out1",
    )
    norm, statistics = {"M": 4096, "N": 4096}, "the statistics of every row are summed"
    yield _case(
        "plain", softmax, norm, rows="X0 Y0", columns=("X1 Y1", "maxima and sums of the rows are reduced", 2 * 4096)
    )
    yield _case("plain", layer_norm, norm, rows="X0 Y0", columns=("X1 weight0 bias0 Y1", statistics, 2 * 4096))
    uneven = {"M": 4096, "N": 4000}
    columns = ("X1 weight0 bias0 Y1", f"{statistics}; all have what is in the padding", 2 * 4096)
    yield _case("plain", fragment_layer_norm, uneven, rows="X0 Y0", columns=columns)
    columns = ("X1 R1 weight0 bias0 Y1 S1", statistics, 2 * 4096)
    yield _case("plain", add_layer_norm, norm, rows="X0 R0 Y0 S0", columns=columns)
    columns = ("dY1 X1 weight0 dX1 dweight0 dbias0", "two sums of every row, before its gradient", 2 * 4096)
    gradient = {"rows": ("dY0 X0 mean0 rstd0 dX0", _PARTIAL, 2 * 4096), "columns": columns}
    yield _case("plain", layer_norm_gradient, {**norm, "rows": 32}, **gradient)
    yield _case("plain", rms_norm, norm, rows="X0 Y0", columns=("X1 weight0 Y1", statistics, 4096))
    yield _case("plain", two_pass_rms_norm, norm, rows="X0 Y0", columns=("X1 weight0 Y1", statistics, 4096))
    conv = {"N": 16, "H": 32, "W": 32, "C": 64, "F": 128, "dtype": "float32"}
    yield _case(
        "plain",
        convolution_2d,
        conv,
        batch="data0 out0",
        features="kernel3 out3",
        channels=("data3 kernel2", _PARTIAL, 16 * 32 * 32 * 128),
    )


def _key_heads() -> Iterator[PlanCase]:
    """Key heads that several query heads share: an axis that divides the key heads splits whole groups."""
    yield _case("key heads", flash_attention, _ATTENTION, **_HEADS)
    yield _case("key heads", flash_attention, {**_ATTENTION, "causal": True, "skip_masked_blocks": True}, **_HEADS)
    yield _case("key heads", grouped_decode, _DECODE, batch="Q0 K0 V0 lengths0 Out0", heads=_DECODE_HEADS)
    yield _case("key heads", grouped_decode, {**_DECODE, "block_H": 2}, heads=_DECODE_HEADS)
    yield _case("key heads", grouped_decode, {**_DECODE, "rows": 16}, heads=_DECODE_HEADS)
    moved = "of q and of the result what tiles of whole groups have, and the 6 heads of each device's tile have not"
    few = ("Q1 K2 V2 Out1", moved, 0, 2 * 8 * 6 * 64 * 4)
    yield _case("key heads", grouped_decode, {**_DECODE, "heads": 24, "groups": 6}, heads=few)
    gradient = {"batch": 4, "heads": 16, "groups": 4, "seq": 512, "dim": 64, "block_M": 64, "block_N": 64}
    yield _case(
        "key heads",
        grouped_key_gradient,
        gradient,
        batch="Q0 dS0 dK0",
        heads="Q1 dS1 dK1",
        keys="dS3 dK2",
        queries=("Q2 dS2", _PARTIAL, 4 * 4 * 512 * 64),
    )


def _hints() -> Iterator[PlanCase]:
    """What a compiler is told changes nothing."""
    yield _case("hints", hinted_matmul, _MNK, **_MATMUL)
    yield _case("hints", hinted_matmul, {**_MNK, "registers": False}, **_MATMUL)
    yield _case("hints", hinted_matmul, {**_MNK, "M": 64}, columns="B1 C1", K=("A1 B0", _PARTIAL, 64 * _BIG))


def _several_grids() -> Iterator[PlanCase]:
    """Several grids in one function, with values between them; loops whose extent is loaded or computed."""
    parts = {"batch": "Q0 K0 V0 lse0 partial0 Out0", "heads": "Q1 K2 V2 lse1 partial1 Out1"}
    yield _case("several grids", split_decode, _DECODE, **parts)
    experts = {"experts": 8, "tokens": 512, "hidden": 1024, "model": 512, **_BLOCKS}
    hidden = ("W12 W21 up2", _PARTIAL, 8 * 512 * 512)
    yield _case("several grids", expert_mlp, experts, experts="X0 W10 W20 up0 Y0", tokens="X1 up1 Y1", hidden=hidden)
    sums = {"batch": 64, "rows": 1024, "N": 256, "block_M": 64}
    yield _case("several grids", ragged_sums, sums, batch="A0 lengths0 C0", columns="A2 C1")


def _blocks() -> Iterator[PlanCase]:
    """Dims that are walked in blocks of another: scales, masks, two numbers in a byte."""
    scaled = {**_MNK, "group": 128}
    del scaled["block_K"]
    k = ("A1 B1 A_scale1 B_scale1", _PARTIAL, _SQUARE)
    yield _case("blocks", block_scaled_matmul, scaled, rows="A0 A_scale0 C0", columns="B0 B_scale0 C1", K=k)
    k = ("A1 B1", _PARTIAL, _SQUARE)
    yield _case("blocks", promoted_matmul, _MNK, rows="A0 C0", columns="B0 C1", K=k)
    yield _case("blocks", packed_matmul, _MNK, rows="A0 C0", columns="B0 C1", K=("A1 B1", _PARTIAL, _SQUARE))
    yield _case(
        "blocks",
        dequantize,
        {"N": 4096, "K": 4096, "group": 128},
        rows="B0 scale0 zero0 W0",
        columns="B1 scale1 zero1 W1",
    )
    margins = "15 groups are tiles of 512 columns, not 480: the last device lacks 96, two in a byte of B, and of W back"
    yield _case(
        "blocks",
        dequantize,
        {"N": 4096, "K": 1920, "group": 128},
        columns=("B1 scale1 zero1 W1", margins, 0, 4096 * 96 // 2 + 4096 * 96 * 4),
    )
    k = ("A1 B0 mask2", _PARTIAL, _SQUARE)
    yield _case("blocks", block_sparse_matmul, _MNK, rows="A0 mask0 C0", columns="B1 mask1 C1", K=k)
    yield _case("blocks", block_sparse_matmul, {**_MNK, "swizzle": True}, rows="A0 mask0 C0", K=k)


def _scalars() -> Iterator[PlanCase]:
    """Scalars that are loaded before a reduction and used after it; groups of rows that are looked up."""
    groups = {"groups": 8, "rows": 4096, "N": 1024, "K": 1024, **_BLOCKS}
    k = ("A1 B1", _PARTIAL, 4096 * 1024)
    yield _case("scalars", grouped_matmul_rows, groups, columns="B2 C1", K=k)
    yield _case("scalars", padded_grouped_matmul, groups, rows="A0 group_of0 C0", columns="B2 C1", K=k)
    yield _case("scalars", scaled_grouped_matmul, groups, rows="A0 group_of0 C0", columns="B2 C1", K=k)
    many, rows = {"groups": 8, "rows": 16384, "N": 512, "K": 512, **_BLOCKS}, 16384 + 8 * 64
    padded = "the sums of all blocks of rows, every group's last one padded, are completed before relu"
    k = ("A1 B1", padded, rows * 512)
    yield _case("scalars", searched_grouped_matmul, many, columns="B2 C1", K=k)
    gradient = {"groups": 8, "rows": 32768, "N": 1024, "K": 1024, "block_N": 64, "block_K": 64, "block_rows": 64}
    tokens = ("A0 dC0", "ring all-reduce of every group's weights", 8 * 1024 * 1024)
    yield _case("scalars", grouped_weight_gradient, gradient, columns="dC1 dB2", tokens=tokens)
    few = {**groups, "groups": 64, "rows": 1024}
    yield _case("scalars", padded_grouped_matmul, few, experts=("B0", _PARTIAL, 1024 * 1024))
    yield _case("scalars", searched_grouped_matmul, few, experts=("B0", _PARTIAL, 1024 * 1024), tokens="A0 C0")
    yield _case(
        "scalars", scaled_mean_matmul, _MNK, rows="A0 C0", columns="B1 bias0 C1", K=("A1 B0", _PARTIAL, _SQUARE)
    )


def _schedules() -> Iterator[PlanCase]:
    """Blocks in another order than their places'."""
    yield _case("schedules", waves_matmul, {**_MNK, "programs": 24, "group": 8}, **_MATMUL)
    few_rows = {**_MNK, "M": 256, "programs": 32, "group": 8, "out_dtype": "float16"}
    yield _case("schedules", waves_matmul, few_rows, **{**_MATMUL, "K": ("A1 B0", _PARTIAL, 256 * _BIG)})
    yield _case("schedules", waves_split_k, {**_MNK, "programs": 24}, rows="A0 partial1 C0", columns="B1 partial2 C1")
    yield _case("schedules", backwards_rows, {"M": 4096, "N": 4096, "block": 64}, rows="A0 B0", columns="A1 B1")
    yield _case("schedules", running_sums, {"M": 4096, "N": 1024}, rows="A0 B0")
    chunks = {"batch": 4, "chunks": 64, "heads": 16, "width": 128, "group": 4, "chunk": 64}
    heads = "A2 scale1 B2"
    yield _case("schedules", chunk_sums, chunks, batch="A0 scale0 B0", sequence="A1 B1", heads=heads, columns="A3 B3")
    causal = {"rows": 4096, "dim": 256, "block": 64}
    for start in ("row", "zero", "on", "back"):
        yield _case(
            "schedules",
            causal_product,
            {**causal, "start": start},
            rows="S0 C0",
            columns="V1 C1",
            keys=("S1 V0", _PARTIAL, 4096 * 256),
        )
    margins = "72 rows of S, as tiles of 1000 rows are no whole blocks, but those of 1024 are; and as many of C back"
    yield _case(
        "schedules",
        causal_product,
        {**causal, "rows": 4000, "start": "zero"},
        rows=("S0 C0", margins, 0, 0, 72 * (4000 + 256) * 4),
    )


def _combined() -> Iterator[PlanCase]:
    """States that are carried through a loop whose parts devices walk."""
    state = 4 * 32 * 1024 * (64 + 2)
    yield _case("carried", flash_attention, _ATTENTION, keys=("K2 V2", _STATES, state))
    yield _case("carried", grouped_decode, _DECODE, keys=("K1 V1", _STATES, _DECODE_STATES))
    sparse = {"batch": 1, "heads": 4, "seq": 256, "keys": 8192, "dim": 64}
    for of in ("all", "last"):
        options = {**sparse, "largest_of": of}
        yield _case("carried", block_sparse_attention, options, keys=("K2 V2", _STATES, 4 * 256 * (64 + 2)))
    yield _case(
        "carried",
        sink_attention,
        {"heads": 8, "seq": 4096, "dim": 64, "window": 4096},
        heads="Q0 K0 V0 Sinks0 Out0",
        keys=("K1 V1", _STATES, 8 * 4096 * (64 + 2)),
    )
    few = {"M": 64, "N": 131072, "block_M": 1, "block_N": 128}
    yield _case("carried", online_softmax, few, rows="X0 Y0", columns=("X1 Y1", _STATES, 64 * 2))
    yield _case("carried", split_decode, _DECODE, keys=("K1 V1 lse2 partial2", _STATES, _DECODE_STATES))
    linear = {"batch": 4, "heads": 16, "length": 4096, "key_dim": 64, "value_dim": 64, "chunk": 64}
    for decay in (None, 0.99):
        yield _case(
            "carried",
            linear_attention,
            {**linear, "decay": decay},
            heads="Q2 K2 V2 Out2 H1",
            sequence=("Q1 K1 V1 Out1", _HANDED_ON, 0, 0, 4 * 16 * (64 * 64 + (decay is not None))),
        )
    yield _case(
        "carried",
        value_gradient,
        linear,
        heads="Q2 K2 dOut2 dV2",
        sequence=("Q1 K1 dOut1 dV1", _HANDED_BACK, 0, 0, 4 * 16 * 64 * 64),
    )
    both = "every device starts from what those before it, and those after it, come to"
    yield _case(
        "carried",
        query_and_value_gradients,
        linear,
        heads="Q2 K2 V2 dOut2 dQ2 dV2",
        sequence=("Q1 K1 V1 dOut1 dQ1 dV1", both, 0, 0, 2 * 4 * 16 * 64 * 64),
    )
    margin = "the first row of the next tile; the states of all and what is left of them"
    yield _case(
        "carried",
        advantages,
        {"steps": 2048, "width": 4096},
        columns="R1 V1 ends1 A1",
        steps=("R0 V0 ends0 A0", margin, 0, 4096 * 4, 2 * 4096),
    )
    said = "every device takes over the state that the one before it ends with"
    network = {"steps": 2048, "batch": 64, "hidden": 128}
    yield _case(
        "carried",
        recurrent_network,
        network,
        batch="X1 H00 Y1 HN0",
        steps=("X0 Y0", f"{said}; all have the last", 0, 64 * 128 * 4, 64 * 128),
    )
    yield _case(
        "carried",
        delta_states,
        {"batch": 1, "length": 8192, "heads": 16, "key_dim": 64, "value_dim": 64, "chunk": 64, "block": 64},
        heads="K2 W2 U2 G2 H01 H2 final1 V_new2",
        sequence=("K1 W1 U1 G1 H1 V_new1", f"{said}; all have the last", 0, 16 * 64 * 64 * 4, 16 * 64 * 64),
    )
    rows = {"M": 2048, "N": 8192, "block_M": 16, "block_N": 64}
    said = "the states of parts of rows are combined as the kernel's author says: those of all are gathered"
    yield _case("carried", one_pass_variance, rows, rows="A0 V0", columns=("A1", said, 0, 0, 3 * 2048))
    yield _case("carried", largest_of_rows, rows, rows="A0 V0 W0", columns=("A1", said, 0, 0, 2 * 3 * 2048))
    said = "the sums, extremes, places and counts of parts of rows: those of all are gathered"
    parts = ("A1", said, 0, 0, 5 * 2048)
    yield _case("carried", row_statistics, {"M": 2048, "N": 8192}, rows="A0 Sum0 Low0 High0 At0 Above0", columns=parts)
    said = "what is nearest on each device, and which it is: those of all are gathered"
    points = ("Q0", said, 0, 0, 2 * 4096)
    yield _case("carried", nearest_points, {"M": 4096, "N": 65536}, rows="P0 D0 At0", points=points)
    said = "the sum of each row, that an iteration keeps to itself"
    yield _case("carried", row_norms, {"M": 2048, "N": 8192}, rows="A0 B0", columns=("A1 B1", said, 2048))
    said = "the candidates of each device, and where they are: those of all are gathered"
    yield _case("carried", top_k, {"M": 512, "N": 65536}, rows="A0 High0 At0", columns=("A1", said, 0, 0, 2 * 4 * 512))
    said = "the sums of rows, in each round"
    sinkhorn = {"batch": 512, "n": 256}
    yield _case("carried", balanced, sinkhorn, batch="A0 B0", columns=("A2 B2", said, 3 * 512 * 256))
    delta = {"length": 4096, "heads": 16, "dim": 64}
    state = 2 * 16 * 64 * 64
    yield _case(
        "carried", delta_rule, delta, heads="Q1 K1 V1 B1 Y1", sequence=("Q0 K0 V0 B0 Y0", _HANDED_ON, 0, 0, state)
    )
    long_rows = {"M": 1024, "N": 32000, "block_N": 4096}
    yield _case("carried", block_logsumexp, long_rows, rows="X0 Y0", columns=("X1", _STATES, 2 * 1024))
    said = "the sums of rows, and of their squares"
    yield _case("carried", block_variance, long_rows, rows="X0 Var0 Mean0", columns=("X1", said, 2 * 1024))
    yield _case("carried", online_softmax, {"M": 4096, "N": 4096}, rows="X0 Y0", columns=("X1 Y1", _STATES, 2 * 4096))


def _unused() -> Iterator[PlanCase]:
    """Tensors that nothing uses, and small ones."""
    yield _case(
        "unused",
        matmul_with_workspace,
        _MNK,
        rows="A0 workspace0 C0",
        columns="B1 workspace1 C1",
        other="A0 workspace1 C0",
    )
    scores = {"M": 2048, "N": 4096, "heads": 16, "dim": 128, "block_M": 16, "block_N": 64}
    yield _case("programs", index_scores, scores, rows="Q0 W0 S0")
    yield _case("unused", add_bias, {"M": _BIG, "N": _BIG}, small="A0 bias0 C0")


def _neighbourhoods() -> Iterator[PlanCase]:
    """Windows around tiles; tables and bins that are indexed by data."""
    margin = "2 rows of the next tile, and one as tiles of 2050 rows are longer than those of 2048"
    image = {"height": _BIG + 2, "width": _BIG + 2}
    yield _case("neighbours", filter_2d, image, rows=("A0 out0", margin, 0, 3 * (_BIG + 2) * 4))
    plane = {"height": _BIG, "width": _BIG}
    around = "the rows, or columns, at both ends of the tile"
    yield _case(
        "neighbours",
        periodic_neighbours,
        plane,
        rows=("A0 out0", around, 0, 2 * _BIG * 4),
        columns=("A1 out1", around, 0, 2 * _BIG * 4),
    )
    yield _case("neighbours", upsample, plane, rows="A0 out0", columns="A1 out1")
    pool = {"batch": 32, "channels": 64, "height": 56, "width": 56, "block": 256}
    rows = ("data2 out2", around, 0, 32 * 64 * 56 * 4)
    yield _case("neighbours", max_pool, pool, batch="data0 out0", channels="data1 out1", rows=rows)
    yield _case("neighbours", escape_times, plane, rows="C0 out0", columns="C1 out1")
    numbers = "of every row a maximum, a sum and the label's score are reduced"
    classes = ("logits1 d_logits1", numbers, 3 * 4096)
    rows = "logits0 labels0 loss0 d_logits0"
    yield _case("neighbours", labelled_cross_entropy, {"rows": 4096, "classes": 65536}, rows=rows, classes=classes)
    sliding = {"seq": 16384, "dim": 64, "window": 512}
    rows = ("Q0 K0 V0 Out0", "the keys and values just before the tile's", 0, 2 * 512 * 64 * 4)
    for bounds in (False, True):
        yield _case("neighbours", sliding_attention, {**sliding, "bounds": bounds}, rows=rows)
    rows = ("Q0 K0 V0 Out0", "those from the start of the first block that counts", 0, 2 * (512 + 63) * 64 * 4)
    yield _case("neighbours", sliding_attention, {**sliding, "bounds": "clamped"}, rows=rows)
    pages = {"batch": 8, "heads": 32, "pages": 1024, "table": 128, "dim": 64}
    yield _case(
        "neighbours",
        paged_attention,
        pages,
        batch="Q0 pages_of0 lengths0 Out0",
        pages=("K0 V0", _STATES, 8 * 32 * (64 + 2)),
    )
    yield _case(
        "neighbours",
        paged_latent_attention,
        pages,
        batch="Q0 pages_of0 lengths0 Out0",
        pages=("KV0", _STATES, 8 * 32 * (64 + 2)),
    )
    cache = {"batch": 16, "heads": 32, "groups": 8, "seq": 1024, "dim": 128}
    heads = "Q1 K1 V1 K_cache2 V_cache2 Out1"
    yield _case("neighbours", put_and_attend, cache, batch="Q0 K0 V0 K_cache0 V_cache0 lengths0 Out0", heads=heads)
    packed = {"tokens": 8192, "sequences": 16, "longest": 1024, "heads": 16, "dim": 64}
    yield _case("neighbours", packed_rope, packed, rows="x0 out0", heads="x1 out1")
    rows = {"rows": 8192, "sequences": 16, "longest": 1024, "dim": 64}
    whole = "each device makes its rows; keys and values are replicated"
    yield _case("neighbours", packed_attention, rows, rows=("Q0 Out0", whole), values="V1 Out1")
    counted = {"N": 1 << 20, "bins": 4096}
    yield _case("neighbours", staged_histogram, counted, bins="counts0", elements=("ids0", _PARTIAL, 4096))
    words = {"tokens": 2048, "vocabulary": 65536, "features": 512}
    rows = ("table0", "all devices' rows of the result are summed", 2048 * 512)
    yield _case("neighbours", embedding, words, vocabulary=rows)


def _places() -> Iterator[PlanCase]:
    """One place of a dim: a layer's weights, a layer's part of a cache; and blocks that are longer than rows."""
    one = "the others get the layer's weights from the device that has them"
    yield _case(
        "places",
        layer_product,
        {**_MNK, "layers": 8, "layer": 3},
        layers=("W0", one, 0, _SQUARE * 4),
        rows="A0 C0",
        columns="W2 C1",
        K=("A1 W1", _PARTIAL, _SQUARE),
    )
    cache = {"layers": 8, "layer": 3, "tokens": 1024, "features": 4096}
    yield _case("places", put_layer, cache, layers="cache0", tokens="X0 cache1", features="X1 cache2")
    statistics = ("X1 weight0 Y1", "the statistics of every row are summed", 4096)
    yield _case("places", padded_rms_norm, {"M": 4096, "N": 4000}, rows="X0 Y0", columns=statistics)


def _fused() -> Iterator[PlanCase]:
    """The same done to several tensors, each of which is split where it is."""
    heads = {"seq": 4096, "q_heads": 32, "k_heads": 8, "dim": 64}
    all_heads = "Q1 K1 Q_out1 K_out1"
    yield _case("fused", rope_of_both, heads, heads=all_heads, rows="Q0 K0 cos0 sin0 Q_out0 K_out0")
    wide = {"rows": 1024, "inner": 1024, "q": 2048, "kv": 512}
    k = ("X1 Wq0 Wk0 Wv0", _PARTIAL, 1024 * (2048 + 2 * 512))
    yield _case("fused", projections, wide, rows="X0 Q0 K0 V0", columns="Wq1 Wk1 Wv1 Q1 K1 V1", K=k)
    hidden = {"rows": 1024, "inner": 1024, "hidden": 2048}
    yield _case("fused", gate_and_up, hidden, rows="X0 Gate0 Up0", columns="Wg1 Wu1 Gate1 Up1")
    yield _case("fused", updates_of_both, {"first": 1 << 20, "second": 1 << 18}, elements="P0 dP0 M0 P20 dP20 M20")
    cache = {"tokens": 512, "slots": 8192, "heads": 8, "key_dim": 96, "value_heads": 16, "value_dim": 64}
    yield _case("fused", put_both, cache, heads="K1 V1 K_cache1 V_cache1")


CASES: tuple[PlanCase, ...] = (
    *_of_the_catalogue(),
    *_key_heads(),
    *_hints(),
    *_several_grids(),
    *_blocks(),
    *_scalars(),
    *_schedules(),
    *_combined(),
    *_unused(),
    *_neighbourhoods(),
    *_places(),
    *_fused(),
)
