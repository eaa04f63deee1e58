"""Checkpoints of ResNets equal those of torchvision, as recorded by record_resnet.py."""

import json
import shutil

import jax
import numpy as np
import pytest
from harness.numerics import assert_close_in_norm

from jax_fastops.models import resnet

safetensors = pytest.importorskip("safetensors.numpy")

from harness.recordings import DATA  # noqa: E402

from jax_fastops.models import resnet_checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
FOLDER = DATA / "resnet"
FILE = "model.safetensors"


def test_equals_torchvision(native):
    recorded = safetensors.load_file(FOLDER / "arrays.safetensors")
    config, params, statistics = resnet_checkpoint.load(FOLDER, dtype="float32")
    assert config == resnet.Config((1, 2, 1, 1), "bottleneck", 2, 3, dtype="float32")

    @jax.jit
    def logits(params, statistics, images):
        return resnet.apply(params, statistics, images, config, train=False)[0]

    images = np.moveaxis(recorded["inputs.images"], 1, -1)
    found = logits(params, statistics, images)
    assert_close_in_norm(found, recorded["outputs.logits"], 1e-5, dtypes=False)


def test_save(tmp_path):
    """The file is the same."""
    resnet_checkpoint.save(tmp_path, *resnet_checkpoint.load(FOLDER))
    saved, wanted = (safetensors.load_file(folder / FILE) for folder in (tmp_path, FOLDER))
    assert saved.keys() == wanted.keys() and [p.name for p in tmp_path.iterdir()] == [FILE]
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(saved[name], tensor)
        assert saved[name].dtype == tensor.dtype


def test_architectures(tmp_path):
    """A file of timm says what its tensors do not."""
    shutil.copy(FOLDER / FILE, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet50"}))
    assert resnet_checkpoint.load(tmp_path)[0].dtype == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnetblur50"}))
    with pytest.raises(ValueError, match=r"architecture in config.json is 'resnetblur50'; it must"):
        resnet_checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("conv1.weight", None, r"there is no tensor conv1\.weight of 4 axes"),
        ("layer2.1.bn3.bias", None, r"tensors missing: layer2\.1\.bn3\.bias"),
        ("layer1.0.se.fc1.bias", np.zeros(2), r"tensors not known: layer1\.0\.se\.fc1\.bias"),
        ("layer1.0.conv2.weight", np.zeros((2, 1, 3, 3)), r"of another shape: layer1\.0\.conv2"),
    ],
)
def test_wrong_tensors(tmp_path, name, tensor, message):
    tensors = safetensors.load_file(FOLDER / FILE)
    tensors.pop(name, None)
    safetensors.save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / FILE)
    with pytest.raises(ValueError, match=message):
        resnet_checkpoint.load(tmp_path)


def test_save_of_another_config(tmp_path):
    _, params, statistics = resnet_checkpoint.load(FOLDER)
    with pytest.raises(ValueError, match=r"params\[.bn1.\]\[.bias.\] has shape"):
        resnet_checkpoint.save(tmp_path, resnet.RESNET18, params, statistics)
