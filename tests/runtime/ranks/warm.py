"""What the first export, import and plan of a process take, once for all ranks: their fork server imports this."""

import torch

import mesh_tensor as mt

_layer = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
mt.distribute_module(mt.from_torch(_layer).mod, {"x": 2}, {"weight": {"x": 0}})
