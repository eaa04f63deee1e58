"""Prepares the process before JAX is imported: it sets the platform and makes eight CPU devices.

`JAX_FASTOPS_TEST_PLATFORM=cpu|cuda` chooses the platform. Without it, tests run on JAX's default.
"""

import functools
import gc
import itertools
import os
import re
import shutil
import sys
import threading
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CHECKOUT = TESTS.parent
DEVICE_COUNT = "--xla_force_host_platform_device_count"

platform = os.environ.get("JAX_FASTOPS_TEST_PLATFORM")
if platform not in (None, "", "cpu", "cuda"):
    raise ValueError(f"JAX_FASTOPS_TEST_PLATFORM={platform!r}; it takes 'cpu' or 'cuda'")
if platform:
    # The float64 oracle always runs on the CPU, so the CPU stays available next to a GPU.
    os.environ["JAX_PLATFORMS"] = "cpu" if platform == "cpu" else "cuda,cpu"
if DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT}=8".strip()
# Most of a test's time is compilation. Without LLVM's optimizations, that takes a quarter less on a
# CPU, and half for models. XLA's former emitters, which 0.11 does not have, take half for small
# programs.
# Parallel compilation divides each program into parts, which costs a quarter of the time.
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    UNOPTIMIZED += " --xla_cpu_use_fusion_emitters=false"
on_cpu = platform == "cpu" or not (platform or shutil.which("nvidia-smi"))
if on_cpu and UNOPTIMIZED not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {UNOPTIMIZED}"
# Lines of source in the programs that JAX lowers, which no test reads, take a tenth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Decisions that autofuse measured on this machine would change programs of tests.
os.environ["JAX_FASTOPS_CACHE"] = os.devnull
# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# For `harness`. Helper processes do not inherit the path: they are started in this folder.
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

# Tracing and collection make many small objects. With Python's thresholds, a tenth of the time is
# spent on the search for garbage among them and among the modules.
gc.set_threshold(100_000, 20, 20)

import pytest  # noqa: E402

pytest.register_assert_rewrite("harness")
import harness.case  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Drops compiled programs after each module. No later module uses them, and they add up to
    gigabytes."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture
def native():
    """Takes the kernels, also where `auto` would take the reference."""
    import jax_fastops as fo

    with fo.use_implementation("native"):
        yield


@pytest.fixture
def native_in_float64(native):
    """Likewise, with 64-bit types."""
    from harness.compat import x64

    with x64():
        yield


@pytest.fixture
def cuda_programs(monkeypatch):
    """Programs are lowered for CUDA as by a build without cuDNN, whatever this machine has."""
    import jax_fastops as fo
    from jax_fastops import _dispatch, _explain, _native

    of_cuda = ("dense_act", "list_attention", "short_attention")
    names = frozenset({*_native.kernels("cpu"), *(f"jax_fastops.{name}" for name in of_cuda)})
    own = _native.kernels
    monkeypatch.setattr(_native, "kernels", lambda p: names if p == "cuda" else own(p))
    monkeypatch.setattr(_native, "runs_here", lambda p: True)
    monkeypatch.setattr(_native, "device", lambda p: ("", 0.0, 0.0))
    for module in (_dispatch, _explain):
        monkeypatch.setattr(module, "lowering_platform", lambda: "cuda")
    with fo.use_implementation("auto"):
        yield


@pytest.fixture
def exact_products():
    """By default, float32 products and convolutions on a GPU are rounded to fewer bits."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def without_cudnn(monkeypatch):
    """Replaces cuDNN's attention, which has no float32 and needs a GPU, by XLA's."""
    import jax

    attention = jax.nn.dot_product_attention

    def by_xla(*args, implementation, **options):
        return attention(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


@pytest.fixture
def looped_rounds(monkeypatch):
    """Masks of dropout by a program that XLA compiles faster. The tests of `fo.dropout` have XLA's
    own program."""
    from harness import masks

    from jax_fastops import _random

    monkeypatch.setattr(_random, "_rounds", masks.looped_rounds)


@pytest.fixture(params=("float32", "bfloat16", "float16", "float64"))
def dtype(request):
    """Every dtype that ops compute in."""
    import jax.numpy as jnp
    from harness.compat import x64

    with x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def reuse_contexts():
    """Makes one MLIR context for many programs, as JAX does from 0.12 on. Before, it makes one for
    each program, which takes a quarter of the time of a small one."""
    from jax._src.interpreters import mlir

    make, calls = mlir.make_ir_context, itertools.count()
    # A context keeps all types and constants that were in it, so it is not kept forever.
    kept = functools.lru_cache(maxsize=1)(lambda thread, group: make())
    mlir.make_ir_context = lambda: kept(threading.get_ident(), next(calls) // 50)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    # Two thirds of the tests are slow ones of the harness. If they are left out, they are not made.
    chosen = re.sub(r"\(.*?\)", "", config.getoption("markexpr"))
    harness.case.WITHOUT_SLOW = "or" not in chosen.split() and "not slow" in chosen.split(" and ")
    # If a donated buffer cannot be reused, that is not an op's fault. Small ones often cannot be.
    config.addinivalue_line("filterwarnings", "ignore:Some donated buffers were not usable")
    if tuple(map(int, version("jax").split(".")[:2])) < (0, 12):
        reuse_contexts()
    # A package whose modules were refused runs plain JAX, and would pass.
    from jax_fastops import _native

    if _native._refused:
        raise pytest.UsageError(str(_native._refused))


def pytest_report_header():
    import jax

    try:
        import jax_fastops

        where = Path(jax_fastops.__file__).parent
    except ImportError as error:
        where = f"not importable ({error})"
    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}; jax_fastops: {where}"
