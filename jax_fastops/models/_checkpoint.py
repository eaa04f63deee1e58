"""Files of Hugging Face's checkpoints, for all models; messages begin with the model's name."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_json(model: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # of the syntax or of the encoding
        raise ValueError(f"{model}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{model}: {path} is a JSON {type(found).__name__}; it must be an object")
    return found


def read_tensors(model: str, path: Path, ignored: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The tensors of a folder. Names that end with one of ``ignored`` may have any dtype."""
    safetensors = import_safetensors(model)
    files = [WEIGHTS]
    if not (path / WEIGHTS).exists() and (path / INDEX).exists():
        index = read_json(model, path / INDEX)
        if "weight_map" not in index:
            raise ValueError(f"{model}: {path / INDEX} has no weight_map")
        files = sorted(set(index["weight_map"].values()))
    elif not (path / WEIGHTS).exists():
        raise FileNotFoundError(f"{model}: {path} has neither {WEIGHTS} nor {INDEX}")
    dtypes = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
    tensors, others = {}, []
    for file in files:
        content = (path / file).read_bytes()
        try:
            found = safetensors.deserialize(content)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{model}: {path / file} cannot be read: {error}") from error
        for name, tensor in found:
            if tensor["dtype"] in dtypes:
                array = np.frombuffer(tensor["data"], dtypes[tensor["dtype"]])
                tensors[name] = array.reshape(tensor["shape"])
            elif not name.endswith(ignored):
                others.append(f"{name} ({tensor['dtype']})")
    if others:
        raise ValueError(
            f"{model}: tensors of no supported dtype: {', '.join(sorted(others))}; they must be of "
            f"{', '.join(dtypes)}"
        )
    return tensors


def check_tensors(
    model: str,
    tensors: dict[str, np.ndarray],
    wanted: dict[str, tuple[int, ...]],
    remedy: str = "",
) -> None:
    """The tensors have the names and shapes of ``wanted``. The remedy is for names not known."""
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted))
    shapes = [
        f"{name} of {tensors[name].shape}, which by {CONFIG} is {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    found = (("missing", missing), (f"not known{remedy}", unknown), ("of another shape", shapes))
    if wrong := "; ".join(f"{what}: {', '.join(names)}" for what, names in found if names):
        raise ValueError(f"{model}: tensors {wrong}")


def write(model: str, path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes both files. Existing ones are replaced atomically, after both are complete."""
    save_file = import_safetensors(model).numpy.save_file
    path.mkdir(parents=True, exist_ok=True)
    unfinished = {name: path / f"{name}.{os.getpid()}" for name in (CONFIG, WEIGHTS)}
    try:
        unfinished[CONFIG].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        # transformers takes no file without this format.
        save_file(tensors, unfinished[WEIGHTS], metadata={"format": "pt"})
        for name, file in unfinished.items():
            os.replace(file, path / name)
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)


def import_safetensors(model: str):
    """The package safetensors, or an error that says how to install it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"jax_fastops.models.{model}_checkpoint needs safetensors, which cannot be imported "
            f"({error}); install it with: pip install 'jax_fastops[bert]'"
        ) from error
    return safetensors
