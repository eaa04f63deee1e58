"""A training step of ResNet-50 in PyTorch, as people write it, compiled by Inductor.

``python -m benchmarks.torch_resnet '{"batch": 128, "size": 224, "rate": 0.05, "momentum": 0.9}'``
prints its times as JSON. ``benchmarks.resnet`` calls it in a process of its own.
"""

import json
import statistics
import sys

from benchmarks import jobs

STEPS, RUNS = 20, 3


def main() -> None:
    import torch
    import torchvision

    options = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torchvision.models.resnet50(weights=None).to(device, memory_format=torch.channels_last)
    optimise = torch.optim.SGD(
        model.parameters(),
        lr=options["rate"],
        momentum=options["momentum"],
        foreach=True,
    )
    shape = (options["batch"], 3, options["size"], options["size"])
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (options["batch"],), device=device)
    loss_of = torch.compile(
        lambda x, y: torch.nn.functional.cross_entropy(model(x), y), dynamic=False
    )

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(images, labels)
        loss.backward()
        optimise.step()
        optimise.zero_grad(set_to_none=True)

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = jobs.steady(step, wait, STEPS)
    ms = found["all_ms"]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    print(
        json.dumps(
            {
                "median_us": statistics.median(ms) * 1e3,
                "spread_us": (max(ms) - min(ms)) * 1e3,
                "peak_mib": peak / 2**20,
                "versions": {"torch": torch.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
