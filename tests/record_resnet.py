"""Makes tests/data/resnet: a tiny ResNet of torchvision's blocks, with logits.

Needs torch and torchvision: `python tests/record_resnet.py`.
"""

from pathlib import Path

import torch
from recorder import save_arrays
from safetensors.torch import save_file
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

FOLDER = Path(__file__).parent / "data" / "resnet"
WIDTH = 2


class Tiny(ResNet):
    """torchvision's ResNet with other channels. Its constructor has only 64."""

    def __init__(self, block, layers, classes):
        nn.Module.__init__(self)
        self._norm_layer, self.inplanes, self.dilation = nn.BatchNorm2d, WIDTH, 1
        self.groups, self.base_width = 1, 64
        self.conv1 = nn.Conv2d(3, WIDTH, 7, stride=2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)
        self.maxpool, self.avgpool = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
        for stage, count in enumerate(layers):
            layer = self._make_layer(block, WIDTH << stage, count, 2 if stage else 1)
            setattr(self, f"layer{stage + 1}", layer)
        self.fc = nn.Linear((WIDTH << 3) * block.expansion, classes)


def record() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Tiny(Bottleneck, (1, 2, 1, 1), 3).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + values.abs())
            elif tensor.ndim == 1:
                tensor.copy_(0.3 * values + name.endswith(("bn1.weight", "bn3.weight")))
            elif tensor.ndim:
                tensor.copy_(values / tensor[0].numel() ** 0.5)
        images = torch.randn(2, 3, 21, 20, generator=generator)
        logits = model(images)
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), FOLDER / "model.safetensors")
    save_arrays(FOLDER, inputs={"images": images}, outputs={"logits": logits})


if __name__ == "__main__":
    record()
