"""Cases of the kernels that read neighbourhoods."""

from functools import partial

from kernels.attention_sinks import sink_attention, sink_attention_reference
from kernels.cross_entropy import labelled_cross_entropy, labelled_cross_entropy_reference
from kernels.neighbourhoods import (
    escape_times,
    escape_times_reference,
    filter_2d,
    filter_2d_reference,
    max_pool,
    max_pool_reference,
    periodic_neighbours,
    periodic_neighbours_reference,
    sliding_attention,
    sliding_attention_reference,
    upsample,
    upsample_reference,
)

from .case import EXACT, KernelCase, integers, normal, tensors, uniform

_PLANES = ({"height": 8, "width": 12}, {"height": 7, "width": 5}, {"height": 3, "width": 4})

NEIGHBOURHOOD_CASES = (
    KernelCase(
        "filter_2d",
        partial(filter_2d, stride=2, block_h=4, block_w=8),
        partial(filter_2d_reference, stride=2),
        ({"height": 18, "width": 50}, {"height": 13, "width": 30}, {"height": 5, "width": 7}),
        tensors(normal("height width"), normal("3 3")),
        ("out",),
    ),
    KernelCase(
        "sliding_attention",
        partial(sliding_attention, dim=8, window=6, block=4),
        partial(sliding_attention_reference, window=6),
        ({"seq": 48}, {"seq": 28}, {"seq": 5}),
        tensors(normal("seq 8"), normal("seq 8"), normal("seq 8")),
        ("Out",),
    ),
    KernelCase(
        "clamped_sliding_attention",
        partial(sliding_attention, dim=8, window=6, block=4, bounds="clamped"),
        partial(sliding_attention_reference, window=6),
        ({"seq": 48}, {"seq": 28}, {"seq": 5}),
        tensors(normal("seq 8"), normal("seq 8"), normal("seq 8")),
        ("Out",),
    ),
    KernelCase(
        "sink_attention",
        partial(sink_attention, dim=8, window=6, block=4),
        partial(sink_attention_reference, window=6),
        ({"heads": 2, "seq": 24}, {"heads": 3, "seq": 13}, {"heads": 1, "seq": 3}),
        tensors(*[normal("heads seq 8")] * 3, normal("heads")),
        ("Out",),
    ),
    KernelCase(
        "periodic_neighbours",
        periodic_neighbours,
        periodic_neighbours_reference,
        _PLANES,
        tensors(normal("height width")),
        ("out",),
    ),
    KernelCase(
        "max_pool",
        partial(max_pool, block=8),
        max_pool_reference,
        (
            {"batch": 2, "channels": 4, "height": 8, "width": 4},
            {"batch": 3, "channels": 2, "height": 5, "width": 7},
            {"batch": 1, "channels": 3, "height": 3, "width": 2},
        ),
        tensors(normal("batch channels height width")),
        ("out",),
        EXACT,
    ),
    KernelCase("upsample", upsample, upsample_reference, _PLANES, tensors(normal("height width")), ("out",), EXACT),
    KernelCase(
        "escape_times",
        escape_times,
        escape_times_reference,
        _PLANES,
        tensors(uniform("height width 2", -2.0, 1.0)),
        ("out",),
        EXACT,
    ),
    KernelCase(
        "labelled_cross_entropy",
        labelled_cross_entropy,
        labelled_cross_entropy_reference,
        ({"rows": 16, "classes": 12}, {"rows": 8, "classes": 13}, {"rows": 4, "classes": 3}),
        tensors(normal("rows classes"), integers("rows", -1, "classes")),
        ("loss", "d_logits"),
    ),
)
