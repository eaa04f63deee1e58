"""What the scripts that make tests/data have in common. It needs torch."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def randomize(
    model: torch.nn.Module, generator: torch.Generator, *, norm: str, matrix: float, vector: float
) -> None:
    """Replaces parameters by random numbers, because some start as zeros or ones.

    The scale of a layer whose name ends with ``norm`` is around 1. Other parameters are around 0,
    with the standard deviations ``matrix`` and ``vector``.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith(f"{norm}.weight"):
                parameter.copy_(1 + 0.3 * values)
            else:
                parameter.copy_((matrix if parameter.ndim > 1 else vector) * values)


def padding(lengths: torch.Tensor, sequence: int) -> torch.Tensor:
    """The mask of sequences of these lengths. The first one has no padding."""
    lengths[0] = sequence
    return (torch.arange(sequence) < lengths[:, None]).long()


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """Writes a checkpoint, and the gradients of the parameters if there are any."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["transformers_version"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if gradients:
        save_file(gradients, folder / "gradients.safetensors")


def save_arrays(folder: Path, **kinds: dict[str, torch.Tensor]) -> None:
    """Writes arrays by kind and name, as int32 or float32."""
    arrays = {
        f"{kind}.{name}": (x.float() if x.is_floating_point() else x.int()).detach().contiguous()
        for kind, values in kinds.items()
        for name, x in values.items()
    }
    save_file(arrays, folder / "arrays.safetensors")
