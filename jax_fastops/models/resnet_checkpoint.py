"""Checkpoints of torchvision's and timm's ResNets, as files of safetensors.

::

    config, params, statistics = resnet_checkpoint.load("folder/of/resnet50.a1_in1k")
    logits, _ = resnet.apply(params, statistics, images, config, train=False)

``huggingface_hub.snapshot_download("timm/resnet50.a1_in1k")`` downloads such a folder. In PyTorch,
``safetensors.torch.save_file(model.state_dict(), "folder/model.safetensors")`` writes one.

Needs safetensors. Without it, the functions raise ``ImportError``; without the folder or the file,
``FileNotFoundError``; and for a configuration or parameters of another type, ``TypeError``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_fastops.models import resnet
from jax_fastops.models._checkpoint import (
    Leaf,
    Shardings,
    check_tensors,
    keys_of,
    parameter_dtype,
    read_params,
    tensors_of,
)
from jax_fastops.models._checkpoint_files import (
    CONFIG,
    WEIGHTS,
    Stored,
    find_tensors,
    import_safetensors,
    read_json,
)
from jax_fastops.models._checks import Checks

__all__ = ["load", "save"]

_CHECK = Checks("resnet")
# Architectures of timm whose network is not told by its tensors are others.
_ARCHITECTURES = re.compile(r"(tv_|gluon_)?resnet(18|26|34|50|101|152)(_v1b)?")
_COUNT = "num_batches_tracked"
_NAMES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


def _leaves(tree: Any) -> dict[str, Leaf]:
    """The tensors of parameters and statistics by their names in PyTorch."""
    leaves = {}
    for tree_path, _ in jax.tree.leaves_with_path(tree):
        path = keys_of(tree_path)
        name = ".".join(str(_NAMES.get(key, key)) for key in path[1:])
        name = name.replace("downsample.conv", "downsample.0").replace("ple.bn", "ple.1")
        leaves[name] = Leaf(path, path[-1] == "kernel")
    return leaves


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    param_dtype: DTypeLike = "float32",
    sharding: Shardings = None,
) -> tuple[resnet.Config, dict[str, Any], dict[str, Any]]:
    """Reads a ResNet from a folder with ``model.safetensors``.

    The shapes of the tensors give the config. Networks are those of torchvision's ``resnet18`` to
    ``resnet152``, also with other numbers of blocks, channels or classes, and timm's of the same
    names. Images are normalized as there, and NHWC.

    Args:
      path: the folder. The ``architecture`` in ``config.json`` is checked, if timm's file is there.
      dtype: the ``dtype`` of the config, in which the model computes.
      param_dtype, sharding: as in :func:`jax_fastops.models.decoder_checkpoint.load`. A tree of
        shardings is one of pairs ``(params, statistics)``.

    Returns:
      ``(config, params, statistics)`` for :func:`jax_fastops.models.resnet.apply`.

    Raises:
      ValueError: the file is damaged; tensors are missing, unknown, or of another shape or dtype
        (all are named); or the architecture is another one.

    Example:
      >>> import jax, tempfile
      >>> from jax_fastops.models import resnet, resnet_checkpoint
      >>> params, statistics = resnet.init(jax.random.key(0), resnet.SMALL)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     resnet_checkpoint.save(folder, resnet.SMALL, params, statistics)
      ...     config, params, statistics = resnet_checkpoint.load(folder, dtype="float32")
      >>> config == resnet.SMALL
      True
    """
    path, own = Path(path), parameter_dtype("resnet", param_dtype)
    if (path / CONFIG).exists():
        name = read_json("resnet", path / CONFIG).get("architecture")
        if not _ARCHITECTURES.fullmatch(str(name)):
            raise ValueError(
                f"resnet: architecture in {CONFIG} is {name!r}; it must be 'resnet18', 'resnet26', "
                "'resnet34', 'resnet50', 'resnet101' or 'resnet152'"
            )
    tensors = find_tensors("resnet", path, (_COUNT,))
    config = _config_of(tensors, dtype)
    expected = resnet.shapes(config)
    leaves = _leaves(expected)
    check_tensors("resnet", tensors, leaves, expected)
    sharding = sharding(config) if callable(sharding) else sharding
    return config, *read_params("resnet", tensors, leaves, expected, own, sharding)


def _config_of(tensors: dict[str, Stored], dtype: str) -> resnet.Config:
    def shape(name: str, rank: int) -> tuple[int, ...]:
        found = tensors[name].shape if name in tensors else ()
        if len(found) != rank:
            raise ValueError(f"resnet: there is no tensor {name} of {rank} axes")
        return found

    blocks = [re.match(r"layer(\d+)\.(\d+)\.", name) for name in tensors]
    stages: dict[int, int] = {}
    for stage, block in (map(int, match.groups()) for match in blocks if match):
        stages[stage] = max(stages.get(stage, 0), block + 1)
    width, channels, size, _ = shape("conv1.weight", 4)
    return resnet.Config(
        stages=tuple(count for _, count in sorted(stages.items())),
        block="bottleneck" if "layer1.0.conv3.weight" in tensors else "basic",
        width=width,
        classes=shape("fc.weight", 2)[0],
        channels=channels,
        stem="imagenet" if size == 7 else "small",
        dtype=dtype,
    )


def save(
    path: str | os.PathLike[str],
    config: resnet.Config,
    params: dict[str, Any],
    statistics: dict[str, Any],
) -> None:
    """Writes ``model.safetensors`` with the names of torchvision and timm into a folder.

    ``load_state_dict(safetensors.torch.load_file(file))`` reads it there. An existing file is
    replaced atomically.

    Args:
      path: the folder. It is created if it does not exist.
      config: the :class:`jax_fastops.models.resnet.Config` of the parameters.
      params, statistics: as from :func:`jax_fastops.models.resnet.init`.

    Raises:
      ValueError: ``params`` or ``statistics`` are not those of ``config``.

    Example:
      >>> import jax, os, tempfile
      >>> from jax_fastops.models import resnet, resnet_checkpoint
      >>> params, statistics = resnet.init(jax.random.key(0), resnet.SMALL)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     resnet_checkpoint.save(folder, resnet.SMALL, params, statistics)
      ...     os.listdir(folder)
      ['model.safetensors']
    """
    expected = resnet.shapes(config)
    _CHECK.tree("params", params, expected[0])
    _CHECK.tree("statistics", statistics, expected[1])
    tensors: dict[str, np.ndarray] = tensors_of((params, statistics), _leaves(expected))
    for name in [name for name in tensors if name.endswith("running_mean")]:
        tensors[name.replace("running_mean", _COUNT)] = np.zeros((), np.int64)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f"{WEIGHTS}.{os.getpid()}"
    try:
        import_safetensors("resnet").numpy.save_file(tensors, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, path / WEIGHTS)
    finally:
        unfinished.unlink(missing_ok=True)
