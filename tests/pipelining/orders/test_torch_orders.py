"""Our orders against those of torch.distributed.pipelining, action by action, from its own generators."""

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules  # noqa: TID251
from torch.distributed.pipelining.stage import _PipelineStageBase  # noqa: TID251

from mesh_tensor import MeshTensorError
from mesh_tensor.pipelining import Action, Schedule, check_schedule

SIZES = [(p, m) for p in range(1, 6) for m in range(1, 14)]


def torch_rows(kind, p, m, v):
    """What torch's generator makes; its stages are only asked for sizes."""
    sizes = {"group_size": p, "num_stages": p * v, "group_rank": 0, "submod": None, "has_backward": True}
    stages = [MagicMock(spec=_PipelineStageBase, stage_index=c * p, **sizes) for c in range(v)]
    order = kind(stages, m, loss_fn=lambda *args: None).pipeline_order
    flat = [[part for action in order[rank] if action for part in action.sub_actions or [action]] for rank in range(p)]
    return tuple(
        tuple(Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in row) for row in flat
    )


def torch_single_rows(kind, p, m):
    """What torch's single-stage schedules run: their loop, on stages that only note what they are told to do."""
    rows = []
    for rank in range(p):
        row = []
        stage = MagicMock(spec=_PipelineStageBase, num_stages=p, group_size=p, group_rank=rank, stage_index=rank)
        stage.configure_mock(is_first=rank == 0, is_last=rank == p - 1, has_backward=True, submod=None)
        for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, ops).return_value = []
        stage.forward_one_chunk.side_effect = lambda i, *args, row=row, s=rank, **kw: row.append(Action("F", s, i))
        stage.backward_one_chunk.side_effect = lambda i, *args, row=row, s=rank, **kw: row.append(Action("B", s, i))
        schedule = kind(stage, m, loss_fn=lambda *args: None)
        schedule._initialize_stage = lambda *args: None
        schedule._maybe_compute_loss = schedule._maybe_get_loss = schedule._update_losses = lambda *args: None
        schedule._step_microbatches([()] * m, [{}] * m)
        rows.append(tuple(row))
    return tuple(rows)


SEVERAL = [
    ("interleaved", "ScheduleInterleaved1F1B", (1, 2, 3)),
    ("looped-bfs", "ScheduleLoopedBFS", (1, 2, 3)),
    ("zb-h1", "ScheduleInterleavedZeroBubble", (1, 2, 3)),
    ("zbv", "ScheduleZBVZeroBubble", (2,)),
    ("dualpipev", "ScheduleDualPipeV", (2,)),
]


@pytest.mark.parametrize(("name", "kind", "chunks"), SEVERAL)
def test_orders_with_several_stages_per_rank_are_torch_s(name, kind, chunks):
    kind, compared = getattr(torch_schedules, kind), 0
    for p, m in SIZES:
        for v in chunks:
            try:
                theirs = torch_rows(kind, p, m, v)
            except ValueError:  # torch has no such order: neither do we, except that rounds may differ
                if name == "dualpipev":
                    with pytest.raises(MeshTensorError, match="to fill both directions"):
                        Schedule.named(name, p, m, v)
                continue
            ours = Schedule.named(name, p, m, v)
            assert ours.rows == theirs, (p, m, v)
            check_schedule(ours, meshes=p, stages=p * v, microbatches=m)
            compared += 1
    assert compared > 25


@pytest.mark.parametrize(("name", "kind"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_orders_with_a_stage_per_rank_are_what_torch_runs(name, kind):
    for p, m in SIZES:
        if m >= p:  # torch asks for that
            assert Schedule.named(name, p, m).rows == torch_single_rows(getattr(torch_schedules, kind), p, m), (p, m)


@pytest.mark.parametrize(("name", "kind", "chunks"), SEVERAL)
def test_torch_reads_our_csv_and_we_read_what_torch_writes(name, kind, chunks, tmp_path):
    """What is computed alone, and with what is sent and gathered."""
    p, m, v = 2, 6, chunks[-1]
    stages = [MagicMock(spec=_PipelineStageBase, stage_index=c * p, submod=None, has_backward=True) for c in range(v)]
    for stage in stages:
        stage.configure_mock(group_size=p, num_stages=p * v, group_rank=0)
    theirs = getattr(torch_schedules, kind)(stages, m, loss_fn=lambda *args: None)
    ours = Schedule.named(name, p, m, v)
    for form in ("compute_only", "compute_comms"):
        theirs._dump_csv(tmp_path / f"{form}.csv", form)
        read = Schedule.from_csv((tmp_path / f"{form}.csv").read_text())
        check_schedule(read, meshes=p, stages=p * v, microbatches=m)
        assert read.rows == ours.rows

    (tmp_path / "ours.csv").write_text(ours.to_csv(), newline="")
    theirs._load_csv(tmp_path / "ours.csv")
    found = [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in row]
        for row in theirs.pipeline_order.values()
    ]
    assert tuple(map(tuple, found)) == ours.rows


@pytest.mark.parametrize(
    ("name", "kind"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B"), *(o[:2] for o in SEVERAL)]
)
def test_names_of_torchs_classes_are_known(name, kind):
    assert Schedule.named(kind, 2, 4) == Schedule.named(name, 2, 4)
