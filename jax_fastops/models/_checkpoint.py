"""Parameters and configs from and to Hugging Face's checkpoints.

Messages begin with the model's name.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_fastops.bias_act import ACTIVATIONS
from jax_fastops.models._checkpoint_files import (
    CONFIG,
    DTYPES,
    Stored,
    blocks,
    opened_file,
    read_config,
)

# Fields of a Config that all models have, and their names in config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "init_range": "initializer_range",
}
# Hugging Face's names of activations, where they differ, and the names for the same function.
ACTIVATION_NAMES = {"gelu_exact": "gelu", "gelu": "gelu_new"}
ACTIVATION_OF = {ACTIVATION_NAMES.get(name, name): name for name in ACTIVATIONS} | {
    "gelu_python": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "swish": "silu",
}
# Fields of a Config that are not part of the network.
_OWN = ("dtype", "attention", "tensor_parallel", "remat", "remat_every", "scan")

Shardings: TypeAlias = Sharding | dict[str, Any] | Callable[[Any], Any] | None


class Leaf(NamedTuple):
    """The place of a tensor in the parameters."""

    path: tuple
    transposed: bool = False  # PyTorch's kernels are [out, in, ...]
    third: int | None = None  # 0, 1, 2: queries, keys, values
    layer: int | None = None  # in a stack of layers
    offset: float = 0.0  # of the parameter from the tensor

    def view(self, array: Any) -> Any:
        """The part of a parameter (of one layer) that is the tensor, in the tensor's order."""
        if self.third is not None:
            rows = array.shape[: int(self.transposed)]
            array = array.reshape(*rows, 3, -1)[..., self.third, :]
        # Of a convolution, the window comes last.
        return np.moveaxis(array, (-1, -2), (0, 1)) if self.transposed else array

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, by that of the parameter."""
        shape = shape if self.layer is None else shape[1:]
        return self.view(np.broadcast_to(np.empty((), np.bool_), shape)).shape


def keys_of(path: tuple) -> tuple:
    """The keys of a path of ``jax.tree``: names and indices."""
    return tuple(step.idx if hasattr(step, "idx") else step.key for step in path)


def leaves_of(
    tree: Any,
    modules: dict[str, Any],
    layer_module: str,
    *,
    transposed: bool = True,
    unit_offset: bool = False,
) -> dict[str, Leaf]:
    """The tensors of parameters by their names.

    Args:
      tree: the parameters, or their shapes. The layers are a list, or stacked.
      modules: PyTorch's module of each product, norm and table, in a tree like the parameters. One
        layer stands for all. Three modules have the thirds of one product.
      layer_module: the module of all layers, which are its modules ``0``, ``1`` and so on.
      transposed: whether kernels are [out, in].
      unit_offset: whether scales are stored less 1.
    """
    leaves: dict[str, Leaf] = {}
    for tree_path, leaf in jax.tree.leaves_with_path(tree):
        path = keys_of(tree_path)
        own: Any = modules
        for name in (key for key in path if isinstance(key, str)):
            own = own[name] if isinstance(own, dict) else own
        own = (own,) if isinstance(own, str) else own
        if path[0] != "layers":
            prefixes: dict[int | None, str] = {None: ""}
        elif isinstance(path[1], int):
            prefixes = {None: f"{layer_module}.{path[1]}."}
        else:
            prefixes = {layer: f"{layer_module}.{layer}." for layer in range(leaf.shape[0])}
        kind = "bias" if path[-1] == "bias" else "weight"
        for layer, prefix in prefixes.items():
            for index, name in enumerate(own):
                third = index if len(own) == 3 else None
                tensor = f"{prefix}{name}.{kind}"
                turned = transposed and path[-1] == "kernel"
                offset = float(unit_offset and path[-1] == "scale")
                leaves[tensor] = Leaf(path, turned, third, layer, offset)
    return leaves


def tensor_shapes(leaves: dict[str, Leaf], tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, by those of the parameters."""
    own = {keys_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}
    return {name: leaf.tensor_shape(own[leaf.path]) for name, leaf in leaves.items()}


Packed: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


def _parts_of(names: Iterable[str], packed: Packed) -> Iterator[tuple[str, list[str]]]:
    """The names of packed tensors, and those of their parts, by all names of the latter."""
    for whole, parts in packed:
        for name in names:
            if f".{parts[0]}." in name:
                yield name.replace(parts[0], whole), [name.replace(parts[0], p) for p in parts]


def unpacked(
    tensors: dict[str, Stored], shapes: dict[str, tuple[int, ...]], packed: Packed, axis: int
) -> dict[str, Stored]:
    """The tensors with the parts of packed ones, along an axis, in place of these."""
    tensors = dict(tensors)
    for whole, parts in _parts_of(shapes, packed):
        counts = [shapes[part][axis] for part in parts]
        if whole in tensors and tensors[whole].shape[axis] == sum(counts):
            stored, start = tensors.pop(whole), 0
            for part, count in zip(parts, counts, strict=True):
                tensors[part] = stored.part(start, count, axis)
                start += count
    return tensors


def packed_tensors(
    tensors: dict[str, np.ndarray], packed: Packed, axis: int
) -> dict[str, np.ndarray]:
    """The inverse of :func:`unpacked`, of arrays."""
    tensors = dict(tensors)
    for whole, parts in _parts_of(list(tensors), packed):
        tensors[whole] = np.concatenate([tensors.pop(part) for part in parts], axis)
    return tensors


def check_tensors(
    model: str, tensors: dict[str, Stored], leaves: dict[str, Leaf], tree: Any, remedy: str = ""
) -> None:
    """The tensors have the names and shapes of the leaves. The remedy is for names not known."""
    shapes = tensor_shapes(leaves, tree)
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
    """Reads tensors of the right shapes, and puts each on its devices before the next one.

    ``tree`` has the shapes of the parameters. ``sharding`` is ``None``, a sharding, or a tree of
    them, of which only a part may be needed.
    """
    with_paths, structure = jax.tree.flatten_with_path(tree)
    shapes = {keys_of(path): leaf.shape for path, leaf in with_paths}
    shardings = {path: _sharding_at(model, sharding, path) for path in shapes}
    params: dict[tuple, jax.Array] = {}
    unfinished: dict[tuple, tuple[np.ndarray, int]] = {}  # and the number of thirds so far

    def take(opened: Any, stored: Stored, leaf: Leaf) -> None:
        path, shape = leaf.path, shapes[leaf.path]
        own = shape if leaf.layer is None else shape[1:]
        # Near 1, a narrow dtype has fewer digits than near 0.
        own_dtype = np.promote_types(dtype, np.float32) if leaf.offset else dtype
        array, thirds = unfinished.pop(path, None) or (np.empty(own, own_dtype), 0)
        part = leaf.view(array)
        for rows, block in blocks(opened, stored):
            part[rows] = block.astype(own_dtype) + leaf.offset if leaf.offset else block
        if leaf.third is not None and thirds < 2:
            unfinished[path] = array, thirds + 1
            return
        if leaf.layer is None:
            params[path] = _put(array, shardings[path])
        else:
            stack = params.pop(path, None)
            if stack is None:
                stack = jnp.zeros(shape, own_dtype, device=shardings[path])
            params[path] = _with_layer(stack, array, leaf.layer, shardings[path])
        # So that arrays do not gather on the host while they wait for their transfer.
        params[path].block_until_ready()

    for file in sorted({tensors[name].file for name in leaves}):
        with opened_file(model, file) as opened:
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


def _array_of(leaf: Any) -> np.ndarray:
    """A parameter on the host, in its dtype if files may have it, else in float32."""
    array = np.asarray(leaf)
    known = any(array.dtype == dtype for dtype in DTYPES.values())
    return array if known else array.astype(np.float32)


def tensors_of(params: Any, leaves: dict[str, Leaf]) -> dict[str, np.ndarray]:
    """The tensors of parameters."""
    arrays = {keys_of(path): _array_of(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
    tensors = {}
    for name, leaf in leaves.items():
        array = arrays[leaf.path]
        array = array if leaf.layer is None else array[leaf.layer]
        view = leaf.view(array)
        tensors[name] = np.ascontiguousarray(view - leaf.offset if leaf.offset else view)
    return tensors


def check_supported(model: str, content: dict[str, Any], supported: dict[str, Any]) -> None:
    """Options that ``content`` has are the supported ones."""
    for name, value in supported.items():
        if content.get(name, value) != value:
            raise ValueError(
                f"{model}: {name} in {CONFIG} is {content[name]!r}; supported is {value!r}"
            )


def without_null(content: dict[str, Any], nullable: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys whose value is not ``null``, and those where ``null`` has a meaning."""
    return {key: a for key, a in content.items() if a is not None or key in nullable}


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
