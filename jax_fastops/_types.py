"""Types of public functions whose result depends on a flag.

For type checkers, a flag is ``Literal[False]``, and a decorator adds the results for ``True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import jax

if TYPE_CHECKING:
    Flag = Literal[False]
else:
    Flag = bool

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)
_F = TypeVar("_F", covariant=True)
_Pair = tuple[jax.Array, jax.Array]


class FanOut(Protocol[_P, _R, _F]):
    """A function whose result is another one with ``fanout``."""

    @overload
    def __call__(self, *args: Any, fanout: Literal[True], **kwargs: Any) -> _F: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


class SumAndFanOut(Protocol[_P]):
    """A function that returns an array, a pair of it with ``fanout``, and a sum if requested."""

    @overload
    def __call__(
        self, *args: Any, return_sum: Literal[True], fanout: Literal[True], **kwargs: Any
    ) -> tuple[_Pair, jax.Array]: ...
    @overload
    def __call__(
        self, *args: Any, return_sum: Literal[True], fanout: Literal[False] = ..., **kwargs: Any
    ) -> _Pair: ...
    @overload
    def __call__(
        self, *args: Any, return_sum: Literal[False] = ..., fanout: Literal[True], **kwargs: Any
    ) -> _Pair: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> jax.Array: ...


def fans_out(result: type[_F]) -> Callable[[Callable[_P, _R]], FanOut[_P, _R, _F]]:
    """A decorator for a function of a :data:`Flag` ``fanout``. ``result`` is that with it."""
    return lambda function: cast(Any, function)


def sums_and_fans_out(function: Callable[_P, jax.Array]) -> SumAndFanOut[_P]:
    """A decorator for a function of the flags ``return_sum`` and ``fanout``."""
    return cast(Any, function)
