"""Checks that the models share."""

import dataclasses
import math
import numbers
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Checks(NamedTuple):
    """Checks whose messages begin with the name of a model."""

    model: str

    def type(self, name: str, value, types, accepted: str) -> None:
        """``value`` is of one of the types, which ``accepted`` describes."""
        if isinstance(value, Tracer):
            raise TypeError(
                f"{self.model}: {name} is traced; it must be {accepted} "
                "(jax.jit has static_argnames)"
            )
        if not isinstance(value, types):
            module, kind = type(value).__module__, type(value).__name__
            if module.startswith("jax_fastops."):  # the Config of another model
                kind = f"{module.rpartition('.')[2]}.{kind}"
            raise TypeError(f"{self.model}: {name} is of type {kind}; it must be {accepted}")

    def choice(self, name: str, value, choices: tuple[str, ...], advice: str = "") -> None:
        """``value`` is one of the choices."""
        if value not in choices:
            accepted = ", ".join(map(repr, choices))
            raise ValueError(
                f"{self.model}: {name} is {value!r}; it must be one of {accepted}{advice}"
            )

    def finite(self, **values: float) -> None:
        """The values are 0 or more, and finite."""
        for name, value in values.items():
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{self.model}: {name} is {value}; it must be 0 or more, and finite"
                )

    def integer(self, name: str, value, least: int) -> int:
        """The value as an int of ``least`` or more."""
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{self.model}: {name} is {value!r}; it must be an integer") from None
        if value < least:
            raise ValueError(f"{self.model}: {name} is {value}; it must be {least} or more")
        return value

    def number(self, name: str, value) -> float:
        """The value as a float."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            kind = type(value).__name__
            raise TypeError(
                f"{self.model}: {name} is of type {kind}; it must be a Python or NumPy number"
            )
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{self.model}: {name} is {value}, which no float can hold") from None

    def scalar(self, name: str, value, *, share: bool = False) -> Any:
        """A finite float, 0 or more, or a traced number. A share is above 0, and at most 1."""
        if shape := np.shape(value):
            raise ValueError(f"{self.model}: {name} has shape {shape}; it must be one number")
        if isinstance(value, Tracer):
            self.array(name, value, (jnp.floating, jnp.integer), "floats or integers")
            return value
        value = self.number(name, np.asarray(value).item())
        if share and not 0 < value <= 1:
            raise ValueError(f"{self.model}: {name} is {value}; it must be above 0, and at most 1")
        self.finite(**{name: value})
        return value

    def boolean(self, name: str, value) -> bool:
        """The value as a bool."""
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{self.model}: {name} is {value!r}; it must be True or False")
        return bool(value)

    def dtype(self, dtype) -> str:
        """The name of a floating dtype, given by itself or by its name."""
        try:
            name = dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
        except TypeError:
            name = None
        if name is None:  # NumPy takes None for float64
            raise TypeError(
                f"{self.model}: dtype is {dtype!r}; it must be a dtype or the name of one"
            )
        self.choice("dtype", name, _DTYPES)
        return name

    def fields(self, config: Any) -> None:
        """Gives the fields of a frozen config Python's values, or says which has another type.

        A NumPy number equals Python's, but a NumPy dtype not its name. Integers must be 1 or more.
        Other fields than those below stay as they are.
        """
        for field in dataclasses.fields(config):
            name, value = field.name, getattr(config, field.name)
            if name == "dtype":
                value = self.dtype(value)
            elif field.type in ("int | None", "float | None") and value is None:
                continue
            elif field.type in ("int", "int | None"):  # the text of the annotation
                value = self.integer(name, value, 1)
            elif field.type in ("float", "float | None"):
                value = self.number(name, value)
            elif field.type == "bool":
                value = self.boolean(name, value)
            object.__setattr__(config, name, value)

    def tree(self, name: str, given, expected) -> None:
        """``given`` has the tree and the shapes of ``expected``."""

        def sizes(tree):
            leaves = jax.tree.leaves_with_path(tree)
            return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}

        start, given, expected = f"{self.model}: {name}", sizes(given), sizes(expected)
        for path, shape in expected.items():
            if path not in given:
                raise ValueError(f"{start} has no {path}, which config has, of shape {shape}")
            if given[path] != shape:
                raise ValueError(
                    f"{start}{path} has shape {given[path]}; by config it must be {shape}"
                )
        if more := sorted(set(given) - set(expected)):
            raise ValueError(f"{start} has {more[0]}, which config has not")

    def shape(self, name: str, value, other: str, shape: tuple[int, ...]) -> None:
        """``value`` has the shape of another argument."""
        if value.shape != shape:
            raise ValueError(
                f"{self.model}: {name} has shape {value.shape}; it must be {shape}, as {other} has"
            )

    def features(self, hidden, size: int) -> None:
        """The last axis of ``hidden`` has ``hidden_size`` elements."""
        if hidden.shape[-1:] != (size,):
            raise ValueError(
                f"{self.model}: hidden has shape {hidden.shape}; its last axis must be "
                f"hidden_size, {size}"
            )

    def array(self, name: str, value, kinds: tuple, accepted: str) -> None:
        """``value`` is an array of one of the kinds of dtypes, which ``accepted`` describes."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            kind = type(value).__name__ if dtype is None else dtype
            raise TypeError(f"{self.model}: {name} is of {kind}; it must be an array of {accepted}")

    def key(self, key, optional: bool = True) -> None:
        """``key`` is one random key, or ``None`` if it is optional."""
        if key is None:
            if optional:
                return
            raise TypeError(f"{self.model}: key is None; it must be a random key")
        dtype = getattr(key, "dtype", None)
        typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        if not typed and dtype != jnp.uint32:
            raise TypeError(
                f"{self.model}: key is {type(key).__name__ if dtype is None else dtype}; it must "
                "be a random key, such as jax.random.key(0)" + ", or None" * optional
            )
        if key.ndim != (0 if typed else 1):
            raise ValueError(f"{self.model}: key has shape {key.shape}; it must be one random key")

    def integers(self, name: str, value) -> Any:
        """The value as a JAX array of integers."""
        self.array(name, value, (jnp.integer,), "integers")
        return jnp.asarray(value)

    def mask(self, mask, other: str, shape: tuple[int, ...]) -> Any:
        """The mask as booleans: integers are compared with 0. ``None`` stays."""
        if mask is None:
            return None
        self.array("mask", mask, (jnp.bool_, jnp.integer), "booleans or integers")
        mask = jnp.asarray(mask)
        self.shape("mask", mask, other, shape)
        return mask if mask.dtype == jnp.bool_ else mask != 0

    def positions(self, positions, shape: tuple[int, ...]) -> Any:
        """The positions of tokens of this shape, or of one sequence for all. ``None`` stays."""
        if positions is None:
            return None
        positions = self.integers("positions", positions)
        if positions.shape not in (shape, shape[1:]):
            raise ValueError(
                f"{self.model}: positions has shape {positions.shape}; it must be {shape[1:]} or "
                f"{shape}, as tokens has"
            )
        return positions
