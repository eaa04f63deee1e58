"""Jobs, random calls, and the fit of decision trees to them."""

import ast
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import random
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.case import SLOW

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
ages = pytest.importorskip("benchmarks.ages")

import jax_fastops as fo  # noqa: E402
from benchmarks import (  # noqa: E402
    RESULTS,
    ROOT,
    __main__,
    cases,
    environment,
    numbers,
    pages,
    plain,
    processes,
    profile,
    programs,
    tables,
)
from benchmarks.jobs import accuracy, bert, dispatch, ops, pretraining, readme  # noqa: E402
from jax_fastops import _auto, _registry, _selftest  # noqa: E402
from jax_fastops.models import decoder as decoder_model  # noqa: E402

H100 = "nvidia-h100-80gb-hbm3"


def test_every_program_takes_the_installed_package():
    """The source tree, which `python -m` finds first, has no kernels."""
    folder = pathlib.Path(processes.__file__).parent
    lines = [line for file in folder.rglob("*.py") for line in file.read_text().splitlines()]
    assert not [line for line in lines if re.match(r"\s*(import|from) jax_fastops", line)]


def test_a_new_family_is_known_everywhere(tmp_path, monkeypatch):
    monkeypatch.setitem(_registry._FAMILIES, "toy", {"toy": _registry.example(fo.relu, "... n")})
    assert "toy" in _selftest.families()
    (op,) = cases.select_ops(["add_relu"])
    toy = dataclasses.replace(op, name="toy")
    assert toy.family == "toy" and dispatch.calls(toy, 2, 0, 2**10)
    for path, text in (("docs/ops/toy.md", "# Toys\n"), (f"{H100}-toy.json", "{}")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    assert numbers.families(H100) == {"toy": "Toys"}


def test_no_list_of_families():
    """They name themselves. A literal with more than half of them is such a list."""
    names, found = _registry.families().keys(), []
    folders = ("jax_fastops", "benchmarks", "docs", "tests/harness")
    for path in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            inside = {n.value for n in ast.iter_child_nodes(node) if isinstance(n, ast.Constant)}
            if 2 * len(inside & names) > len(names) and path.name != "__init__.py":
                found.append(f"{path}:{node.lineno}")
    makefile = (ROOT / "Makefile").read_text().splitlines()
    found += [line for line in makefile if 2 * sum(name in line for name in names) > len(names)]
    assert found == []


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
    options = types.SimpleNamespace(largest=2**10, rounds=1, jobs=1)
    (reference,) = dispatch.sweep([op], 1, 0, ("xla", "jax.nn"), options)
    (kernel,) = dispatch.sweep([op], 1, 0, ("native", "jax.nn"), options)
    assert [*reference.same] == (["forward", "grad"] if same else []) and not kernel.same


def test_proposed_conditions_are_rows_of_the_table():
    op = dispatch.BY_NAME["relu"]
    (case,) = dispatch.calls(op, 1, 0, 2**10)
    asked = dispatch.request(case)

    def sample(size, native):
        seconds = {"native": dict.fromkeys(("forward", "grad"), native)}
        seconds |= {name: {"forward": 1.0, "grad": 1.0} for name in ("xla", "jax.nn")}
        request = dataclasses.replace(asked, features=(("bytes", size),))
        return dispatch.Sample(op.name, case.name, request, seconds)

    samples = [sample(2**12 + i, 1.2) for i in range(16)]
    samples += [sample(2**22 + i, 0.5) for i in range(16)]
    _, row = dispatch.propose(samples)
    entry, dtype, forward, step = eval(row, vars(_auto))[0]
    assert (entry, dtype) == (asked.entry, asked.dtype)
    assert forward == _auto.NEVER  # XLA fuses it
    name, bound, below, rest = step.tree
    assert (name, below, rest) == ("bytes", False, True) and 2**12 + 15 < bound <= 2**22
    for device in _auto.DEVICES:
        for uses in (uses for dtypes in device["entries"].values() for uses in dtypes.values()):
            for tree in uses.values():
                assert eval(dispatch._text(tree), vars(_auto)).tree == tree


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
    options = types.SimpleNamespace(checks=4, seed=6, out=tmp_path)
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


def rows_of(job, options, tmp_path):
    alone = job in ("fusing", "packing", "remat", "several", "tracing")
    contenders = "" if alone else "--contenders ours plain"
    command = f"{job} --small --steps 1 {contenders} {options} --out {tmp_path}"
    __main__.main(command.split())
    (path,) = tmp_path.iterdir()
    return json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("job", __main__.NAMES)
def test_every_job_has_help(job, capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main([job, "--help"])
    assert f"python -m benchmarks {job} " in capsys.readouterr().out


def test_pretraining(tmp_path):
    """A small model, each contender in a process of its own."""
    options = "--shapes 2x16 --attention-dropout 0 --dropout 0"
    rows = rows_of("pretraining", options, tmp_path)
    assert [row["positions"] for row in rows] == ["all", "masked"] * 2
    for ours, theirs in zip(rows[:2], rows[2:], strict=True):
        assert ours["ms"] > 0 and theirs["ms"] > 0 and ours["attention"] == "xla"
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3) and ours["loss"] < 5
    assert rows[0]["loss"] != pytest.approx(rows[1]["loss"], abs=1e-2)


def test_attention_dropout(tmp_path):
    """It changes the loss of each contender, also by itself."""
    options = "--shapes 2x16 --positions all --attention-dropout 0.5 0 --dropout 0"
    ours, ours_without, plain, without = rows_of("pretraining", options, tmp_path)
    assert ours_without["first_loss"] == pytest.approx(without["first_loss"], abs=1e-3)
    for row in (ours, plain):
        assert row["attention"] == "softmax"
        assert abs(row["first_loss"] - without["first_loss"]) > 1e-4


def test_masked_positions():
    """76 of 512 tokens, each of which is not padding, with the labels of the other column."""
    _, labels, inside, chosen = pretraining.data("3x512", 100, "masked")
    _, all_labels, *_ = pretraining.data("3x512", 100, "all")
    assert chosen.shape == labels.shape == (3, 76)
    assert all(len(set(row)) == 76 for row in chosen.tolist())
    assert np.take_along_axis(inside, chosen, 1).all()
    np.testing.assert_array_equal(labels, np.take_along_axis(all_labels, chosen, 1))


def test_curves(tmp_path):
    options = "--shapes 2x16 --positions all --attention-dropout 0 --dropout 0 --curves 20"
    ours, plain = rows_of("pretraining", options, tmp_path)
    assert len(ours["losses"]) == 20 and ours["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert ours["losses"][-1] < ours["losses"][0]


def test_decoder(tmp_path):
    options = "--shapes 2x16 --contenders ours plain plain-joined"
    ours, plain, joined = rows_of("decoder", options, tmp_path)
    assert ours["ms"] > 0 and plain["ms"] > 0
    assert joined["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert plain["temp_bytes"] < joined["temp_bytes"]  # no joined kernels
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert ours["loss"] < ours["first_loss"] < 5


def test_decoding(tmp_path):
    ours, plain = rows_of("decoding", "--shapes 2x16 --length 8", tmp_path)
    assert ours["sample"] == plain["sample"] and ours["floor_ms"] > 0


@pytest.mark.parametrize("model", ["bert", "decoder"])
def test_packing(tmp_path, model):
    """The same sentences in half as many rows: the same loss and tokens."""
    options = f"--model {model} --dropout 0 --contenders packed unpacked"
    packed, unpacked = rows = rows_of("packing", options, tmp_path)
    assert packed["first_loss"] == pytest.approx(unpacked["first_loss"], abs=1e-3)
    for row in rows:
        assert row["tokens"] == 128
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["ms"], rel=0.01)
    assert packed["fill"] == 1 and unpacked["fill"] == 0.5
    line = tables.packing_table({"rows": rows}).splitlines()[3]
    assert line.startswith("| one sequence in a row | 8 x 32 | 50.0% |") and "1.00x" in line


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "axis", ["tensor", *(pytest.param(axis, marks=SLOW) for axis in ("data", "sequence"))]
)
def test_decoder_over_devices(tmp_path, axis):
    options = f"--shapes 2x16 --devices 2 --axis {axis}"
    ours, plain = rows_of("decoder", options, tmp_path)
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert ours["collectives"]["all-reduce"]["count"] > 0


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_several(tmp_path):
    options = "--shape 2x16 --layouts zero stage --micro-batches 2 --plain"
    sharded, stages, plain = rows_of("several", options, tmp_path)
    assert sharded["first_loss"] == pytest.approx(stages["first_loss"], abs=1e-3)
    assert sharded["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert sharded["loss"] == pytest.approx(stages["loss"], abs=1e-3)
    assert "all-gather" in sharded["collectives"] and "collective-permute" in stages["collectives"]
    other = sharded | {"commit": "0123456789abcdef", "one_ms": sharded["ms"]}
    results = {"devices": 2, "micro_batches": 2, "rows": [sharded, stages, other]}
    lines = tables.several_table(results).splitlines()
    assert lines[3].startswith("| decoder | 2 stages, 2 micro-batches |")
    assert "| - |" in lines[3] and "| 2.00x |" in lines[4] and lines[4].endswith("| `0123456789` |")


@pytest.mark.slow
def test_remat(tmp_path):
    options = "--shape 4x64 --models decoder --depths 4 --dtype float32"
    found = {(row["every"], row["remat"]): row for row in rows_of("remat", options, tmp_path)}
    assert list(found) == [(None, False), (None, True), (1, False), (2, False), (2, True)]
    table = tables.remat_table({"rows": list(found.values())})
    assert table.splitlines()[0].endswith("| no `remat_every` | k = 1 | k = 2 |")
    found = {key: row["temp_bytes"] for key, row in found.items()}
    assert found[2, True] < found[2, False] < found[None, False]


def test_inference(tmp_path):
    options = (
        "--shapes 1x16 --attention xla --dtypes float32 --contenders ours frozen constants plain"
    )
    ours, *frozen, plain = rows_of("inference", f"{options} --processes 2", tmp_path)
    assert ours["ms"] > 0 and plain["latency_ms"] > 0
    assert len(ours["all_ms"]) == len(ours["all_latency_ms"]) == 2
    assert plain["calls"] == 0 and not profile.runs_kernels(plain)
    assert ours["sample"] == pytest.approx(plain["sample"], abs=1e-3)
    for row in frozen:  # `constants` is one of them
        assert ours["sample"] == pytest.approx(row["sample"], abs=1e-5)


def test_linear_cross_entropy(tmp_path):
    ours, plain = rows_of("linear_cross_entropy", "--chunk 32", tmp_path)
    assert ours["ms"] > 0 and plain["temp_bytes"] > 0
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-2)


def test_fusing(tmp_path):
    (row,) = rows_of("fusing", "--models models.decoder --traces 1", tmp_path)
    assert row["autofuse_loss"] == pytest.approx(row["plain_loss"], rel=1e-2)
    assert all(value > 0 for key, value in row.items() if key.endswith(("_ms", "_s")))


@SLOW
def test_first_calls_of_fusing(tmp_path):
    rows = rows_of("fusing", "--models models.decoder --first", tmp_path)
    assert [row["contender"] for row in rows] == ["plain", "autofuse"]
    assert all(row["call_ms"] > row["trace_ms"] > 0 for row in rows)


def test_tracing(tmp_path):
    (row,) = rows_of("tracing", "--programs MLP --contenders new --traces 1", tmp_path)
    assert all(row[f"{key}_ms"] > 0 for key in ("first_forward", "first_step", "forward", "step"))


def test_attention(tmp_path):
    rows = rows_of("attention", "--dtype float32", tmp_path)
    assert {(row["contender"], row["kind"]) for row in rows} >= {
        ("ours", "dropout"),
        ("plain", "causal"),
    }
    assert all(row["ms"] > 0 for row in rows)


def test_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(accuracy, "DATA", {"ordinary": lambda x: x})
    __main__.main(["accuracy", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["accuracy"]
    known = json.loads((RESULTS / f"accuracy-{H100}.json").read_text())["accuracy"]
    assert {row["op"] for row in rows} >= {row["op"] for row in known}
    assert max(side["ours"] for row in rows for side in row["errors"].values()) < 4


def test_rows_are_added(tmp_path):
    """To a file that was made in the same way."""
    options = "--shapes 1x16 --attention xla --dtypes float32 --add --contenders"
    rows_of("inference", f"{options} plain", tmp_path)
    rows = rows_of("inference", f"{options} ours", tmp_path)
    assert [row["contender"] for row in rows] == ["plain", "ours"]
    rows = rows_of("inference", f"{options} plain", tmp_path)
    assert [row["contender"] for row in rows] == ["ours", "plain"]
    with pytest.raises(SystemExit, match=r"steps .* is 1, not 2"):
        rows_of("inference", f"{options} plain --steps 2", tmp_path)


def test_processes_are_combined():
    times = (3.0, 5.0), (1.0, 9.0), (2.0, 7.0)
    found = [dict(ms=ms, all_ms=[ms] * 3, latency_ms=late, calls=2) for ms, late in times]
    row = processes.combined(found)
    assert row["ms"] == 2 and row["all_ms"] == [3, 1, 2] and row["calls"] == 2
    assert row["latency_ms"] == 7 and row["all_latency_ms"] == [5, 9, 7] and row["processes"] == 3
    assert processes.combined([row, {"error": "late"}]) == {"error": "late"}
    assert processes.combined(found[:1]) == found[0]


def test_processes_without_one_time_are_combined():
    """Several contenders in a row, as `fusing` has them, and a loss curve."""
    found = [dict(plain_ms=t, patch_ms=2 * t, kinds_ms={"copies": t}) for t in (3.0, 1.0, 2.0)]
    row = processes.combined(found)
    assert (row["plain_ms"], row["patch_ms"], row["kinds_ms"]) == (2, 4, {"copies": 3})
    assert row["all_patch_ms"] == [6, 2, 4]
    text = tables.fused_table({"a": row})
    assert "| a | 2.00 (1.00 to 3.00) | 4.00 (2.00 to 6.00) | - | - |" in text
    assert processes.combined([{"losses": [2.0]}] * 2) == {"losses": [2.0], "processes": 2}


@pytest.mark.parametrize("name", ["bert", "decoder"])
def test_plain_products_are_in_bfloat16(name):
    """This includes the products of the vocabulary's logits and gradients."""
    module = {"bert": plain.bert, "decoder": decoder_model}[name]
    config = dataclasses.replace(module.SMALL, dtype="bfloat16")
    tokens = jnp.zeros((2, 16), jnp.int32)
    more = {"mlm": True} if name == "bert" else {}
    params = module.init(jax.random.key(0), config, **more)

    def loss(params):
        if name == "decoder":
            return decoder_model.loss(params, tokens, config, ops=module.PLAIN)
        hidden, _ = plain.bert.apply(params, tokens, config, ops=plain.PLAIN)
        return plain.bert.masked_lm_loss(params, hidden, tokens, config, ops=plain.PLAIN)

    params.pop("pooler", None)
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    products = re.findall(r"dot_general .*: \((.*)\) ->", text)
    assert len(products) > 20 and not any("f32" in operands for operands in products)


def test_no_forward_casts_weights():
    setting = dataclasses.replace(bert.SMALL, config=bert.SMALL.config, shapes=((2, 16),))
    row = bert.Row("inference", 2, 16, 0.0, "softmax", "bfloat16")
    weights = bert.contender("plain", row, setting).args[:-2]
    assert {a.dtype for a in weights if a.ndim > 1} == {jnp.dtype("bfloat16")}


def test_tables_have_the_fastest_variant():
    rows = [
        dict(contender="ours", shape="2x16", ms=2.0, temp_bytes=1e9),
        dict(contender="plain", shape="2x16", ms=4.0, temp_bytes=3e9),
        dict(contender="plain-joined", shape="2x16", ms=3.0, temp_bytes=2e9),
        dict(contender="torch", shape="2x16", error="late"),
        dict(contender="ours", shape="1x16", ms=1.0, temp_bytes=1e9),
    ]
    *_, first, second = tables.job_table({"rows": rows}).splitlines()
    assert first == "| 1 x 16 | **1.00** | - | - | - | 1.0 / - / - |"
    assert second == "| 2 x 16 | **2.00** | 3.00 | - | 1.50x | 1.0 / 2.0 / - |"


def test_a_range_of_processes():
    row = dict(contender="ours", shape="1x16", dtype="bfloat16", ms=0.4, calls=0)
    row |= dict(all_ms=[0.3, 0.4, 0.9], latency_ms=1.0, all_latency_ms=[1.0] * 3)
    last = tables.job_table({"rows": [row]}).splitlines()[-1]
    assert "| **0.40 (0.30 to 0.90)** | - | - | - | 1.00 / - / - | 0 |" in last
    row = dict(contender="ours", shape="1x16", ms=0.4, all_ms=[0.3, 0.4, 0.9])
    for count, text in ((1, "0.40"), (3, "0.40 (0.30 to 0.90)")):
        last = tables.job_table({"rows": [row | {"processes": count}]}).splitlines()[-1]
        assert last == f"| 1 x 16 | **{text}** | - | - | - |"


def test_only_programs_with_kernels_are_compared():
    """In a table with the number of kernels. Old rows have a profile in its place, or nothing."""
    facts = (
        ("8x128", dict(calls=12), "2.00x", "12"),
        ("4x128", dict(calls=0), "-", "0"),
        ("2x128", dict(kinds_ms={"products": 1.0, profile.OTHER: 1.0}), "-", "0"),
        ("1x128", {}, "-", "-"),
    )
    rows = [
        dict(contender=who, shape=shape, ms=ms) | fact
        for shape, fact, *_ in facts
        for who, ms in (("ours", 1.0), ("plain", 2.0))
    ]
    lines = tables.job_table({"rows": rows}).splitlines()[2:]
    for line, (shape, _, gain, kernels) in zip(lines, reversed(facts), strict=True):
        text = shape.replace("x", " x ")
        assert line == f"| {text} | **1.00** | 2.00 | - | {gain} | {kernels} |"


def test_rows_of_16_bits_that_were_retracted_are_not_shown():
    rows = [
        dict(phase=phase, dtype=dtype)
        for phase in ("step", "inference", "model")
        for dtype in ("float32", "bfloat16")
    ]
    results = {"network": {}, "versions": {"jax": "0"}, "rows": rows}
    kept = pages._without_retracted(results)["rows"]
    assert kept == [rows[0], rows[1], rows[2], rows[4]]
    results["versions"]["commit"] = "0123456789"
    assert pages._without_retracted(results)["rows"] == rows


def test_the_chart_of_inference_leaves_out_programs_without_kernels(tmp_path, monkeypatch):
    rows = [
        dict(contender=who, shape=shape, dtype="bfloat16", ms=1.0, calls=count)
        for shape, calls in (("1x32", 0), ("8x128", 24))
        for who, count in (("ours", calls), ("plain", 0), ("torch", 0))
    ]
    versions = {"jax": "0"}
    results = {"hardware": {"device": "H"}, "versions": versions, "rows": rows}
    monkeypatch.setattr(pages, "load", lambda name: results)
    words = readme.words(pages.job(tmp_path / "chart", "inference", "a forward", "torch")[0])
    assert "8 x 128" in words and "1 x 32" not in words


def test_the_picture_of_a_layer(monkeypatch):
    """A box is as long as its time and no lower than its text, and the parts fit into the whole."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    diagrams = importlib.import_module("diagrams")
    picture, times = diagrams.Picture(diagrams.THEMES[0]), numbers.sources()
    diagrams.layer(picture)
    shapes = [re.findall(r" (?:x|height)='([-\d.]+)'", s) for s in picture.shapes if "<rect" in s]
    for who, x, count in (("ours", "40", 7), ("torch", "202", 8)):
        *heights, rest = [float(height) for left, height in shapes if left == x]
        assert len(heights) == count and min(heights) >= 13 and rest >= 0
        assert heights[1] == pytest.approx(0.8 * float(times[f"layer_{who}_attention_us"]), abs=0.1)


# ---- floors --------------------------------------------------------------------------------------


def bytes_of(case):
    """The bytes of each phase of a case, from shapes only."""
    given = zip(case.shapes, case.operand_dtypes, strict=True)
    args = [jax.ShapeDtypeStruct(*pair) for pair in given]
    ours = functools.partial(case.op.ours, **case.layout.options)
    results, tree = jax.tree.flatten(jax.eval_shape(ours, *args))

    def arrays(types):
        sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in types)
        return [types_of(nbytes=size) for size in sizes]

    types_of = types.SimpleNamespace
    contender = programs.Contender()
    if "backward" in case.phases:
        with fo.use_implementation("native"):
            pull = programs._Pullback(ours, case.differentiated, tree)
            lean, sources = programs.distinct(pull.forward_saving, args)
            kept = jax.eval_shape(lambda *xs: lean(*xs), *args)
            backward, _ = programs.distinct(
                pull.backward(sources, len(args), len(kept)), given := [*args, *kept, *results]
            )
            gradients = jax.eval_shape(programs.unrepeated(backward, given), *given)
        pair = arrays(args), arrays(kept)
        contender.saved = programs._saved_bytes(sources, len(results), *pair)
        contender.programs["backward"] = types_of(outputs=arrays(gradients))
    total = sum(x.nbytes for x in arrays(results))
    data = programs.Operands(arrays(args), [], tree, total)
    return ops.traffic(case, data, {"native": contender})


@pytest.mark.parametrize("op", cases.OPS, ids=lambda op: op.name)
def test_floors_are_those_of_the_results(op):
    """The residuals of an op do not grow by a change, and its floor with them."""
    path = RESULTS / f"{H100}-{op.family}.json"
    if not path.exists():
        path = RESULTS / f"nvidia-h200-{op.family}.json"
    if not path.exists():
        pytest.skip("the family has no results yet")
    rows = json.loads(path.read_text())["cases"]
    measured = {(c["op"], c["label"]): c for c in rows if c["dtype"] == "bfloat16"}
    for case in cases.cases("gpu", (op,), ["bfloat16"]):
        known = measured.get((op.name, case.layout.label), {"bytes": {}})["bytes"]
        found = bytes_of(case)
        assert found == pytest.approx(found | known, rel=0.021), case.name


# ---- ages ----------------------------------------------------------------------------------------


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A repository with kernels of two families; a function that commits changes of files."""
    repository, results = tmp_path / "repository", tmp_path / "repository/benchmarks/results"
    results.mkdir(parents=True)
    monkeypatch.setattr(environment, "ROOT", repository)
    monkeypatch.setattr(ages, "RESULTS", results)
    monkeypatch.delenv("JAX_FASTOPS_COMMIT", raising=False)

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(files):
        for path, text in files.items():
            file = repository / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        git("add", ".")
        git("commit", "-m", "change")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    return commit


def results_of(recorded, **rows):
    """The text of a file, with a row for each value of a key."""
    hardware = {"platform": "cuda", "device": "NVIDIA H100 80GB HBM3"}
    results = {"hardware": hardware, "versions": {"commit": recorded} if recorded else {}}
    results["rows"] = [{key: value} for key, values in rows.items() for value in values]
    return json.dumps(results)


def test_results_older_than_their_kernels(history):
    name = "nvidia-h100-80gb-hbm3-norm"
    file = f"benchmarks/results/{name}.json"
    first = history({"src/norm/a.cu": "1", "src/relu/a.cu": "1"})
    history({file: results_of(first)})
    # The kernels of others, and those of a CPU.
    history({"src/relu/a.cu": "2", "src/norm/norm_simd.cc": "2", "src/core/cpu/a.h": "2"})
    assert ages.older([name]) == [] and ages.table([name]) == "None.\n"
    changing = history({"src/norm/a.cu": "2"})
    ((shown, measured, changed),) = ages.older([name])
    assert shown == f"`{name}`" and measured.startswith(f"`{first[:10]}`, 2")
    assert changed.startswith(f"`{changing[:10]}`, 2")
    second = history({"src/core/cuda/a.h": "1"})
    history({file: results_of(second)})
    assert ages.older([name]) == []
    # With changed files, the commit of the results counts, which may have the changes.
    history({"src/norm/a.cu": "3", file: results_of(second + environment.DIRTY)})
    assert ages.older([name]) == []
    history({"src/norm/a.cu": "4"})
    assert len(ages.older([name])) == 1


def test_results_without_a_commit(history):
    name = "decoder-nvidia-h100-80gb-hbm3"
    history({"src/norm/a.cu": "1", f"benchmarks/results/{name}.json": results_of(None)})
    ((_, measured, changed),) = ages.older([name])
    assert measured.startswith("before commits were recorded, 2") and changed == "not since"


JOB = "inference-nvidia-h100-80gb-hbm3"


def test_rows_that_are_removed_make_no_results_new(history):
    """The oldest row counts, also without a commit."""
    file = f"benchmarks/results/{JOB}.json"
    first = history({"src/norm/a.cu": "1"})
    history({file: results_of(None, commit=[None, None])})
    change = history({"src/norm/a.cu": "2"})
    for left in ([None], [None, change]):
        history({file: results_of(None, commit=left)})
        ((_, measured, changed),) = ages.older([JOB])
        assert measured.startswith("before commits") and changed.startswith(f"`{change[:10]}`")
    history({file: results_of(None, commit=[change, first])})
    ((_, measured, _),) = ages.older([JOB])
    assert measured.startswith(f"`{first[:10]}`")
    history({file: results_of(None, commit=[change])})
    assert ages.older([JOB]) == []
    # With changed files, the commit that added the first such row counts.
    dirty = change + environment.DIRTY
    history({"src/norm/a.cu": "3", file: results_of(None, commit=[dirty, dirty])})
    assert ages.older([JOB]) == []
    history({"src/norm/a.cu": "4"})
    history({file: results_of(None, commit=[dirty])})
    assert len(ages.older([JOB])) == 1


@pytest.mark.parametrize(
    "path, names",
    [
        ("_op.py", {"norm", "inference", "fusing"}),
        ("autofuse/rules.py", {"fusing"}),
        ("models/bert.py", {"inference", "fusing"}),
        ("models/bert_checkpoint.py", set()),
        ("relu.py", {"fusing"}),
    ],
)
def test_python_that_decides_what_is_measured(history, path, names):
    device = "nvidia-h100-80gb-hbm3"
    files = dict(norm=f"{device}-norm", inference=JOB, fusing=f"fusing-{device}")
    first = history({"src/norm/a.cu": "1"})
    history({f"benchmarks/results/{name}.json": results_of(first) for name in files.values()})
    history({f"jax_fastops/{path}": "1"})
    older = {row[0] for row in ages.older(files.values())}
    assert older == {f"`{files[name]}`" for name in names}


def test_without_a_history(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("JAX_FASTOPS_COMMIT", raising=False)
    assert ages.older(["a"]) is None and "not known" in ages.table(["a"])
    assert environment.commit() is None
    monkeypatch.setenv("JAX_FASTOPS_COMMIT", "abc-dirty")
    assert environment.commit() == "abc-dirty"


def test_the_commit_of_results(history):
    head = history({"src/norm/a.cu": "1", "docs/a.md": "1"})
    (environment.ROOT / "docs/a.md").write_text("2")
    (environment.ROOT / "benchmarks/results/a.json").write_text("2")
    assert environment.commit() == head
    (environment.ROOT / "src/norm/b.cu").write_text("1")
    assert environment.commit() == head + environment.DIRTY


def test_results_speak_of_files_that_exist():
    for path in RESULTS.glob("*.json"):
        results = json.loads(path.read_text())
        if "device" not in results.get("hardware", {}):
            continue
        for pattern in ages.kernels(path.stem, results):
            if not pattern.startswith(":"):
                assert list(environment.ROOT.glob(pattern)), (path, pattern)


# ---- profiles ------------------------------------------------------------------------------------


def test_profiles_by_kind():
    calls = profile.PROFILED
    found = profile.attributed(
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
    kinds = {"NormKernel": 1, "attention": 2, "products": 3, "copies": 11, profile.OTHER: 12}
    assert found["kinds_ms"] == pytest.approx(kinds) and found["busy_ms"] == pytest.approx(29)
    assert found["kernels"] == [["Memset 0", pytest.approx(11), 1]]
