"""The installed package: its names, its report, its errors, its choice of implementations."""

import ast
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.process import run

import jax_fastops as fo
from jax_fastops import _native

PACKAGE = pathlib.Path(fo.__file__).parent
MODELS = sorted((PACKAGE / "models").glob("*.py"))


@pytest.fixture
def copy_of_package(tmp_path):
    """A copy of the package and its native modules, as it is installed, first on a child's path."""
    target = tmp_path / "site" / "jax_fastops"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    for module in _native._modules().values():
        shutil.copy(module.__file__, target)
    write_metadata(target.parent, fo.__version__)
    return target


def write_metadata(folder, version, name="jax_fastops"):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", ""]
    (info / "METADATA").write_text("\n".join(lines))


USE_JAX_AFTERWARDS = """
import jax, jax.numpy as jnp
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import jax_fastops as fo
print(len(said), *(w.message for w in said))
x = jnp.linspace(-1, 1, 60).reshape(4, 15)
with fo.use_implementation("native"):
    jax.block_until_ready([fo.relu(x), fo.softmax(x), fo.layer_norm(x), fo.window_sum(x, 2),
                           fo.batch_norm(x, None, None)])
from jax_fastops._info import describe
print(*describe().splitlines()[-3:], sep="\\n")
print("backend works:", float(jnp.ones(3).sum()), jax.devices()[0].platform)
"""


def native_file(package):
    return next(package.glob("_cpu.*.so"))


def test_a_module_built_with_newer_headers_is_refused_and_the_backend_lives(copy_of_package):
    # The installed jaxlib seems to have older FFI headers than those of the module's build.
    headers = copy_of_package.parent / "include" / "xla" / "ffi" / "api"
    headers.mkdir(parents=True)
    (headers / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 0\n")
    pretend = f"import jax.ffi; jax.ffi.include_dir = lambda: {str(headers.parents[2])!r}\n"
    done = run(pretend + USE_JAX_AFTERWARDS, PYTHONPATH=str(copy_of_package.parent))
    built = ".".join(map(str, fo.info()["modules"]["cpu"]["ffi_api_version"]))
    assert (
        "jax_fastops: plain JAX runs everywhere: jax_fastops._cpu was built for XLA FFI"
        in done.stdout
    ), done.stderr
    assert f"XLA FFI {built}" in done.stdout and "with XLA FFI 0.0 refuses it" in done.stdout
    assert "or a newer jax_fastops." in done.stdout
    assert "backend works: 3.0 cpu" in done.stdout


def test_a_missing_cpu_module_says_what_to_do(copy_of_package):
    native_file(copy_of_package).unlink()
    done = run(USE_JAX_AFTERWARDS, PYTHONPATH=str(copy_of_package.parent))
    assert "1 jax_fastops: plain JAX runs everywhere: jax_fastops._cpu" in done.stdout, done.stderr
    assert "is missing" in done.stdout and "Reinstall" in done.stdout
    assert "backend works: 3.0 cpu" in done.stdout


@pytest.fixture
def checkout(copy_of_package, tmp_path):
    """The Python files, without native modules next to them."""
    shutil.copytree(
        copy_of_package, tmp_path / "jax_fastops", ignore=shutil.ignore_patterns("*.so")
    )
    return tmp_path / "jax_fastops"


def run_in_checkout(checkout, site):
    where = "\nimport sys; print(fo.__file__, fo.info()['ops']['relu']['cpu'])"
    where += "\nprint(getattr(sys.modules.get('jax_fastops._cpu'), '__file__', None))"
    return run(USE_JAX_AFTERWARDS + where, PYTHONPATH=f"{checkout.parent}{os.pathsep}{site}")


@pytest.mark.parametrize("installed", ["package", "kernels"])
def test_a_checkout_takes_the_installed_kernels(checkout, copy_of_package, installed):
    """As after ``pip install .``, and with the native modules only, which ``make`` installs."""
    if installed == "kernels":
        for file in copy_of_package.rglob("*.py"):
            file.unlink()
    done = run_in_checkout(checkout, copy_of_package.parent)
    lines = done.stdout.splitlines()
    assert lines[0] == "0", done.stdout + done.stderr
    assert lines[-2:] == [
        f"{checkout / '__init__.py'} native",
        str(native_file(copy_of_package)),
    ]


def test_a_checkout_without_an_installed_package_says_what_to_do(checkout, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(  # hides the package that is tested
        "import importlib.metadata as m\n"
        "def distribution(name): raise m.PackageNotFoundError(name)\n"
        "m.distribution = distribution"
    )
    done = run_in_checkout(checkout, tmp_path)
    assert "jax_fastops._cpu" in done.stdout and "is missing" in done.stdout, done.stderr
    assert "'pip install --force-reinstall --no-deps .'" in done.stdout
    assert "xla\nNone" in done.stdout


def test_kernels_of_another_abi_are_refused(checkout, copy_of_package):
    file, abi = checkout / "_native.py", _native._ABI
    file.write_text(file.read_text().replace(f"_ABI = {abi}", f"_ABI = {abi + 1}"))
    done = run_in_checkout(checkout, copy_of_package.parent)
    assert f"has kernel ABI {abi}, and the Python files in {checkout} need {abi + 1}" in done.stdout
    assert "Reinstall" in done.stdout and f"{checkout / '__init__.py'} xla" in done.stdout


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_a_damaged_module_says_what_to_do(copy_of_package, name):
    suffix = native_file(copy_of_package).name.removeprefix("_cpu")
    (copy_of_package / f"{name}{suffix}").write_bytes(b"\x7fELF, but no more than that")
    done = run(USE_JAX_AFTERWARDS, PYTHONPATH=str(copy_of_package.parent))
    assert f"jax_fastops.{name} is there but cannot be loaded" in done.stdout, done.stderr
    where = {"_cpu": "everywhere", "_cuda": "on GPUs"}[name]
    assert done.stdout.startswith(f"1 jax_fastops: plain JAX runs {where}: ")
    assert f"{name.removeprefix('_')}: plain JAX: jax_fastops.{name}" in done.stdout
    assert "Reinstall" in done.stdout
    assert "backend works: 3.0 cpu" in done.stdout


def test_without_the_cuda_module_the_cpu_works_and_info_says_so(copy_of_package):
    for file in copy_of_package.glob("_cuda.*"):
        file.unlink()
    code = "import sys; sys.modules.update(jax_fastops_cuda13_plugin=None)\n"  # that of CI
    code += "import json, jax_fastops as fo; print(json.dumps(fo.info())); print(fo.relu(-1.0))"
    done = run(code, PYTHONPATH=str(copy_of_package.parent))
    info, value = done.stdout.splitlines()
    info = json.loads(info)
    assert info["modules"]["cuda"] is None
    assert info["ops"]["relu"] == {"cpu": "native", "cuda": "xla", "other": "xla"}
    assert value == "0.0"


BOTH = ["jax_fastops_cuda12_plugin._cuda", "jax_fastops_cuda13_plugin._cuda"]


@pytest.mark.parametrize(
    ("present", "taken"),
    [
        ([], None),
        (["jax_fastops_cuda12_plugin._cuda", "jax_cuda13_plugin"], "jax_fastops_cuda12_plugin"),
        (BOTH, "jax_fastops_cuda13_plugin"),
        ([*BOTH, "jax_cuda12_plugin"], "jax_fastops_cuda12_plugin"),
    ],
)
def test_the_plugin_of_jaxs_cuda_is_taken(monkeypatch, present, taken):
    monkeypatch.setattr(_native, "_is_present", present.__contains__)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fo.__version__)
    assert _native._plugin() == taken


@pytest.mark.parametrize("version", ["0.0.1", fo.__version__])
def test_the_cuda_module_is_that_of_a_plugin_of_the_same_version(copy_of_package, version):
    for file in copy_of_package.glob("_cuda.*"):
        file.unlink()
    plugin = copy_of_package.parent / "jax_fastops_cuda13_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    (plugin / "_cuda.py").write_text("raise ImportError('it is a plugin')")
    write_metadata(plugin.parent, version, plugin.name)
    done = run("import jax_fastops", PYTHONPATH=str(plugin.parent))
    says = "plain JAX runs on GPUs: jax_fastops_cuda13_plugin"
    if version == fo.__version__:
        says += "._cuda is there but cannot be loaded (it is a plugin)"
    else:
        says += f" is of version 0.0.1, and jax_fastops of version {fo.__version__}. Install"
    assert says in done.stderr


class Gpu:
    device_kind, compute_capability = "A GPU", "9.0"

    def __init__(self, cuda):
        self.client = type("Client", (), {"platform_version": f"PJRT C API\ncuda {cuda}"})


class CudaModule:
    def __init__(self, **changed):
        self.info = {
            "runtime_version": "13.0",
            "driver_version": 13000,
            "architectures": ["80", "90-real"],
        } | changed

    def build_info(self):
        return self.info


@pytest.mark.parametrize(
    ("module", "gpu", "says"),
    [
        (CudaModule(), Gpu(13000), None),
        (
            CudaModule(driver_version=12080),
            Gpu(13000),
            "Update the driver, or install .*cuda12_plug",
        ),
        (
            CudaModule(),
            Gpu(12090),
            r"jax uses CUDA 12.*Install 'jax\[cuda13\]', or .*cuda12_plugin",
        ),
        (CudaModule(runtime_version="12.9"), Gpu(12090), None),
        (CudaModule(runtime_version="12.9"), None, None),
        (CudaModule(architectures=["100-real"]), Gpu(13000), "capability 9.0.*CUDAARCHS=native"),
        (None, Gpu(13000), "CUDA kernels are missing.* jax_fastops_cuda13_plugin-.*CUDA=ON"),
        (None, Gpu(12090), "CUDA kernels are missing.* jax_fastops_cuda12_plugin-"),
        (CudaModule(), None, None),
        (None, None, None),
    ],
)
def test_a_gpu_without_kernels_is_said_once_in_one_line(monkeypatch, module, gpu, says):
    modules = {"cpu": _native._modules()["cpu"]} | ({"cuda": module} if module else {})

    def devices(backend):
        if gpu is None:
            raise RuntimeError("no such backend")
        return [gpu]

    monkeypatch.setattr(_native, "_modules", lambda: modules)
    monkeypatch.setattr(_native, "_refused", {})
    monkeypatch.setattr(jax, "local_devices", devices)
    for cached in (_native.gpu_problem, _native.runs_here):
        cached.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            runs = [_native.runs_here("cuda") for _ in range(2)]
        line = _native.status()["cuda"]
        assert runs == [says is None] * 2
        assert "\n" not in line
        if says is None:
            assert not said
            assert line == "kernels" if gpu else "jax has no GPU here (for one, install" in line
        else:
            assert len(said) == 1 and re.search(says, str(said[0].message))
            assert re.search(says, line) and "plain JAX" in line
    finally:
        for cached in (_native.gpu_problem, _native.runs_here):
            cached.cache_clear()


def used_names(tree):
    """The dotted names that a module imports, and its attributes of this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            where = "." * node.level + (node.module or "")
            yield from (f"{where}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("fo", "jax_fastops"):
            yield f"{ast.unparse(node.value)}.{node.attr}"


LAYERS = ["nnx.py", "_nnx_convert.py"]
SHARED = {
    *("jax_fastops._compat", "jax_fastops._names.elsewhere", "jax_fastops._views.whole"),
    *(f"jax_fastops._projection.{name}" for name in ("attend_list", "takes_bias")),
}


@pytest.mark.parametrize("name", [*LAYERS, *(f"models/{f.name}" for f in MODELS)])
def test_models_and_layers_use_public_names_only(name):
    """Files of the models may also use each other, such as ``jax_fastops.models._checks``.

    All may use those files that hide the differences of JAX's versions, and that know the names of
    other libraries, what gathers the parts of an axis, whether a kernel adds a bias, and attention
    of a list.
    """
    own = "jax_fastops.models._" if name.startswith("models/") else "jax_fastops._nnx_"
    used = set(used_names(ast.parse((PACKAGE / name).read_text()))) - SHARED
    assert [u for u in used if re.search(r"(^|\.)_(?!_)", u.removeprefix(own))] == []


def test_importing_starts_no_backend():
    code = (
        "import jax_fastops, jax._src.xla_bridge as bridge\n"
        "jax_fastops.info()\n"
        "print(bridge._backends)"
    )
    assert run(code).stdout.strip() == "{}"


def test_info():
    info = fo.info()
    assert info["version"] == fo.__version__
    assert info["jax"] == jax.__version__
    assert info["commit"] is None or re.fullmatch("[0-9a-f]{40}", info["commit"])
    cpu = info["modules"]["cpu"]
    assert cpu["isa"] in cpu["isa_built"]
    for op in ("relu", "add_relu", "transpose", "split_heads", "split_qkv_heads"):
        assert info["ops"][op]["cpu"] == "native" and info["ops"][op]["other"] == "xla"
    json.dumps(info)  # plain values


def test_the_wheel_lists_what_is_compiled_in():
    files = importlib.metadata.files("jax_fastops") if fo.__version__ != "0+unknown" else []
    if not files:
        pytest.skip("no wheel is installed")
    (sbom,) = (json.loads(file.read_text()) for file in files if file.name == "native.cdx.json")
    assert sbom["metadata"]["component"]["version"] == fo.__version__
    versions = {part["name"]: part["version"] for part in sbom["components"]}
    assert {"nanobind", "robin_map", "XLA FFI headers"} <= set(versions) and all(versions.values())
    licenses = [file for file in files if "licenses/third_party" in str(file)]
    assert {file.parent.name for file in licenses} >= {"nanobind", "robin_map", "xla"}


def test_python_m_prints_info():
    done = subprocess.run(
        [sys.executable, "-m", "jax_fastops"],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    for word in (fo.__version__, jax.__version__, "isa", "add_relu", "implementation: auto"):
        assert word in done.stdout


@pytest.mark.jax
def test_export_checks_cover_every_kernel():
    handlers = sum(len(_native.kernels(p)) for p in ("cpu",))
    checks = fo.export_checks()
    assert len(checks) >= handlers > 0
    assert all(isinstance(c, jax.export.DisabledSafetyCheck) for c in checks)


def test_target_names_carry_the_abi_version():
    abi = fo.info()["modules"]["cpu"]["abi"]
    assert _native.target_name("jax_fastops.relu", "cpu") == f"jax_fastops.relu.v{abi}"


# The switch ---------------------------------------------------------------------------------------

X = np.arange(-32, 32, dtype=np.float32)


def calls_kernel(f, *args):
    return "jax_fastops.relu" in f.lower(*args).as_text()


def test_the_context_manager_holds_for_its_block_and_jit_is_traced_again():
    f = jax.jit(lambda x: fo.relu(x))
    assert not calls_kernel(f, X)
    with fo.use_implementation("native"):
        assert calls_kernel(f, X)
        with fo.use_implementation("xla"):
            assert not calls_kernel(f, X)
        assert calls_kernel(f, X)
    assert not calls_kernel(f, X)


def test_the_setter_holds_in_other_threads_too():
    import threading

    seen = []
    try:
        fo.set_implementation("native")
        thread = threading.Thread(target=lambda: seen.append(fo.info()["implementation"]))
        thread.start()
        thread.join()
        seen.append(fo.info()["implementation"])
    finally:
        fo.set_implementation("auto")
    assert seen == ["native", "native"]


def test_a_context_stays_in_its_thread():
    import threading

    seen = []
    with fo.use_implementation("native"):
        thread = threading.Thread(target=lambda: seen.append(fo.info()["implementation"]))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_an_exception_leaves_the_choice_as_it_was():
    with pytest.raises(RuntimeError), fo.use_implementation("xla"):
        raise RuntimeError
    assert fo.info()["implementation"] == "auto"


def test_unknown_implementations_are_named():
    with pytest.raises(ValueError, match=r"'fast'.*'auto', 'native', 'xla'"):
        fo.use_implementation("fast")
    assert fo.info()["implementation"] == "auto"


def test_the_environment_variable_sets_the_initial_choice():
    code = "import jax_fastops as fo; print(fo.info()['implementation'])"
    assert run(code, JAX_FASTOPS_IMPLEMENTATION="native").stdout.strip() == "native"
    wrong = run(code, JAX_FASTOPS_IMPLEMENTATION="quick")
    assert "JAX_FASTOPS_IMPLEMENTATION" in wrong.stderr and "'quick'" in wrong.stderr


@pytest.mark.parametrize("implementation", ["auto", "native", "xla"])
def test_every_implementation_gives_the_same_bits(implementation):
    with fo.use_implementation(implementation):
        value, grad = jax.jit(jax.value_and_grad(lambda x: fo.relu(x).sum()))(X)
    assert value == jax.nn.relu(X).sum()
    np.testing.assert_array_equal(grad, (X > 0).astype(np.float32))


def test_a_platform_without_kernels_takes_the_reference():
    def f(x):
        return jnp.sum(fo.relu(x) * 2)

    with fo.use_implementation("native"):
        exported = jax.export.export(jax.jit(jax.grad(f)), platforms=["tpu"])(X)
    assert "custom_call" not in exported.mlir_module()
    assert "select" in exported.mlir_module()


# What ends early ----------------------------------------------------------------------------------

CACHED = """
import signal, threading, sys, os
import jax, jax.numpy as jnp, numpy as np
import jax_fastops as fo
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
fo.set_implementation("native")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
print("ready", flush=True)
x = np.linspace(-3, 3, 4 * 64, dtype=np.float32).reshape(4, 64)
for n in range(int(sys.argv[1])):
    def loss(x):
        return jnp.sum(jnp.sin(fo.layer_norm(fo.softmax(x + n, axis=-1)) + fo.relu(x)))
    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    with fo.use_implementation("xla"):
        want = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, want[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-3, atol=1e-3)
print("right", flush=True)
"""


@pytest.mark.parametrize("sign", ["SIGKILL", "SIGINT"])
def test_a_process_that_ends_while_it_compiles_leaves_the_cache_valid(tmp_path, sign):
    def start(count):
        return subprocess.Popen(
            [sys.executable, "-c", CACHED, str(count)],
            cwd=pathlib.Path(__file__).parent,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
                "JAX_ENABLE_COMPILATION_CACHE": "true",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ended = start(1000)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(60):  # Python drops an interrupt that comes while it runs a destructor
        ended.send_signal(getattr(signal, sign))
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, error = ended.communicate(timeout=1)
            break
    assert ended.returncode not in (0, None) and "right" not in out, error
    kept = len(list(tmp_path.iterdir()))
    assert kept >= 3
    after = start(8)  # more programs than the first process compiled
    out, error = after.communicate(timeout=300)
    assert after.returncode == 0 and "right" in out, error
    # JAX writes in place. It warns of an entry that was being written, and compiles it again.
    assert sign == "SIGKILL" or "cache entry" not in error
    assert len(list(tmp_path.iterdir())) > kept


def test_an_interrupted_trace_leaves_the_op_usable(native):
    @jax.jit
    def interrupted(x):
        fo.relu(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(X)
    np.testing.assert_array_equal(jax.jit(fo.relu)(X), np.maximum(X, 0))


def test_ops_work_after_memory_ran_out(native):
    f = jax.jit(lambda x: fo.softmax(x) + fo.layer_norm(x))
    x = np.linspace(-1, 1, 4 * 15, dtype=np.float32).reshape(4, 15)
    want = np.asarray(f(x))
    huge = jax.jit(lambda n: fo.relu(jnp.full((2**24, 2**22), n)).sum() + fo.softmax(x).sum())
    with pytest.raises((jax.errors.JaxRuntimeError, MemoryError), match=r"(?i)memory|allocat"):
        jax.block_until_ready(huge(1.0))
    np.testing.assert_array_equal(f(x), want)
    jax.clear_caches()
    np.testing.assert_array_equal(f(x), want)


def test_models_have_no_circle_of_imports():
    """Imports for type checkers count, too."""
    needs = {}
    for file in MODELS:
        found = [node for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "names")]
        names = {f"{getattr(node, 'module', '')}.{a.name}" for node in found for a in node.names}
        parts = {part for name in names if ".models" in name for part in name.split(".")}
        needs[file.stem] = parts & {other.stem for other in MODELS}
    assert needs["bert"] >= {"_bert_layers", "_plain"}
    while leaves := {name for name, others in needs.items() if not others}:
        needs = {name: others - leaves for name, others in needs.items() if name not in leaves}
    assert not needs
