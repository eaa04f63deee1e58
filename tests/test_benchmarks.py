"""Random calls, and the fit of decision trees to them."""

import json
import math
import pathlib
import random
import sys
import types

import jax
import pytest
from harness.case import SLOW

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

pytest.importorskip("rich")
cases = pytest.importorskip("benchmarks.cases")
decoder = pytest.importorskip("benchmarks.decoder")
dispatch = pytest.importorskip("benchmarks.dispatch")
inference = pytest.importorskip("benchmarks.inference")
jobs = pytest.importorskip("benchmarks.jobs")
linear_cross_entropy = pytest.importorskip("benchmarks.linear_cross_entropy")
pretraining = pytest.importorskip("benchmarks.pretraining")
shapes = pytest.importorskip("benchmarks.shapes")


def sample(rule, count=200, noise=0.02, seed=0):
    """Calls whose kernel gains or loses by 30% as a rule says."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        row = round(math.exp(rng.uniform(2, 12)))
        features = {
            "bytes": row * round(math.exp(rng.uniform(0, 10))),
            "row_bytes": row,
            "aligned": int(row % 16 == 0),
        }
        value = math.log(0.7 if rule(features) else 1.3) + rng.gauss(0, noise)
        found.append((features, value))
    return found


def takes(tree, features):
    while not isinstance(tree, bool):
        name, bound, below, rest = tree
        tree = below if features[name] < bound else rest
    return tree


@pytest.mark.parametrize(
    "rule",
    [
        lambda f: True,
        lambda f: False,
        lambda f: f["bytes"] >= 2**16,
        lambda f: f["bytes"] >= 2**16 and f["row_bytes"] < 2**10,
    ],
)
def test_a_rule_is_found(rule):
    tree = dispatch.tree(sample(rule))
    unseen = sample(rule, seed=1)
    wrong = [f for f, _ in unseen if takes(tree, f) != rule(f)]
    assert len(wrong) <= 6, (tree, wrong)


def test_a_loss_counts_more_than_gains():
    gains = [({"bytes": 8}, math.log(0.9))] * 5
    assert dispatch.tree(gains) is True
    assert dispatch.tree([*gains, ({"bytes": 8}, math.log(1.2))]) is False


def test_bounds_are_powers_of_two_where_possible():
    assert dispatch._round(900, 1100) == 1024
    assert dispatch._round(1024, 2048) == 2048
    assert dispatch._round(1025, 1100) == 1100
    assert dispatch._round(0, 1) == 1


@pytest.mark.parametrize("name, same", [("gated_act", True), ("lerp", False)])
def test_the_same_program_is_noticed(name, same):
    """Two slices in another order of reshapes, and an interpolation that is more exact."""
    op = dispatch.BY_NAME[name]
    options = types.SimpleNamespace(largest=2**10, rounds=1, jobs=1, table=None)
    (reference,) = dispatch.sweep([op], 1, 0, ("xla", "jax.nn"), options)
    (kernel,) = dispatch.sweep([op], 1, 0, ("native", "jax.nn"), options)
    assert [*reference.same] == (["forward", "grad"] if same else []) and not kernel.same


def test_a_fit_leaves_what_is_set_by_hand():
    op = dispatch.BY_NAME["relu"]
    (case,) = dispatch.calls(op, 1, 0, 2**10)
    uses = {"forward": 1.0, "grad": 1.0}
    seconds = {"native": uses, "xla": uses, "jax.nn": uses}
    samples = [dispatch.Sample(op.name, case.name, dispatch.request(case), seconds)] * 8
    entry, dtype = samples[0].request.entry, samples[0].request.dtype
    trees = {name: {"forward": True, "grad": True} for name in (dtype, "float64")}
    dispatch.fit(samples, kept := {"by_hand": [entry], "entries": {entry: trees}})
    assert kept["entries"] == {entry: trees}
    fitted = {"by_hand": [entry, "lerp"], "entries": {entry: dict(trees)}}
    dispatch.fit(samples, fitted, True)
    assert fitted["by_hand"] == ["lerp"]
    never = {"forward": False, "grad": False}
    assert fitted["entries"] == {entry: {dtype: never, "float64": never}}


def test_a_check_measures_again_what_is_slower(tmp_path, monkeypatch):
    def sample(name, forward, step, same=()):
        seconds = {"auto": {"forward": forward, "grad": step}, "jax.nn": dict(forward=1, grad=1)}
        return dispatch.Sample("relu", name, None, seconds, same)

    first = [
        sample("fast", 0.5, 0.8),
        sample("noisy", 1.5, 1.5, ("forward", "grad")),
        sample("once", 1.0, 1.2, ("forward",)),
        sample("twice", 1.3, 1.0),
    ]
    second = [sample("once", 1.2, 0.9, ("forward",)), sample("twice", 1.3, 1.0)]
    asked: list = []
    monkeypatch.setattr(dispatch, "sweep", lambda *_: first)
    monkeypatch.setattr(dispatch, "_run", lambda tasks, *_: asked.extend(tasks) or second)
    monkeypatch.setattr(dispatch, "RESULTS", tmp_path)
    options = types.SimpleNamespace(checks=4, seed=6)
    dispatch.check([dispatch.BY_NAME["relu"]], options)
    assert asked == [("relu", 2, 1), ("relu", 3, 1)]
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["seed"] == 7
    assert [call["call"] for call in found["calls"]] == ["noisy", "twice", "once", "fast"]
    summary = found["families"]["relu"]
    assert summary["slower, in another program"] == 2
    assert summary["slower twice, in another program"] == 1


@pytest.mark.parametrize("op", [op for op in cases.OPS if op.fitted], ids=lambda op: op.name)
def test_random_calls_are_valid(op):
    """Every call can be traced, states its features, and is the same for the same seed."""
    found = dispatch.calls(op, 30, 7, 2**20)
    assert [case.name for case in found] == [case.name for case in dispatch.calls(op, 30, 7, 2**20)]
    for case in found:
        asked = dispatch.request(case)
        assert asked.limit is None or "nothing" in asked.limit or "place" in asked.limit, asked
        assert dict(asked.features)["bytes"] > 0


def rows_of(module, options, tmp_path, monkeypatch):
    command = f"{module.__name__} --small --steps 1 --contenders ours plain"
    monkeypatch.setattr(sys, "argv", [*command.split(), *options.split(), "--out", str(tmp_path)])
    module.main()
    (path,) = tmp_path.iterdir()
    return json.loads(path.read_text())["rows"]


def test_pretraining(tmp_path, monkeypatch):
    """A small model, each contender in a process of its own."""
    options = "--shapes 2x16 --attention softmax --dropout 0"
    ours, plain = rows_of(pretraining, options, tmp_path, monkeypatch)
    assert ours["ms"] > 0 and plain["ms"] > 0
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-3) and ours["loss"] < 5


def test_curves(tmp_path, monkeypatch):
    options = "--shapes 2x16 --attention softmax --dropout 0 --curves 20"
    ours, plain = rows_of(pretraining, options, tmp_path, monkeypatch)
    assert len(ours["losses"]) == 20 and ours["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert ours["losses"][-1] < ours["losses"][0]


def test_decoder(tmp_path, monkeypatch):
    ours, plain = rows_of(decoder, "--shapes 2x16", tmp_path, monkeypatch)
    assert ours["ms"] > 0 and plain["ms"] > 0
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert ours["loss"] < ours["first_loss"] < 5


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "axis", ["tensor", *(pytest.param(axis, marks=SLOW) for axis in ("data", "sequence"))]
)
def test_decoder_over_devices(tmp_path, monkeypatch, axis):
    options = f"--shapes 2x16 --devices 2 --axis {axis}"
    ours, plain = rows_of(decoder, options, tmp_path, monkeypatch)
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert ours["collectives"]["all-reduce"]["count"] > 0


def test_inference(tmp_path, monkeypatch):
    options = "--shapes 1x16 --attention xla --dtypes float32"
    ours, plain = rows_of(inference, options, tmp_path, monkeypatch)
    assert ours["ms"] > 0 and plain["latency_ms"] > 0
    assert ours["sample"] == pytest.approx(plain["sample"], abs=1e-3)


def test_inference_with_constants(tmp_path, monkeypatch):
    options, samples = "--shapes 1x16 --attention xla --dtypes float32 --contenders ours", []
    for more in ("", "--constants"):
        folder = tmp_path / f"results{more}"
        folder.mkdir()
        (row,) = rows_of(inference, f"{options} {more}", folder, monkeypatch)
        samples.append(row["sample"])
    assert samples[0] == pytest.approx(samples[1], abs=1e-5)


def test_linear_cross_entropy(tmp_path, monkeypatch):
    ours, plain = rows_of(linear_cross_entropy, "--chunk 32", tmp_path, monkeypatch)
    assert ours["ms"] > 0 and plain["temp_bytes"] > 0
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-2)


def test_profiles_by_kind():
    calls = jobs.PROFILED
    found = jobs.attributed(
        [
            ("void jax_fastops::cuda::(anonymous namespace)::NormKernel<float>(P)", 1.0),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_", 2.0),
            ("gemm_fusion_dot_99", 3.0),
            ("loop_add_fusion_37", 5.0),
            ("input_reduce_fusion", 7.0),
            ("Memset 0", 11.0),
        ]
        * calls,
        longest=1,
    )
    kinds = {"NormKernel": 1, "attention": 2, "products": 3, "copies": 11, jobs.OTHER: 12}
    assert found["kinds_ms"] == pytest.approx(kinds) and found["busy_ms"] == pytest.approx(29)
    assert found["kernels"] == [["Memset 0", pytest.approx(11), 1]]
