"""Files of Hugging Face's checkpoints: JSON, and tensors in files of safetensors.

Messages begin with the model's name.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
}
# What `like` has for users of transformers, next to the config and the weights.
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "tekken.json",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
)
OTHERS = (
    "; encoders are in bert_checkpoint, decoders in decoder_checkpoint; for another model, use "
    "autofuse on an implementation in JAX"
)
_BLOCK = 2**24  # elements that are converted at once


def read_config(model: str, path: Path) -> dict[str, Any]:
    """The content of config.json in a folder."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"{model}: {str(path)!r} is no folder; it must be one with {CONFIG} and {WEIGHTS}. "
            "huggingface_hub.snapshot_download(name) downloads a model and returns its folder"
        )
    if not (path / CONFIG).exists():
        raise FileNotFoundError(f"{model}: {path} has no {CONFIG}")
    return read_json(model, path / CONFIG)


def read_json(model: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # of the syntax or of the encoding
        raise ValueError(f"{model}: {path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{model}: {path} is a JSON {kind}; it must be an object")
    return content


class Stored(NamedTuple):
    """A tensor in a file, or a part of it."""

    file: Path
    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()  # of the part. By default, it is the whole tensor.

    def part(self, start: int, count: int, axis: int = 0) -> "Stored":
        """The part with some of the indices of an axis."""
        starts = list(self.start or (0,) * len(self.shape))
        shape = list(self.shape)
        starts[axis] += start
        shape[axis] = count
        return self._replace(shape=tuple(shape), start=tuple(starts))


def find_tensors(model: str, path: Path, ignored: tuple[str, ...] = ()) -> dict[str, Stored]:
    """The tensors of a folder, except those named in ``ignored``, with any prefix."""
    files = [WEIGHTS]
    if not (path / WEIGHTS).exists() and (path / INDEX).exists():
        files = _indexed(model, path / INDEX)
    elif not (path / WEIGHTS).exists():
        raise FileNotFoundError(
            f"{model}: {path} has neither {WEIGHTS} nor {INDEX}. To convert other files, "
            "call from_pretrained(folder) and save_pretrained(folder) of transformers"
        )
    tensors, others = {}, []
    for file in files:
        with opened_file(model, path / file) as opened:
            for name in opened.keys():
                if f".{name}".endswith(tuple(f".{other}" for other in ignored)):
                    continue
                tensor = opened.get_slice(name)
                dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if dtype in DTYPES:
                    tensors[name] = Stored(path / file, name, dtype, shape)
                else:
                    others.append(f"{name} ({dtype})")
    if others:
        raise ValueError(
            f"{model}: tensors of no supported dtype: {', '.join(sorted(others))}; they must be of "
            f"{', '.join(DTYPES)}"
        )
    return tensors


def _indexed(model: str, index: Path) -> list[str]:
    """The files that an index names."""
    content = read_json(model, index)
    if not isinstance(content.get("weight_map"), dict):
        raise ValueError(f"{model}: {index} has no weight_map")
    return sorted(set(content["weight_map"].values()))


@contextlib.contextmanager
def opened_file(model: str, file: Path) -> Generator[Any]:
    """A file of tensors, which is mapped to memory and checked."""
    safetensors = import_safetensors(model)
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise ValueError(f"{model}: {file} cannot be read: {error}") from error


def read_tensor(model: str, stored: Stored) -> np.ndarray:
    """The whole tensor, in its dtype."""
    with opened_file(model, stored.file) as opened:
        return opened.get_tensor(stored.name)


def blocks(opened: Any, stored: Stored) -> Iterator[tuple[slice, np.ndarray]]:
    """The rows of a tensor, some at a time."""
    tensor, (count, *rest) = opened.get_slice(stored.name), stored.shape
    first, *others = stored.start or (0,) * len(stored.shape)
    whole = tuple(slice(start, start + size) for start, size in zip(others, rest, strict=True))
    step = max(1, _BLOCK // max(1, int(np.prod(rest))))
    for start in range(0, count, step):
        end = min(start + step, count)
        yield slice(start, end), tensor[(slice(first + start, first + end), *whole)]


def same_tensors(model: str, a: Stored, b: Stored) -> bool:
    """Whether two tensors of a rank of 1 or more have the same values."""
    if a.shape != b.shape:
        return False
    with opened_file(model, a.file) as first, opened_file(model, b.file) as second:
        pairs = zip(blocks(first, a), blocks(second, b), strict=True)
        return all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def write(
    model: str,
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    like: Path | None = None,
) -> None:
    """Writes config and tensors, and copies other files of ``like``.

    Existing files are replaced atomically, after all new files are complete. An index of former
    tensors, and the files that it names, are then removed: some programs read all files.
    """
    save_file = import_safetensors(model).numpy.save_file
    path.mkdir(parents=True, exist_ok=True)
    copied: dict[str, Path] = {}
    if like is not None:
        files = [file for pattern in _COPIED for file in like.glob(pattern) if file.is_file()]
        copied = {str(file.relative_to(like)): file for file in files}
    unfinished = {name: path / f"{name}.{os.getpid()}" for name in (CONFIG, WEIGHTS, *copied)}
    dtypes = {tensor.dtype.name for tensor in tensors.values()}
    if len(dtypes) == 1:
        config = config | dict.fromkeys(config.keys() & {"dtype", "torch_dtype"}, *dtypes)
    former: list[str] = []
    with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one is removed as well
        former = _indexed(model, path / INDEX)
    try:
        unfinished[CONFIG].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        # transformers takes no file without this format.
        save_file(tensors, unfinished[WEIGHTS], metadata={"format": "pt"})
        for name, file in copied.items():
            unfinished[name].parent.mkdir(exist_ok=True)
            shutil.copyfile(file, unfinished[name])
        for name, file in unfinished.items():
            os.replace(file, path / name)
        (path / INDEX).unlink(missing_ok=True)
        for name in former:
            if name != WEIGHTS and name.endswith(".safetensors") and Path(name).name == name:
                (path / name).unlink(missing_ok=True)
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
            f"({error}); install it with: pip install safetensors"
        ) from error
    return safetensors
