"""Checkpoints, outputs and gradients of other libraries' models in `tests/data`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

DATA = Path(__file__).resolve().parents[1] / "data"


def content(folder: Path, file: str = "config.json") -> dict:
    """Of a checkpoint's JSON file."""
    return json.loads((folder / file).read_text())


class Recordings:
    """The recordings of a family of models.

    Args:
      family: the folder in `tests/data`.
      load: reads a checkpoint's folder into a config and parameters.
      usual: the recording that `written` changes.
    """

    def __init__(self, family: str, load: Callable[..., Any], usual: str):
        self.folder, self.load, self.usual = DATA / family, load, usual

    @property
    def names(self) -> list[str]:
        return sorted(folder.name for folder in self.folder.iterdir())

    def arrays(self, name: str) -> dict[str, dict[str, np.ndarray]]:
        """Inputs, outputs and what else was recorded, by kind and by name."""
        found: dict = {}
        path = self.folder / name / "arrays.safetensors"
        for key, value in safetensors.numpy.load_file(path).items():
            kind, _, own = key.partition(".")
            found.setdefault(kind, {})[own] = value
        return found

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """The checkpoint's tensors."""
        return safetensors.numpy.load_file(self.folder / name / "model.safetensors")

    def divided(self, name: str, into: Path) -> None:
        """Writes the checkpoint with its tensors in two files."""
        tensors, index = sorted(self.tensors(name).items()), {}
        for file, own in ("a.safetensors", tensors[::2]), ("b.safetensors", tensors[1::2]):
            safetensors.numpy.save_file(dict(own), into / file)
            index |= dict.fromkeys(dict(own), file)
        (into / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        shutil.copy(self.folder / name / "config.json", into)

    def gradients(self, name: str, into: Path, **options: Any) -> dict:
        """Loads recorded gradients like parameters: they have the same tensor names."""
        shutil.copy(self.folder / name / "config.json", into)
        shutil.copy(self.folder / name / "gradients.safetensors", into / "model.safetensors")
        return self.load(into, **options)[1]

    def written(self, into: Path, tensors: Any = None, name: str | None = None, **changes) -> Path:
        """Writes a checkpoint with the config and tensors of a recording, and these changes."""
        name = name or self.usual
        config = content(self.folder / name) | changes
        (into / "config.json").write_text(json.dumps(config))
        tensors = self.tensors(name) if tensors is None else tensors
        safetensors.numpy.save_file(tensors, into / "model.safetensors")
        return into
