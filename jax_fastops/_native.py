"""Loads the native modules, checks that this jaxlib accepts them, and registers their handlers."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import warnings
from typing import Any

import jax
import jaxlib

from jax_fastops._version import __version__

# The kernels that this code calls: kKernelAbi of src/core/ffi/registry.h.
_ABI = 4

# Module name -> (platform name of the FFI, platform name of lowering rules).
_MODULES = {"_cpu": ("cpu", "cpu"), "_cuda": ("CUDA", "cuda")}

# The versions of CUDA that have a plugin: a package with the module _cuda.
_PLUGINS = (13, 12)

_HERE = pathlib.Path(__file__).parent
_REBUILD = (
    "Reinstall the package for this environment: 'pip install --force-reinstall --no-deps .' in a "
    "checkout, or the same command with the file of a wheel in place of the dot."
)


def running_ffi_version() -> tuple[int, int] | None:
    """The FFI version (major, minor) of the installed jaxlib, from the header it ships."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(errors="replace")
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if all(found) else None


def _accepts(name: str, version: tuple[int, int], capsule) -> bool:
    """Whether jaxlib accepts handlers of an FFI version: a trial with one of them.

    XLA does not say which is the oldest version that it accepts. ``jax.ffi.register_ffi_target``
    would keep the handlers until the backend starts, and a refusal would make it unusable.
    """
    try:
        register_now = jaxlib.xla_client._xla.register_custom_call_target
    except AttributeError:
        return True
    try:
        target = f"jax_fastops.{name}.{_version_text(version)}"
        register_now(target, {"execute": capsule}, "Host", 1)
    except Exception:
        return False
    return True


def choose_handlers(name: str, module) -> tuple[tuple[int, int], dict]:
    """The FFI version and the handlers of a module that this jaxlib accepts, the oldest first.

    XLA accepts older versions than its own, but not for ever, and no newer ones.
    """
    built, running = sorted(module.handlers().items()), running_ffi_version()
    for version, handlers in built:
        fits = running is None or (version[0] == running[0] and version <= running)
        if fits and _accepts(name, version, next(iter(handlers.values()))["execute"]):
            return version, handlers
    have = " and ".join(_version_text(version) for version, _ in built)
    raise ImportError(
        f"jax_fastops.{name} was built for XLA FFI {have}, and the installed jaxlib "
        f"{jaxlib.__version__} with XLA FFI {_version_text(running)} refuses it. Install jaxlib >= "
        f"{module.build_info()['jaxlib_version']} or a newer jax_fastops."
    )


def _version_text(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ("unknown",)))


def _load(name: str):
    """The native module, or None if an optional module was not built."""
    full_name = f"jax_fastops.{name}"  # of _cuda, what was built here precedes a plugin
    if name == "_cpu" and not _is_present(full_name):
        _add_installed_folder()
    if name == "_cuda" and not _is_present(full_name):
        plugin = _plugin()
        if plugin is None:
            return None
        full_name = f"{plugin}._cuda"
    if not _is_present(full_name):
        raise ImportError(
            f"{full_name}, the native module with the CPU kernels, is missing: the package was not "
            f"built. {_REBUILD}"
        )
    try:
        module = importlib.import_module(full_name)
    except ImportError as error:
        raise ImportError(
            f"{full_name} is there but cannot be loaded ({error}): it is damaged, or built for "
            f"another Python or system. {_REBUILD}"
        ) from error
    if module.build_info()["abi"] != _ABI:
        raise ImportError(
            f"{module.__file__} has kernel ABI {module.build_info()['abi']}, and the Python files "
            f"in {_HERE} need {_ABI}. {_REBUILD}"
        )
    return module


def _plugin() -> str | None:
    """The package with the CUDA module, of several that for the CUDA of jax's own plugin."""
    found = [cuda for cuda in _PLUGINS if _is_present(f"jax_fastops_cuda{cuda}_plugin._cuda")]
    if not found:
        return None
    cuda = next((cuda for cuda in found if _is_present(f"jax_cuda{cuda}_plugin")), found[0])
    package = f"jax_fastops_cuda{cuda}_plugin"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = __version__  # a folder on the path
    if version != __version__:
        raise ImportError(
            f"{package} is of version {version}, and jax_fastops of version {__version__}. Install "
            "the wheels of one version."
        )
    return package


def _is_present(full_name: str) -> bool:
    try:
        return importlib.util.find_spec(full_name) is not None
    except (ImportError, ValueError):
        return False


def _add_installed_folder() -> None:
    """Lets this package find the native modules of the installed one.

    The Python files of a checkout have no native modules next to them, and precede the installed
    package in a Python that is started there. Files and kernels may be of different commits: the
    ABI, and handlers that refuse unknown buffers and attributes, protect from that, as they do for
    programs in a compilation cache.
    """
    try:
        installed = importlib.metadata.distribution("jax_fastops")
    except importlib.metadata.PackageNotFoundError:
        return
    sys.modules["jax_fastops"].__path__.append(str(installed.locate_file("jax_fastops")))


# Lowering platform -> why its module is there but not used. Filled by _modules().
_refused: dict[str, str] = {}


# Lowering platform -> (FFI version, handlers) in use. Filled by _modules().
_handlers: dict[str, tuple[tuple[int, int], dict]] = {}


@functools.cache
def _modules() -> dict:
    """Lowering platform -> loaded module, for the modules that were built and can be used.

    Without the CPU module no other one is used: it has the numbers that kernels and Python share.
    """
    loaded = {}
    for name, (_, platform) in _MODULES.items():
        try:
            module = _load(name)
            if module is not None:
                _handlers[platform] = choose_handlers(name, module)
        except ImportError as error:
            _refused[platform] = " ".join(str(error).split())
            if platform == "cpu":
                break
        else:
            if module is not None:
                loaded[platform] = module
    return loaded


def target_name(kernel: str, platform: str) -> str:
    """The name under which XLA knows a kernel.

    It carries the kernel ABI's version, because compilation caches on disk store the name: a
    program cached by an older version must not find a kernel that takes other buffers.
    """
    return f"{kernel}.v{_ABI}"


@functools.cache
def limit(name: str) -> int:
    """A number that kernels and Python share. The kernels' sources define it."""
    module = _modules().get("cpu")
    return module.build_info()["limits"][name] if module is not None else 0


def workspace(kernel: str, *sizes: int) -> int:
    """The elements of a kernel's workspace, as its sources compute them."""
    module = _modules().get("cpu")
    return module.workspace(kernel, *sizes) if module is not None else 0


def attention_plan(**problem: Any) -> tuple[int, str] | None:
    """The workspace of cuDNN's plan for attention on this process' GPU, and why there is no plan.

    ``None`` in a process without a GPU: programs are compiled for other machines.
    """
    try:
        device = jax.local_devices(backend="cuda")[0].local_hardware_id
    except RuntimeError:
        return None
    return _modules()["cuda"].attention_plan(device=device, **problem)


@functools.cache
def kernels(platform: str) -> frozenset[str]:
    """The kernels registered for a lowering platform (``"cpu"``, ``"cuda"``, ...)."""
    return frozenset(_handlers[platform][1]) if platform in _modules() else frozenset()


@functools.cache
def runs_here(platform: str) -> bool:
    """Whether the kernels can run on this process' devices of a platform. Warns if not.

    For a platform without devices in this process, the answer is yes: the program is compiled for
    other machines.
    """
    if platform != "cuda":
        return True
    problem = gpu_problem()
    if problem is not None and not _refused:  # what was refused was said at import
        warnings.warn(f"jax_fastops: {problem}", stacklevel=2)
    return problem is None


@functools.cache
def gpu_problem() -> str | None:
    """Why this process' GPUs have no kernels, and what to do. None without GPUs, too."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    instead = "so GPU calls run as plain JAX"
    found = re.search(r"cuda (\d+)", getattr(devices[0].client, "platform_version", ""))
    major = found and (int(found[1]) // 1000 or int(found[1]))
    if "cuda" not in _modules():
        return f"the CUDA kernels are missing, {instead}. Install {_kernels_for(major or 13)}."
    info = _modules()["cuda"].build_info()
    built = int(info["runtime_version"].split(".")[0])
    driver = info["driver_version"] // 1000
    if 0 < driver < built:
        return (
            f"the driver supports CUDA {driver}, and the kernels were built with CUDA "
            f"{info['runtime_version']}, {instead}. Update the driver, or install "
            f"{_kernels_for(driver)}."
        )
    if major and major < built:
        return (
            f"jax uses CUDA {major}, and the kernels were built with CUDA "
            f"{info['runtime_version']}, {instead}. Install 'jax[cuda{built}]', or "
            f"{_kernels_for(major)}."
        )
    for device in devices:
        if not any(_covers(name, device.compute_capability) for name in info["architectures"]):
            have = ", ".join(info["architectures"])
            return (
                f"{device.device_kind} has compute capability {device.compute_capability}, and "
                f"the kernels were built for {have}, {instead}. Rebuild with CUDAARCHS=native."
            )
    return None


def _kernels_for(cuda: int) -> str:
    """What to install for kernels of a CUDA version. No name of an index, where it is not ours."""
    return (
        f"the wheels jax_fastops-{__version__}-*.whl and jax_fastops_cuda{cuda}_plugin-"
        f"{__version__}-*.whl, or build a checkout with a CUDA {cuda} compiler "
        "('JAX_FASTOPS_CUDA=ON pip install .')"
    )


def status() -> dict[str, str]:
    """Platform -> one line: what runs there, and what to do. Starts JAX's backends."""
    modules = _modules()
    found = {"cpu": "kernels", "cuda": "kernels", "other": "plain JAX"}
    if "cpu" in _refused:
        return dict.fromkeys(found, "plain JAX") | {"cpu": f"plain JAX: {_refused['cpu']}"}
    if "cuda" in _refused:
        return found | {"cuda": f"plain JAX: {_refused['cuda']}"}
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        version = modules["cuda"].build_info()["runtime_version"] if "cuda" in modules else "13"
        jax_has = f"jax has no GPU here (for one, install 'jax[cuda{version.split('.')[0]}]')"
        has = f"kernels for CUDA {version} are" if "cuda" in modules else "CUDA kernels are not"
        return found | {"cuda": f"{jax_has}; {has} installed"}
    if problem := gpu_problem():
        found["cuda"] = f"plain JAX: {problem}"
    return found


@functools.cache
def device(platform: str) -> tuple[str, float, float]:
    """Name, compute capability and memory bandwidth (bytes per second) of a platform's device."""
    try:
        first = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return "", 0.0, 0.0
    if platform != "cuda" or "cuda" not in _modules():
        return first.device_kind, 0.0, 0.0
    bandwidth = _modules()["cuda"].bandwidth(first.local_hardware_id)
    return first.device_kind, float(first.compute_capability), bandwidth


def _covers(architecture: str, capability: str) -> bool:
    """Whether code for an architecture runs on a device of a compute capability ("9.0").

    "80-real" covers 8.0 and later minors, "90-virtual" covers 9.0 and later, "90" covers both.
    """
    number, _, kind = architecture.partition("-")
    if not number[:1].isdigit():
        return True  # "native" and "all" include this device
    suffix = number.lstrip("0123456789")  # "a", "f": only this architecture, or only its family
    built = divmod(int(number.removesuffix(suffix)), 10)
    device = tuple(map(int, capability.split(".")))
    if suffix:
        return built == device
    real = kind != "virtual" and built[0] == device[0] and built <= device
    return real or (kind != "real" and built <= device)


def build_info() -> dict:
    """How each platform's module was built. ``None`` if the module is absent."""
    infos = {platform: None for _, platform in _MODULES.values()}
    return infos | {
        platform: {"file": m.__file__, "ffi_api_version": _handlers[platform][0]} | m.build_info()
        for platform, m in _modules().items()
    }


def register() -> None:
    """Register every handler with XLA. Starts no backend and needs no GPU."""
    modules = _modules()
    for platform, problem in _refused.items():
        where = "everywhere" if platform == "cpu" else "on GPUs"
        warnings.warn(f"jax_fastops: plain JAX runs {where}: {problem}", stacklevel=3)
    names = set()
    for ffi_platform, platform in _MODULES.values():
        if platform not in modules:
            continue
        for kernel, stages in _handlers[platform][1].items():
            name = target_name(kernel, platform)
            jax.ffi.register_ffi_target(name, stages, platform=ffi_platform)
            names.add(name)
    for name in sorted(names):
        jax.ffi.register_ffi_target_as_batch_partitionable(name)


def targets() -> list[str]:
    """The names of all registered targets."""
    return sorted({target_name(k, p) for p in _modules() for k in kernels(p)})
