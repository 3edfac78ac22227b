"""Convolutional networks in stages, as timm has them: strided blocks, shortcuts, pools, batch norms per microbatch."""

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt


class Residual(nn.Module):
    def __init__(self, taken, made, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(taken, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made)
        self.conv2, self.bn2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        self.downsample = nn.Identity() if taken == made else nn.Conv2d(taken, made, 1, stride)

    def forward(self, x):
        made = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(made + self.downsample(x))


class Resnet(nn.Module):
    """Gives the loss of its logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = Residual(4, 4), nn.Sequential(Residual(4, 6, 2))
        self.fc = nn.Linear(6, 5)

    def forward(self, x, y):
        x = F.max_pool2d(torch.relu(self.bn(self.stem(x))), 3, 2, 1)
        return F.cross_entropy(self.fc(self.layer2(self.layer1(x)).mean((2, 3))), y)


def test_stages_of_a_convnet():
    """Losses, gradients and running statistics of two steps, as torch has them one microbatch after the other."""
    model, count = Resnet(), 3
    module = mt.from_torch(torch.export.export(model, (torch.randn(4, 3, 16, 16), torch.randint(5, (4,)))))
    topology, options = {"m0": {"d": 2}, "m1": {"c": 3}}, {"microbatches": count, "schedule": "zb-h1", "train": True}
    layouts = {"x": {"d": 0}, "layer2.0.conv1.weight": {"c": 0}}
    stages = {"m0": ["stem", "layer1"], "m1": ["layer2", "fc"]}
    run = mt.pipeline(module, topology, stages, layouts, per_microbatch=["*bn*"], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(4 * count, 3, 16, 16), torch.randint(5, (4 * count,))
        optimizer.zero_grad()
        losses = [model(*part) / count for part in zip(x.chunk(count), y.chunk(count), strict=True)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(run(x, y), torch.stack(losses).sum().detach(), rtol=1e-4, atol=1e-5)
        gradients = run.gradients()
        largest = max(float(weight.grad.abs().max()) for weight in model.parameters())
        for name, weight in model.named_parameters():
            found = gradients[module.names[name]]
            torch.testing.assert_close(found / largest, weight.grad / largest, rtol=0, atol=2e-5, msg=name)
        optimizer.step()
        run.update(lambda weight, gradient, state: weight - 0.1 * gradient)
    state = run.state_dict()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
