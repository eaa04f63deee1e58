"""The one place where the tests look at the version of JAX."""

import contextlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

JAX_0_8 = jax.__version_info__ < (0, 9)


@contextlib.contextmanager
def x64(enabled: bool = True):
    """Enables 64-bit types inside the context; does nothing if `enabled` is false."""
    if not enabled:
        yield
        return
    if hasattr(jax, "enable_x64"):
        context = jax.enable_x64(True)
    else:
        from jax.experimental import enable_x64

        context = enable_x64()
    with context:
        yield


@contextlib.contextmanager
def strict():
    """JAX's settings under which an implicit promotion of ranks or dtypes is an error."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def make_mesh(sizes: Mapping[str, int], axis_type: AxisType) -> Mesh:
    """A mesh over the first devices. The axis type is a parameter: JAX's default changed in 0.9."""
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
        devices=jax.devices()[:count],
    )


def saved_residuals(fn, *args) -> str:
    """What `jax.ad_checkpoint.print_saved_residuals` prints for `fn`."""
    import io

    from jax.ad_checkpoint import print_saved_residuals

    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_saved_residuals(fn, *args)
    return out.getvalue()
