"""Cases of the kernels that read neighbourhoods."""

from functools import partial

from kernels.neighbourhoods import filter_2d, filter_2d_reference, sliding_attention, sliding_attention_reference

from .case import KernelCase, normal, tensors

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
)
