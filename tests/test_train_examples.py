"""The examples that train BERT and a decoder: resumed after a kill, on several devices, in several
processes; the BERT of the demo."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import DEVICE_COUNT
from harness.compat import make_mesh
from harness.numerics import assert_close_in_norm
from harness.sharding import collectives, device_count
from jax.sharding import AxisType

import jax_fastops as fo
from jax_fastops.models import bert, decoder

for needed in ("matplotlib", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(needed)
# Its import takes seconds, also of a test process that runs no test of this file.
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("needs sklearn", allow_module_level=True)

CHECKOUT = Path(__file__).resolve().parent.parent
SMALLER = dict(hidden_size=32, intermediate_size=64, layers=1)
CHANGES = {"bert": SMALLER | dict(heads=2), "decoder": SMALLER}
TINY = dataclasses.replace(bert.SMALL, **CHANGES["bert"])
TINY_DECODER = dataclasses.replace(decoder.SMALL, **CHANGES["decoder"])
# Runs an example as its user does, but with a small network that compiles fast.
RUN = """
import dataclasses, runpy, sys
from jax_fastops.models import {model}
{model}.SMALL = dataclasses.replace({model}.SMALL, {changes})
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""
FEW = ("--batch=8", "--length=16", "--dtype=float32")


@contextlib.contextmanager
def scripts(folder: str):
    """Makes the modules of a folder importable by name, and unloads them at the end."""
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(CHECKOUT / folder))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent in (CHECKOUT / "demo", CHECKOUT / "examples"):
                del sys.modules[name]


@functools.cache
def loaded(folder: str, *names: str):
    with scripts(folder):
        return tuple(importlib.import_module(name) for name in names)


def modules():
    """``training.py`` and both examples, by their models' names."""
    shared, first, second = loaded("examples", "training", "bert_train", "decoder_train")
    return shared, {"bert": first, "decoder": second}


@pytest.fixture
def shared(monkeypatch):
    """``training.py``. The networks of the examples compile fast."""
    shared, scripts = modules()
    monkeypatch.setitem(scripts["bert"].CONFIGS, "small", TINY)
    monkeypatch.setitem(scripts["decoder"].CONFIGS, "small", TINY_DECODER)
    return shared


@functools.cache
def compiled(model: str, *options: str):
    """A training, compiled once for all tests."""
    shared, scripts = modules()
    example = scripts[model].EXAMPLE
    with fo.use_implementation("native"):
        parsed = shared.parse(example, FEW + options)
        made = shared.Training(example, parsed, shared.data_mesh(parsed.stages))
        assert made.update
    return made


@pytest.fixture
def parse(shared):
    return functools.partial(shared.parse, modules()[1]["bert"].EXAMPLE)


# ---- after a kill --------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Starts an example as a user does, on CPU devices, and ends it after the test."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # All runs have the same program: the first one compiles it.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    count = re.compile(rf"(?<={DEVICE_COUNT}=)\d+")
    started = []

    def run(folder: Path, *options: str, model: str = "bert", devices: int = 4) -> subprocess.Popen:
        folder_of_examples = str(CHECKOUT / "examples")
        script = f"{folder_of_examples}/{model}_train.py"
        changes = ", ".join(f"{name}={value}" for name, value in CHANGES[model].items())
        code = RUN.format(model=model, changes=changes, folder=folder_of_examples, script=script)
        command = [sys.executable, "-c", code, "--checkpoint", str(folder), "--every=10"]
        process = subprocess.Popen(
            [*command, *FEW, *options],
            env=environment | {"XLA_FLAGS": count.sub(str(devices), os.environ["XLA_FLAGS"])},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def together(count: int) -> list[tuple[str, ...]]:
    """The options of processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--coordinator=127.0.0.1:{port}", f"--processes={count}"
    return [(*options, f"--process={k}") for k in range(count)]


def finished(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def logged(folder: Path) -> list[str]:
    """The complete lines of the log."""
    path = folder / "losses.csv"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def losses(folder: Path) -> list[float]:
    steps, values = zip(*(line.split(",") for line in logged(folder)), strict=True)
    assert [int(step) for step in steps] == list(range(1, len(steps) + 1))
    return [float(value) for value in values]


def last_checkpoint(folder: Path) -> int:
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def kill(process: subprocess.Popen, folder: Path, beyond: int) -> None:
    """Sends SIGKILL after a new checkpoint and three more logged steps.

    A loss is logged while the next step is already running.
    """
    deadline = time.monotonic() + 300
    while last_checkpoint(folder) <= beyond or len(logged(folder)) < last_checkpoint(folder) + 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_resumed(start, tmp_path, kills):
    """The losses of a killed run are bitwise equal to those of an uninterrupted run."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for _ in range(kills):
        kill(start(killed, "--steps=1000000"), killed, last_checkpoint(killed))
    before, step = logged(killed), last_checkpoint(killed)
    assert 0 < step < len(before)
    steps = len(before) + 10
    resumed, other = (start(folder, f"--steps={steps}") for folder in (killed, whole))
    assert f"Going on from step {step}." in finished(resumed)
    assert "Going on" not in finished(other)
    wanted = logged(whole)
    assert [line.split(",")[0] for line in wanted] == [str(k + 1) for k in range(steps)]
    assert logged(killed) == wanted
    assert before == wanted[: len(before)]
    values = [float(line.split(",")[1]) for line in wanted]
    assert len(set(values)) == steps and values[-1] < values[0] - 0.1
    assert (killed / "loss.png").stat().st_size > 0
    assert last_checkpoint(killed) == steps
    assert not [p.name for p in killed.iterdir() if "tmp" in p.name]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--zero"]], ids=["whole", "zero"])
def test_resumed_on_fewer_devices(start, tmp_path, options):
    """Batches and dropout are the same, and losses agree within rounding."""
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    finished(start(moved, "--steps=10", *options))
    resumed = finished(start(moved, "--steps=16", *options, devices=2))
    assert "Going on from step 10." in resumed
    finished(start(whole, "--steps=16"))
    found, wanted = losses(moved), losses(whole)
    assert len(found) == len(wanted) == 16 and found[:10] == wanted[:10]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


# ---- several processes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, killed, resumed, options",
    [
        ("decoder", 1, 1, ["--stages=2"]),
        pytest.param("decoder", 1, 1, ["--zero"], marks=pytest.mark.slow),
        pytest.param("bert", 1, 1, [], marks=pytest.mark.slow),
        pytest.param("decoder", 0, 4, [], marks=pytest.mark.slow),
        pytest.param("bert", 0, 4, ["--zero"], marks=pytest.mark.slow),
    ],
)
def test_processes(start, tmp_path, model, killed, resumed, options):
    """Two processes, one of which is killed, and then another number of processes, have the losses
    of one process that is not killed."""
    several, one = tmp_path / "several", tmp_path / "one"

    def run(count, folder, steps):
        more = options if folder == several else []
        start_one = functools.partial(start, folder, f"--steps={steps}", *more, model=model)
        if count == 1:
            return [start_one(devices=2)]
        return [start_one(*options, devices=1) for options in together(count)]

    pair = run(2, several, 1000000)
    kill(pair[killed], several, 0)
    other = pair[1 - killed]
    output, _ = other.communicate(timeout=150)  # jax misses a heartbeat after 100 seconds
    assert other.returncode not in (0, None)
    # If process 0 is killed, jax may be the first to notice it.
    assert "Start all processes again" in output or killed == 0
    before, step = losses(several), last_checkpoint(several)
    assert 0 < step <= len(before)

    steps = len(before) + 5
    first, *others = [finished(process) for process in run(resumed, several, steps)]
    assert f"Going on from step {step}." in first
    assert (", sample " in first) == (model == "decoder" and options != ["--stages=2"])
    assert not any("step" in output for output in others)  # only process 0 reports
    output = finished(*run(1, one, steps))
    assert (model == "decoder") == (f"step {steps}: " in output and ", sample " in output)
    found, wanted = losses(several), losses(one)
    np.testing.assert_allclose(before, wanted[: len(before)], rtol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert last_checkpoint(several) == len(found) == steps
    assert (several / "loss.png").stat().st_size > 0


@pytest.mark.slow
def test_processes_with_different_options(start, tmp_path):
    """Processes that would wait for each other end with a message."""
    started = [
        start(tmp_path / "run", *options, f"--steps={k + 1}", devices=1)
        for k, options in enumerate(together(2))
    ]
    for process in started:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 2 and "the processes have different options" in output


# ---- the step ------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize(
    "model, attention",
    [
        ("bert", "softmax"),
        pytest.param("bert", "xla", marks=pytest.mark.slow),
        ("decoder", "softmax"),
    ],
)
def test_collectives(shared, model, attention):
    """The only communication is the sum of gradients and of the loss, and that of embedded rows."""
    count = device_count()
    if count < 2 or count != jax.device_count():
        pytest.skip("needs two devices or more, a power of two")
    made = compiled(model, f"--attention={attention}")
    counts = collectives(made.update.as_text())
    leaves = len(jax.tree.leaves(made.abstract["params"]))
    # The gradient of each parameter, the loss, and the number of its tokens.
    assert 0 < counts.pop("all-reduce") <= leaves + 2
    assert counts.pop("all-gather") == 2  # the cotangents of the rows, and their words
    assert not counts
    batch = made.batch(0)
    shards = [a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(batch)]
    assert set(shards) == {(8 // count, 16)}
    state, _ = made.update(made.init(), batch)
    assert all(a.sharding.is_fully_replicated for a in jax.tree.leaves(state))
    assert int(state["step"]) == 1


@pytest.mark.jax
def test_zero(shared, tmp_path):
    """Each parameter is gathered once, and gradients are summed; any devices load the state."""
    count = device_count()
    if count < 4 or count != jax.device_count():
        pytest.skip("needs four devices or more, a power of two")
    made, plain = compiled("decoder", "--zero"), compiled("decoder", "--attention=softmax")
    counts = collectives(made.update.as_text())
    leaves = len(jax.tree.leaves(made.abstract["params"]))
    # XLA also gathers tokens and their gradients, for the parts of the table of embeddings.
    assert leaves <= counts.pop("all-gather") <= leaves + 2
    # The gradients, their norm, the loss, and the number of its tokens. XLA for GPUs sums into
    # parts, XLA for CPUs sums and takes a part.
    assert 0 < counts.pop("all-reduce", 0) + counts.pop("reduce-scatter", 0) <= 2 * leaves + 2
    assert not counts

    state, batch = made.init(), made.batch(0)
    own = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(state))
    assert own < 1.1 * sum(a.nbytes for a in jax.tree.leaves(state)) / count
    (state, loss), (other, wanted) = made.update(state, batch), plain.update(plain.init(), batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    # After one step of AdamW, parameters differ where rounding decides a gradient's sign.
    assert_close_in_norm(jax.device_get(state), jax.device_get(other), 1e-3)

    options = shared.parse(
        modules()[1]["decoder"].EXAMPLE, [*FEW, "--zero", f"--checkpoint={tmp_path}"]
    )
    with shared.loop.Checkpoints(options) as checkpoints:
        checkpoints.restore(made.abstract)
        checkpoints.add(1, float(loss))
        checkpoints.save(1, state)
    few = make_mesh(dict(data=2), AxisType.Auto)
    fewer = shared.Training(modules()[1]["decoder"].EXAMPLE, options, few).abstract
    with shared.loop.Checkpoints(options) as checkpoints:
        found, _ = checkpoints.restore(fewer)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state))
    assert jax.tree.map(lambda a: a.sharding, found) == jax.tree.map(lambda a: a.sharding, fewer)


@pytest.mark.jax
def test_step_is_all_there_is(shared):
    """Batches and dropout depend only on the step: they differ between steps, and repeat."""
    made = compiled("bert", "--attention=softmax")
    first, again, other = (made.batch(k) for k in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(np.asarray(first.targets) != np.asarray(other.targets))

    def loss_at(step):
        state = made.init()
        state["step"] = jax.device_put(np.int32(step), made.everywhere)
        return float(made.update(state, first)[1])

    assert loss_at(3) == loss_at(3) != loss_at(4)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps=0"], "argument --steps: 0 is not 1 or more"),
        (["--batch=many"], "argument --batch: invalid positive value: 'many'"),
        (["--config=huge"], "argument --config: invalid choice: 'huge'"),
        (["--dtype=float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--attention=flash"], "argument --attention: invalid choice: 'flash'"),
        (["--ops=torch"], "argument --ops: invalid choice: 'torch'"),
        (["--dropout=1"], "argument --dropout: 1.0 is not from 0 to below 1"),
        (["--rate=nan"], "argument --rate: nan is not above 0"),
        (["--seed=-1"], "--seed is -1; it must be 0 or more"),
        (["--length=129"], "--length is 129; with --config small it may be 128 at most"),
        (["--attention=cudnn", "--dtype=float32"], "--attention cudnn needs a GPU and --dtype bf"),
        (["--text=nowhere"], "--text: "),
        (["--text=empty"], "--text: empty has no file that ends in .md, .rst, .txt"),
        (["--text=blank.txt"], "--text: blank.txt has no text in it"),
        (["--checkpoint=blank.txt"], "blank.txt is not a folder"),
        (["--processes=2"], "--coordinator, --processes and --process need each other"),
        (["--micro-batches=2"], "--micro-batches needs --stages"),
        (["--stages=3"], "--stages is 3; it must divide "),
        (["--stages=1", "--micro-batches=3"], "--batch is 8; it must be a multiple of "),
        (
            ["--coordinator=here:1", "--processes=2", "--process=2"],
            "--process is 2; it must be from 0 to 1",
        ),
    ],
)
def test_bad_options(parse, options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(SystemExit) as found:
        parse(["--batch=8", *options])
    assert found.value.code == 2
    error = capsys.readouterr().err
    assert message.replace("bf", "bfloat16") in error and "Traceback" not in error


def test_batch_that_does_not_divide(parse, capsys):
    count = jax.device_count()
    if count < 2:
        pytest.skip("needs two devices")
    with pytest.raises(SystemExit):
        parse([f"--batch={count + 1}"])
    assert f"--batch is {count + 1}; it must be a multiple of {count}" in capsys.readouterr().err


def test_other_options_than_the_checkpoint(shared, capsys, tmp_path, monkeypatch):
    """A run cannot resume with other values of the options that its losses depend on."""
    made = compiled("bert", "--attention=softmax")

    def with_options(example, options, mesh):
        made.options = options
        return made

    main = functools.partial(shared.main, modules()[1]["bert"].EXAMPLE)
    monkeypatch.setattr(shared, "Training", with_options)
    monkeypatch.setattr(made, "options", made.options)
    folder, text = tmp_path / "run", tmp_path / "text.md"
    text.write_text("Now is the winter of our discontent. " * 9)
    given = [*FEW, "--steps=2", f"--checkpoint={folder}"]
    assert main(given) == 0
    done = logged(folder)
    assert len(done) == 2
    for option, message in (
        ("--batch=16", "--batch is 16; the checkpoints in"),
        ("--warm-up=7", "--warm-up is 7; the checkpoints in"),
        ("--seed=1", "--seed is 1; the checkpoints in"),
        ("--attention=xla", "--attention is xla; the checkpoints in"),
        (f"--text={text}", "--text: the checkpoints in"),
    ):
        with pytest.raises(SystemExit) as found:
            main([*given, option])
        assert found.value.code == 2
        assert message in capsys.readouterr().err
    assert logged(folder) == done
    assert main(given) == 0  # all steps are done
    assert logged(folder) == done
    (folder / "losses.csv").write_text(done[0] + "\n")
    with pytest.raises(SystemExit):
        main(given)
    assert "losses.csv has no line for step 2" in capsys.readouterr().err
    (folder / "2" / "state" / "_METADATA").write_text("")
    with pytest.raises(SystemExit):
        main(given)
    assert f"--checkpoint: {folder / '2'} is damaged (" in capsys.readouterr().err


# ---- text ----------------------------------------------------------------------------------------


def test_documents(tmp_path):
    (masked_text,) = loaded("examples", "masked_text")
    texts = masked_text.documents()
    assert len(texts) > 5 and sum(map(len, texts)) > 30_000
    (tmp_path / "below").mkdir()
    (tmp_path / "b.txt").write_bytes(b"one \xff two")
    (tmp_path / "below" / "a.md").write_text("dr\u00e5be")
    (tmp_path / "c.py").write_text("no text")
    first, second = masked_text.documents(tmp_path)
    assert first.tobytes().decode() == "one \ufffd two"
    assert second.tobytes().decode() == "dr\u00e5be"
    np.testing.assert_array_equal(masked_text.documents(tmp_path / "b.txt")[0], first)


def test_batch():
    (masked_text,) = loaded("examples", "masked_text")
    texts = [np.full(2000, 65, np.uint8), np.arange(97, 120, dtype=np.uint8)]
    made, again = (
        masked_text.batch(texts, 512, 32, np.random.default_rng(seed)) for seed in (1, 1)
    )
    for a, b in zip(made, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert made.chosen.mean() == pytest.approx(0.15, abs=0.01)
    np.testing.assert_array_equal(made.tokens[~made.chosen], made.targets[~made.chosen])
    assert np.mean(made.tokens[made.chosen] == masked_text.MASK) == pytest.approx(0.8, abs=0.03)


def test_packed():
    """Short texts fill rows, each in a segment of its own; long ones need no segments."""
    (masked_text,) = loaded("examples", "masked_text")
    texts = [np.full(2000, 65, np.uint8), *(np.full(n, 66 + n, np.uint8) for n in (5, 9, 20))]
    rows = masked_text.packed(texts, 300, 32, np.random.default_rng(1))
    assert rows.tokens.shape == (300, 32) and np.all(rows.segment_ids > 0)
    starts = np.diff(rows.segment_ids, axis=1) != 0
    assert np.any(starts) and not np.any((np.diff(rows.tokens, axis=1) != 0) & ~starts)
    whole = masked_text.packed(texts[:1], 4, 32, np.random.default_rng(1))
    assert whole.segment_ids is None and np.all(whole.tokens == 65)


def test_loss():
    """The mean of the losses of the chosen tokens."""
    (masked_text,) = loaded("examples", "masked_text")
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], [[1, 2, 3], [5, 5, 5]]]))
    targets = np.array([[1, 1], [2, 0]])
    wanted = -np.log([0.25, 0.5]).mean()
    found = masked_text.loss(logits, targets, np.array([[True, False], [True, False]]))
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    assert float(masked_text.loss(logits, targets, np.zeros((2, 2), bool))) == 0


# ---- the demo ------------------------------------------------------------------------------------


def test_demo(native, monkeypatch):
    """The loss falls as in plain JAX, and FASTOPS keeps fewer bytes."""
    demo, data = loaded("demo", "bert", "data")
    monkeypatch.setattr(
        demo,
        "CONFIG",
        dataclasses.replace(demo.CONFIG, layers=1, hidden_size=32, heads=2, intermediate_size=64),
    )
    text = data.text()
    trainings = []
    for ops in (bert.FASTOPS, bert.PLAIN):
        with fo.use_implementation("native"):
            training = demo.Training("", demo.model(ops), text, seed=0)
        for rate, batch in zip(demo.rates(1e-2, 30), text.batches(2, 0), strict=False):
            training.step(rate, *batch)
        trainings.append(training)
    ours, theirs = trainings
    assert ours.losses[0] > 5 and ours.losses[-1] < 3.6
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0, atol=1e-3)
    assert ours.accuracy(text.test_x, text.test_y) > 0.1
    assert not theirs.kernels and ours.kernels["softmax"] == TINY.layers
    x, labels = text.first
    for kept in (
        lambda t: t.model.kept(t.params, t.statistics, x),
        lambda t: demo.kept_by_training(t, x, labels),
    ):
        assert 0 < kept(ours) < kept(theirs)
