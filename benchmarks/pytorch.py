"""PyTorch, eager and compiled by Inductor, in the same rounds (``python -m benchmarks --torch``).

Both frameworks share a process, the operands (through DLPack, without a copy), the flush of the
cache, the rounds and the clock: JAX's profiler sees every kernel of the process. JAX must not
preallocate most of the GPU's memory: see ``share_gpu``.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import jax

from benchmarks.cases import Case
from benchmarks.programs import Contender, Operands

CONTENDERS = ("torch", "torch.compile")


def share_gpu() -> None:
    """Let JAX allocate GPU memory on demand. Must run before JAX first uses the GPU.

    Inductor also compiles in this process: it would fork, which is unsafe with JAX's threads.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def unavailable() -> str | None:
    """The reason why PyTorch cannot be measured, or None."""
    if jax.devices()[0].platform != "gpu":
        return "PyTorch is measured on a GPU only"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return None if torch.cuda.is_available() else "this PyTorch sees no GPU"


@dataclass
class Program:
    """A PyTorch function that is timed like a `programs.Program`. A call waits for the GPU."""

    name: str
    function: Callable[[], Iterable]  # returns tensors
    calls: int = 1
    outputs: list = field(default_factory=list)
    temp_bytes: int | None = None

    def __post_init__(self):
        self()  # compiles if needed; an error is raised here

    def __call__(self) -> list:
        import torch

        for _ in range(self.calls):
            self.outputs = list(self.function())
        torch.cuda.synchronize()
        return self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs."""
        return sum(tensor.nbytes for tensor in self.outputs)

    def results(self) -> list[jax.Array]:
        """The distinct results of a call as JAX arrays; a sum has one gradient for two operands."""
        distinct = {(tensor.data_ptr(), tensor.shape): tensor for tensor in self()}
        return [jax.dlpack.from_dlpack(t.detach().contiguous()) for t in distinct.values()]

    def repeated(self, length: int) -> "Program":
        """``length`` calls; the host waits for the last."""
        return Program(f"{self.name}_x{length}", self.function, length)


def contender(case: Case, name: str, data: Operands, phases: Iterable[str]) -> Contender:
    """The programs of ``case`` in PyTorch; ``name`` is "torch" or "torch.compile".

    There is no ``forward_saving``: autograd does not show the residuals.
    """
    import torch

    function = partial(case.op.torch, **case.layout.options)
    if name == "torch.compile":
        torch._dynamo.reset()  # or a second shape is compiled with dynamic sizes
        torch._functorch.config.donated_buffer = False  # a backward runs many times here
        function = torch.compile(function, dynamic=False)
    args = [torch.from_dlpack(array) for array in data.args]
    cotangents = [torch.from_dlpack(array) for array in data.cotangents]
    result = Contender()

    def add(phase: str, work: Callable) -> None:
        result.programs[phase] = Program(f"{name}_{phase}", work)

    def forward():
        with torch.no_grad():
            return _several(function(*args))

    def step():
        results = _several(function(*leaves))
        return [*results, *gradients(results)]

    def gradients(results, **options):
        wanted = [leaves[position] for position in case.differentiated]
        return torch.autograd.grad(results, wanted, cotangents, **options)

    if "forward" in phases:
        add("forward", forward)
    if cotangents:
        leaves = [
            array.detach().requires_grad_(position in case.differentiated)
            for position, array in enumerate(args)
        ]
        recorded = _several(function(*leaves))
        if "backward" in phases:
            add("backward", partial(gradients, recorded, retain_graph=True))
        if "step" in phases:
            add("step", step)
    return result


def release() -> None:
    """Return unused memory to the GPU, for JAX's next case."""
    import torch

    torch.cuda.empty_cache()


def _several(results) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
