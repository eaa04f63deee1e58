"""A native module has handlers for several versions of XLA's FFI, and one set is used."""

import jax
import numpy as np
import pytest
from harness.process import run

import jax_fastops as fo
from jax_fastops import _cpu, _native

pytestmark = pytest.mark.jax

BUILT = sorted(_cpu.handlers())
RUNNING = _native.running_ffi_version()

# Refuses handlers as XLA does: when they are registered, by what they are and not by their names.
REFUSE = """
import ctypes, sys, warnings
from jaxlib import xla_client

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
accept, seen = xla_client._xla.register_custom_call_target, {}

def register(name, stages, *args):
    if name.startswith("jax_fastops."):
        for version, handlers in sys.modules["jax_fastops._cpu"].handlers().items():
            if pointer(stages["execute"], None) in [pointer(s["execute"], None)
                                                    for s in handlers.values()]:
                seen[version] = seen.get(version, 0) + 1
                if version in REFUSED:
                    raise RuntimeError("handler's API version is incompatible")
    return accept(name, stages, *args)

xla_client._xla.register_custom_call_target = register
"""
STEP = """
import jax, jax.numpy as jnp, numpy as np
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import jax_fastops as fo

def loss(norm, softmax, relu, x):
    return (softmax(relu(norm(x, jnp.ones(40)))) ** 2).sum()

def ours(x):
    with fo.use_implementation("native"):
        return loss(fo.layer_norm, fo.softmax, fo.relu, x)

def layer_norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale

def theirs(x):
    return loss(layer_norm, jax.nn.softmax, jax.nn.relu, x)

x = jax.random.normal(jax.random.key(0), (24, 40))
step = jax.jit(jax.value_and_grad(ours))
for a, b in zip(step(x), jax.jit(jax.value_and_grad(theirs))(x)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
print(step.lower(x).as_text().count("custom_call @jax_fastops."), "kernels")
print(fo.info()["modules"]["cpu"] and fo.info()["modules"]["cpu"]["ffi_api_version"])
print("registered:", {version: count for version, count in seen.items() if version not in REFUSED})
print(len(said), "said:", *(w.message for w in said))
"""


def step(refused, **env):
    done = run(f"REFUSED = {refused}\n" + REFUSE + STEP, JAX_ENABLE_COMPILATION_CACHE="0", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("refused", range(len(BUILT)))
def test_the_oldest_handlers_that_jaxlib_accepts_run(refused):
    chosen = BUILT[refused]
    if chosen > RUNNING:
        pytest.skip(f"this jaxlib has FFI {RUNNING}")
    kernels, version, registered, said = step(BUILT[:refused])
    assert kernels == "6 kernels" and version == str(chosen)
    # One is tried, then all are registered.
    assert registered == f"registered: {{{chosen}: {1 + len(_native.kernels('cpu'))}}}"
    assert said == "0 said:"


def test_a_jaxlib_that_refuses_all_leaves_plain_jax_and_says_so_in_one_line():
    kernels, version, registered, said = step(BUILT)
    assert (kernels, version, registered) == ("0 kernels", "None", "registered: {}")
    assert said.startswith("1 said: jax_fastops: plain JAX runs everywhere: jax_fastops._cpu was ")
    versions = " and ".join(f"{major}.{minor}" for major, minor in BUILT)
    assert f"built for XLA FFI {versions}, and" in said and "Install jaxlib >= " in said


def test_every_version_has_the_same_targets_and_stages():
    first, *others = (
        {t: set(stages) for t, stages in handlers.items()} for handlers in _cpu.handlers().values()
    )
    assert len(first) > 20 and all(other == first for other in others)


def test_handlers_for_a_newer_ffi_than_jaxlibs_are_not_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(_native, "_accepts", lambda name, version, _: tried.append(version))
    major, minor = RUNNING
    versions = [(major + 1, 0), (major, minor + 1), (major, minor), (major, 0)]

    class Module:
        @staticmethod
        def handlers():
            return {version: {"op": {"execute": None}} for version in versions}

        @staticmethod
        def build_info():
            return {"jaxlib_version": "0"}

    with pytest.raises(ImportError, match=rf"{jax.lib.__version__}.*refuses it"):
        _native.choose_handlers("_cpu", Module)
    assert tried == [(major, 0), (major, minor)]


def test_info_has_the_version():
    chosen = fo.info()["modules"]["cpu"]["ffi_api_version"]
    assert chosen in BUILT and np.all(np.asarray(chosen) <= RUNNING)
