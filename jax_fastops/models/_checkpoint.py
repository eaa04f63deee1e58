"""Files of Hugging Face's checkpoints, for all models; messages begin with the model's name."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

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
# Fields of a Config that are not part of the network.
_OWN = ("dtype", "attention", "tensor_parallel", "remat", "scan")
_BLOCK = 2**24  # elements that are converted at once


# ---- load ----------------------------------------------------------------------------------------


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


def without_null(content: dict[str, Any], nullable: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys whose value is not ``null``, and those where ``null`` has a meaning."""
    return {key: a for key, a in content.items() if a is not None or key in nullable}


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]


def find_tensors(model: str, path: Path, ignored: tuple[str, ...] = ()) -> dict[str, Stored]:
    """The tensors of a folder. Names that end with one of ``ignored`` may have any dtype."""
    files = [WEIGHTS]
    if not (path / WEIGHTS).exists() and (path / INDEX).exists():
        files = _indexed(model, path / INDEX)
    elif not (path / WEIGHTS).exists():
        raise FileNotFoundError(f"{model}: {path} has neither {WEIGHTS} nor {INDEX}")
    tensors, others = {}, []
    for file in files:
        with _opened(model, path / file) as opened:
            for name in opened.keys():
                tensor = opened.get_slice(name)
                dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if dtype in DTYPES:
                    tensors[name] = Stored(path / file, name, dtype, shape)
                elif not name.endswith(ignored):
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
def _opened(model: str, file: Path) -> Generator[Any]:
    """A file of tensors, which is mapped to memory and checked."""
    safetensors = import_safetensors(model)
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise ValueError(f"{model}: {file} cannot be read: {error}") from error


def read_tensor(model: str, stored: Stored) -> np.ndarray:
    """The whole tensor, in its dtype."""
    with _opened(model, stored.file) as opened:
        return opened.get_tensor(stored.name)


def _blocks(opened: Any, stored: Stored) -> Iterator[tuple[slice, np.ndarray]]:
    """The rows of a tensor, some at a time."""
    tensor, (count, *rest) = opened.get_slice(stored.name), stored.shape
    step = max(1, _BLOCK // max(1, int(np.prod(rest))))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        yield rows, tensor[rows]


def check_tensors(
    model: str,
    tensors: dict[str, Stored],
    shapes: dict[str, tuple[int, ...]],
    remedy: str = "",
) -> None:
    """The tensors have these names and shapes. The remedy is for names not known."""
    missing = sorted(set(shapes) - set(tensors))
    unknown = sorted(set(tensors) - set(shapes))
    others = [
        f"{name} of {tensors[name].shape}, which by {CONFIG} is {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    kinds = (("missing", missing), (f"not known{remedy}", unknown), ("of another shape", others))
    if wrong := "; ".join(f"{what}: {', '.join(names)}" for what, names in kinds if names):
        raise ValueError(f"{model}: tensors {wrong}")


def same_tensors(model: str, a: Stored, b: Stored) -> bool:
    """Whether two tensors of a rank of 1 or more have the same values."""
    if a.shape != b.shape:
        return False
    with _opened(model, a.file) as first, _opened(model, b.file) as second:
        pairs = zip(_blocks(first, a), _blocks(second, b), strict=True)
        return all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


class Leaf(NamedTuple):
    """The place of a tensor in the parameters."""

    path: tuple
    transposed: bool = False  # PyTorch's products are [out, in]
    third: int | None = None  # 0, 1, 2: queries, keys, values
    layer: int | None = None  # in a stack of layers

    def view(self, array: Any) -> Any:
        """The part of a parameter (of one layer) that is the tensor, in the tensor's order."""
        if self.third is not None:
            rows = array.shape[: int(self.transposed)]
            array = array.reshape(*rows, 3, -1)[..., self.third, :]
        return array.T if self.transposed else array

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, by that of the parameter."""
        shape = shape if self.layer is None else shape[1:]
        return self.view(np.broadcast_to(np.empty((), np.bool_), shape)).shape


def keys_of(path: tuple) -> tuple:
    """The keys of a path of ``jax.tree``: names and indices."""
    return tuple(step.idx if hasattr(step, "idx") else step.key for step in path)


def parameter_dtype(model: str, param_dtype: Any) -> np.dtype:
    """The dtype that the argument ``param_dtype`` means."""
    accepted = [jnp.dtype(dtype).name for dtype in DTYPES.values()]
    try:  # None would be float64
        name = "" if param_dtype is None else jnp.dtype(param_dtype).name
    except TypeError:
        name = ""
    if name not in accepted:
        raise ValueError(
            f"{model}: param_dtype is {param_dtype!r}; it must be one of "
            f"{', '.join(map(repr, accepted))}"
        )
    if jax.dtypes.canonicalize_dtype(name) != name:
        raise ValueError(
            f"{model}: param_dtype is {param_dtype!r}, which JAX has only if jax_enable_x64 is True"
        )
    return jnp.dtype(name)


def read_params(
    model: str,
    tensors: dict[str, Stored],
    leaves: dict[str, Leaf],
    tree: Any,
    dtype: np.dtype,
    sharding: Any,
) -> Any:
    """Reads tensors, one after another, and puts each on its devices before the next.

    Args:
      model: the name of the model.
      tensors: the tensors, whose shapes are right.
      leaves: their places in the parameters, by the same names.
      tree: the tree of the parameters' shapes.
      dtype: of the parameters.
      sharding: ``None``, a sharding, or a tree of them, of which only a part may be needed.
    """
    with_paths, structure = jax.tree.flatten_with_path(tree)
    shapes = {keys_of(path): leaf.shape for path, leaf in with_paths}
    shardings = {path: _sharding_at(model, sharding, path) for path in shapes}
    params: dict[tuple, jax.Array] = {}
    unfinished: dict[tuple, tuple[np.ndarray, int]] = {}  # and the number of thirds so far

    def take(opened: Any, stored: Stored, leaf: Leaf) -> None:
        path, shape = leaf.path, shapes[leaf.path]
        own = shape if leaf.layer is None else shape[1:]
        array, thirds = unfinished.pop(path, None) or (np.empty(own, dtype), 0)
        part = leaf.view(array)
        for rows, block in _blocks(opened, stored):
            part[rows] = block
        if leaf.third is not None and thirds < 2:
            unfinished[path] = array, thirds + 1
            return
        if leaf.layer is None:
            params[path] = _put(array, shardings[path])
        else:
            stack = params.pop(path, None)
            if stack is None:
                stack = jnp.zeros(shape, dtype, device=shardings[path])
            params[path] = _with_layer(stack, array, leaf.layer, shardings[path])
        # So that arrays do not gather on the host while they wait for their transfer.
        params[path].block_until_ready()

    for file in sorted({tensors[name].file for name in leaves}):
        with _opened(model, file) as opened:
            for name, leaf in leaves.items():
                if tensors[name].file == file:
                    take(opened, tensors[name], leaf)
    return structure.unflatten([params[path] for path in shapes])


def _sharding_at(model: str, sharding: Any, path: tuple) -> Sharding | None:
    """The sharding of the parameter at a path: a leaf of the tree on the way to it, or at it."""
    result = sharding
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for step in path:
            result = result if result is None or isinstance(result, Sharding) else result[step]
    if result is None or isinstance(result, Sharding):
        return result
    where = "".join(f"[{step!r}]" for step in path)
    raise ValueError(
        f"{model}: sharding has no Sharding of params{where}; it must be a jax.sharding.Sharding, "
        "or a tree of them like the parameters, or a function of the config that returns one"
    )


def _put(array: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(array)
    # A process puts its own part only. jax.device_put would compare the arrays of all processes.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _with_layer(
    stack: jax.Array, array: np.ndarray, layer: int, sharding: Sharding | None
) -> jax.Array:
    """A stack with one more layer, in the memory of the former stack."""
    own: Any = array[None]
    if isinstance(sharding, NamedSharding):  # otherwise jit puts the layer on all devices
        spec = PartitionSpec(None, *sharding.spec[1:])
        own = _put(own, NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind))
    update = jax.jit(_updated, donate_argnums=0, out_shardings=sharding)
    return update(stack, own, np.int32(layer))


def _updated(stack, own, layer):
    # As integers. On a CPU, XLA would convert a whole stack of bfloat16 to float32, and back.
    bits = jnp.dtype(f"uint{8 * stack.dtype.itemsize}")
    stack_bits, own_bits = (jax.lax.bitcast_convert_type(a, bits) for a in (stack, own))
    updated = jax.lax.dynamic_update_slice_in_dim(stack_bits, own_bits, layer, axis=0)
    return jax.lax.bitcast_convert_type(updated, stack.dtype)


# ---- save ----------------------------------------------------------------------------------------


def array_of(leaf: Any) -> np.ndarray:
    """A parameter on the host, in its dtype if files may have it, else in float32."""
    array = np.asarray(leaf)
    known = any(array.dtype == dtype for dtype in DTYPES.values())
    return array if known else array.astype(np.float32)


def network(config: Any) -> Any:
    """The config with the defaults of the fields that are not part of the network."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: fields[name].default for name in _OWN})


def written_like(
    model: str,
    like: Path,
    config: Any,
    read: Callable[[dict], Any],
    written: Callable[[dict], dict[str, Any]],
) -> dict[str, Any]:
    """The content of config.json in the folder ``like``, changed where its network is another one.

    ``read`` makes a Config of such a content. ``written`` changes one to say ``config``.
    """
    given = read_config(model, like)
    old, new = network(read(given)), network(config)
    sizes = [
        f"{field.name} is {getattr(old, field.name)}, but in config {getattr(new, field.name)}"
        for field in dataclasses.fields(new)
        if field.type == "int" and getattr(old, field.name) != getattr(new, field.name)
    ]
    if sizes:
        raise ValueError(f"{model}: like, {like}, has other shapes: {'; '.join(sizes)}")
    content = given if old == new else written(given)
    if network(read(content)) != new:
        raise ValueError(
            f"{model}: like, {like}, is of the model_type {given['model_type']!r}, which cannot "
            f"have config: {config}"
        )
    return content


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
            f"({error}); install it with: pip install 'jax_fastops[bert]'"
        ) from error
    return safetensors
