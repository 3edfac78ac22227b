"""What turns of loops make for each device."""

import torch

from mesh_tensor.runtime.loops import _Rows


def test_devices_share_rows_for_as_long_as_they_share_all_of_them():
    shared, others = torch.rand(2, 3), [torch.rand(2, 3) for _ in range(3)]
    turns = [[shared] * 3, [others[0], others[0], others[1]], [shared, shared, others[2]]]
    rows = _Rows(3)
    for turn, tiles in enumerate(turns):
        rows.put(turn, tiles)
    made = rows.tiles((6, 3))
    for device, tile in enumerate(made):
        assert torch.equal(tile, torch.cat([tiles[device] for tiles in turns]))
    assert made[0] is made[1]
    assert made[0].data_ptr() != made[2].data_ptr()


def test_rows_take_the_memory_of_their_result_alone():
    rows = _Rows(4)
    rows.put(0, [torch.ones(5)])
    place = rows.tiles((4, 5))[0].data_ptr()
    for turn in range(1, 4):
        rows.put(turn, [torch.ones(5) + turn])
    (made,) = rows.tiles((4, 5))
    assert made.data_ptr() == place
    assert torch.equal(made, torch.arange(1.0, 5.0)[:, None].expand(4, 5))
