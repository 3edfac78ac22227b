"""Arguments that ranks have to refuse, all of them and at once, because they are not what they seem."""

from . import argument_bodies as bodies
from .launcher import run


def test_placements_that_mean_more():
    for texts in run(bodies.placements_that_mean_more, 2):
        for text, what in zip(texts, ("MaskP", "MaskP", "_NormP", "_NormP", "P(avg)", "_S(0, 2)"), strict=True):
            assert f"placement {what}" in text
            assert "of axis 'x' has no counterpart" in text
            assert "redistribute the DTensor to Shard, Replicate, or Partial" in text


def test_parts_of_other_sizes():
    for rank, texts in enumerate(run(bodies.parts_of_other_sizes, 2)):
        for text in texts:
            assert f"this rank's part is ({(1, 7)[rank]}, 8), but expected (4, 8), of (8, 8) 'S[0]'" in text
            assert "make the DTensor from parts as torch.chunk cuts them, or with distribute_tensor" in text
        assert "parameter 'B': this rank's part" in texts[0]


def test_part_of_another_size_on_one_rank():
    for rank, texts in enumerate(run(bodies.part_of_another_size_on_one_rank, 2)):
        for text in texts:
            assert "this rank's part is (3, 8), but expected (4, 8), of (8, 8) 'S[0]'" in text
            assert ("rank 1 refused the call" in text) == (rank == 0)


def test_wrong_on_one_rank():
    count = "1 arguments, but expected 2 (A, B) or 3 (A, B, C)"
    expected = [
        count,
        "shapes is a list, but expected a dict",
        "shapes says 'A' is ([8], 8), but it is (8, 8)",
        "parameter 'A': layout torch.sparse_csr, but expected torch.strided\n",
        count,
        "there is no parameter 'b' (parameters: 'A', 'B', 'C'); did you mean 'B'?",
        "'A' is given twice, by position and by name",
    ]
    for rank, texts in enumerate(run(bodies.wrong_on_one_rank, 2)):
        for text, what in zip(texts, expected, strict=True):
            assert what in text
            assert ("rank 1 refused the call" in text) == (rank == 0)
        assert ("fix: pass a dense copy: .to_dense()" in texts[3]) == (rank == 1)


def test_scalars_that_are_none():
    told = ("1.5, but expected", "'7', but expected", "2147483648 is", "-1099511627776 is", "2147483648 is")
    for texts in run(bodies.scalars_that_are_none, 2):
        for text, what in zip(texts, told, strict=True):
            assert f"parameter 'n': {what}" in text


def test_memory_that_is_shared():
    for text in run(bodies.memory_that_is_shared, 2):
        assert "parameter 'C': is written, but has elements in one place of memory (strides (0, 1))" in text


def test_device_meshes_that_look_alike():
    for text in run(bodies.device_meshes_that_look_alike, 2):
        assert "of ranks [1, 0], but expected" in text
        assert "of ranks [0, 1]" in text


def test_dtypes_that_torch_can_not_gather():
    run(bodies.dtypes_that_torch_can_not_gather, 4)


def test_views_that_are_not_as_their_memory():
    run(bodies.views_that_are_not_as_their_memory, 2)


def test_fake_group():
    (text,) = run(bodies.fake_group, 1, group=False)
    assert "the process group is a fake one, which moves nothing" in text
    assert "use a virtual mesh" in text


def test_ranks_in_another_order():
    for texts in run(bodies.ranks_in_another_order, 4):
        for text in texts:
            assert "can't be brought to" in text
            assert "of ranks [[3, 1], [0, 2]]" in text
            assert "torch gathers in the order of ranks, and axis" in text
            assert "use a DeviceMesh whose ranks ascend along every axis" in text


def test_reductions_without_a_meaning():
    for texts in run(bodies.reductions_without_a_meaning, 2):
        assert "'max' has no meaning for torch.complex64" in texts[0]
        assert "'bitor' has no meaning for torch.complex64" in texts[1]
