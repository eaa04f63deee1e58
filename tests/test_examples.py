"""The examples that read folders: BERT is fine-tuned, a decoder continues texts, a ResNet and a
diffusion model train on images. And what the loop does when it is stopped, or cannot write."""

import dataclasses
import errno
import importlib
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops.models import (
    bert,
    bert_checkpoint,
    decoder,
    decoder_checkpoint,
    resnet_checkpoint,
)

for needed in ("matplotlib", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(needed)
# Not imported, which takes seconds, also in a test process that runs no test of this file.
for needed in ("grain", "PIL", "tokenizers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WORDS = "the film was a very good bad long short one and i did not like it".split()
SMALLER = dict(vocab_size=64, hidden_size=32, intermediate_size=64, layers=1)


@pytest.fixture
def example(monkeypatch):
    """Imports an example, and unloads the examples at the end."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if EXAMPLES in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def bert_folder(tmp_path):
    folder = tmp_path / "bert"
    config = dataclasses.replace(bert.SMALL, **SMALLER, heads=2, dtype="float32")
    bert_checkpoint.save(folder, config, bert.init(jax.random.key(0), config, mlm=True))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Texts that say whether something is good."""
    rng, lines = np.random.default_rng(0), []
    for label, word in ("yes", "good"), ("no", "bad"):
        for _ in range(60):
            words = [w for w in rng.choice(WORDS, 5) if w not in ("good", "bad")]
            lines.append(f"{label}\t{' '.join([*words, word])}")
    path = tmp_path / "texts.tsv"
    path.write_text("\n".join(lines))
    return path


def test_fine_tuning(example, bert_folder, texts, tmp_path, capsys):
    """It learns, resumes with the same losses, and saves what transformers needs."""
    main = example("finetune_bert").main
    given = [str(bert_folder), f"--train={texts}", "--rate=1e-2", "--batch=16", "--length=16"]
    given += ["--every=20", "--steps=40"]
    checkpoint, out = tmp_path / "run", tmp_path / "[a]out"
    assert main([*given, f"--checkpoint={checkpoint}", f"--out={out}"]) == 0
    output = capsys.readouterr().out
    assert "step 40: accuracy 1.0000" in output and "texts/s" in output
    full = re.search(r"(\d+) rows of 16 tokens; (.*)% is not padding", output)
    assert int(full[1]) < 108 / 2 and float(full[2]) > 80
    assert "step 40/40, loss 0." in output and "00:00:00 left" in output
    assert f"The model is in {out}." in output  # brackets in it are no markup

    _, params = bert_checkpoint.load(out, dtype="float32")
    assert params["classifier"]["bias"].shape == (2,) and "mlm" not in params
    assert '"no"' in (out / "config.json").read_text() and (out / "tokenizer.json").exists()

    # A step back: the last 20 steps have the same losses again.
    losses = (checkpoint / "losses.csv").read_text()
    (checkpoint / "40").rename(tmp_path / "40")
    file = next((checkpoint / "20" / "made_with").glob("*"))
    older = file.read_text().replace('"accumulate": 1, ', "")
    assert "accumulate" not in older
    file.write_text(older)
    assert main([*given, f"--checkpoint={checkpoint}"]) == 0
    assert "Going on from step 20." in capsys.readouterr().out
    assert (checkpoint / "losses.csv").read_text() == losses

    # Other options than those of the checkpoint.
    other, moved = tmp_path / "other.tsv", tmp_path / "moved"
    other.write_text(texts.read_text().replace("good", "fine"))
    shutil.copytree(bert_folder, moved)
    for option, message in (
        ("--steps=60", "--steps is 60; the checkpoints in"),
        (f"--train={other}", "--train: the checkpoints in"),
        (str(moved), f"FOLDER is {moved}; the checkpoints in"),
    ):
        changed = [option, *given[1:]] if option == str(moved) else [*given, option]
        with pytest.raises(SystemExit):
            main([*changed, f"--checkpoint={checkpoint}"])
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1

    # Damage that the files' format does not notice.
    loop = example("loop")
    state = {"a": np.arange(8, dtype=np.float32)}
    moved = {"a": state["a"][[1, 0, 2, 3, 4, 5, 6, 7]]}
    assert int(loop.checksum(state)) != int(loop.checksum(moved))
    file = next((checkpoint / "40" / "made_with").glob("*"))
    text = file.read_text()
    number = text[text.index('"checksum": ') + 12 :].partition("}")[0].partition(",")[0]
    file.write_text(text.replace(number, "7"))
    with pytest.raises(SystemExit) as stopped:
        main([*given, f"--checkpoint={checkpoint}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert f"{checkpoint / '40'} is damaged (its checksum differs)" in error


def test_accumulation(example, bert_folder, texts):
    """Parameters change in every second step."""
    module = example("finetune_bert")
    given = [str(bert_folder), f"--train={texts}", "--steps=8", "--accumulate=2", "--rate=1e-2"]
    job = module.FineTuning(module.parse(given))
    assert job.unknown() == 0
    job.tokenizer.model.unk_token = "good"  # one word of each second text
    assert 0.05 < job.unknown() < 0.15
    state = job.init()
    kernels = [np.array(state["params"]["classifier"]["kernel"])]
    for step in range(4):
        state, _ = job.update(state, job.batch(step))
        kernels.append(np.array(state["params"]["classifier"]["kernel"]))
    changed = [bool((a != b).any()) for a, b in itertools.pairwise(kernels)]
    assert changed == [False, False, False, True]  # the rate of the first update is 0
    for count in (3, 8):
        with pytest.raises(SystemExit):
            module.parse([*given, f"--accumulate={count}"])


@pytest.mark.parametrize(
    "line, message",
    [
        ("no tab", "texts.tsv:1 has no tab between"),
        ("\n\n", "texts.tsv has no texts"),
        ("\ud800", "texts.tsv is not in UTF-8"),
        ("a text\tgood\nother\tbad", "the label 'a text' is in the test, and not in the training"),
    ],
)
def test_texts_that_cannot_be_read(example, bert_folder, texts, capsys, line, message):
    texts.write_text(line, errors="surrogatepass")
    with pytest.raises(SystemExit) as stopped:
        example("finetune_bert").main([str(bert_folder), f"--train={texts}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1


def test_generation(example, tmp_path, capsys):
    """Prompts of several lengths, each as by itself."""
    config = dataclasses.replace(decoder.SMALL, **SMALLER, dtype="float32")
    folder = tmp_path / "llama"
    decoder_checkpoint.save(folder, config, decoder.init(jax.random.key(0), config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [62, 63]}')
    write_tokenizer(folder)
    main = example("generate").main
    prompts = ["the film was good", "one"]
    assert main([str(folder), *prompts, "--length=6"]) == 0
    together = capsys.readouterr()
    assert "tokens/s" in together.err
    first, second = together.out.splitlines()
    assert first.startswith(prompts[0]) and second.startswith(prompts[1])
    assert main([str(folder), prompts[1], "--length=6"]) == 0
    assert capsys.readouterr().out.splitlines() == [second]
    sampled = ["--temperature=1", "--top-k=5", "--top-p=0.9"]
    assert main([str(folder), prompts[1], "--length=6", *sampled]) == 0
    with pytest.raises(SystemExit):
        main([str(tmp_path), "text"])
    error = capsys.readouterr().err  # also the two lines of the last run
    assert error.count("\n") == 3 and "has no config.json; it must be a folder" in error
    with pytest.raises(SystemExit):
        main([str(folder), "one", ""])
    assert capsys.readouterr().err.endswith("a text is empty, and the tokenizer adds no token\n")
    with pytest.raises(SystemExit):
        main([str(folder), "text", "--temperature=-1"])
    assert "--temperature is -1.0; it must be 0 or more" in capsys.readouterr().err


def test_generation_keeps_the_space(example, tmp_path, capsys, monkeypatch):
    """Also with a tokenizer like SentencePiece's, whose decoder removes that of the first token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<unk>", "!", *(f"\N{LOWER ONE EIGHTH BLOCK}{word}" for word in WORDS)]
    numbers = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(numbers, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    config = dataclasses.replace(decoder.SMALL, **SMALLER, dtype="float32")
    decoder_checkpoint.save(tmp_path, config, decoder.init(jax.random.key(0), config))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    module = example("generate")

    def generate(params, tokens, config, *, length, mask, end, top_k=None):
        new = [[*tokenizer.encode("very good").ids, 0], [numbers["!"], 0, 0]]
        return jnp.array(new), jnp.array([2, 1])

    monkeypatch.setattr(module.decoder, "generate", generate)
    assert module.main([str(tmp_path), "the film was", "one"]) == 0
    assert capsys.readouterr().out == "the film was very good\none!\n"


@pytest.fixture
def images(tmp_path):
    """Folders of images that are dark or bright."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in ("train", 40), ("test", 10):
        for label, low in ("bright", 150), ("dark", 0):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = rng.integers(low, low + 100, (12, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{k}.png")
    return [f"--train={tmp_path / 'train'}", f"--test={tmp_path / 'test'}"]


def test_images(example, images, tmp_path, capsys, monkeypatch):
    """It learns, and resumes with the same losses."""
    module = example("train_images")
    monkeypatch.setitem(
        module.CONFIGS, "small", dataclasses.replace(module.CONFIGS["small"], stages=(1,), width=8)
    )
    checkpoint = tmp_path / "run"
    given = [*images, "--config=small", "--batch=16", "--size=8", "--every=15", "--steps=30"]
    given += ["--dtype=float32", f"--checkpoint={checkpoint}", f"--plot={tmp_path / 'loss.png'}"]
    given += [f"--out={tmp_path / 'out'}"]
    assert module.main(given) == 0
    output = capsys.readouterr().out
    assert "step 30: accuracy 1.0000" in output and "images/s" in output
    losses = (checkpoint / "losses.csv").read_text()
    (checkpoint / "30").rename(tmp_path / "30")
    assert module.main(given) == 0
    assert "Going on from step 15." in capsys.readouterr().out
    assert (checkpoint / "losses.csv").read_text() == losses
    assert (tmp_path / "loss.png").stat().st_size > 0
    config, _, _ = resnet_checkpoint.load(tmp_path / "out", dtype="float32")
    assert config.classes == 2 and config.stages == (1,)


def test_diffusion(example, tmp_path, capsys, monkeypatch):
    """Group norms are replaced; it learns, draws samples, and resumes with the same losses."""
    pytest.importorskip("flax")
    module = example("train_diffusion")
    monkeypatch.setitem(module.CONFIGS, "small", (8, 4))
    checkpoint = tmp_path / "run"
    given = ["--config=small", "--batch=16", "--every=10", "--steps=20", "--rate=0.01"]
    given += ["--dtype=float32", f"--checkpoint={checkpoint}"]
    with fo.use_implementation("native"):
        assert module.main(given) == 0
        output = capsys.readouterr().out
        assert "12 x group_norm + silu" in output and "images/s" in output
        found = re.findall(r"step (\d+): loss of held-out images (.*)", output)
        assert [step for step, _ in found] == ["10", "20"]
        assert float(found[1][1]) < float(found[0][1]) < 1.1
        samples = (checkpoint / "samples.png").read_bytes()
        losses = (checkpoint / "losses.csv").read_text()
        (checkpoint / "20").rename(tmp_path / "20")
        assert module.main(given) == 0
    assert "Going on from step 10." in capsys.readouterr().out
    assert (checkpoint / "losses.csv").read_text() == losses
    assert (checkpoint / "samples.png").read_bytes() == samples
    assert (checkpoint / "loss.png").stat().st_size > 0


def test_an_image_that_cannot_be_read_is_one_line(example, images, tmp_path, capsys):
    (tmp_path / "train" / "dark" / "3.png").write_text("no image")
    for name, options in ("train_images", [*images, "--size=8"]), ("train_diffusion", images[:1]):
        with pytest.raises(SystemExit) as stopped:
            example(name).main([*options, "--config=small", "--batch=80"])
        output = capsys.readouterr()
        assert stopped.value.code == 2 and output.err.count("\n") == 1
        assert f"{tmp_path / 'train' / 'dark' / '3.png'} cannot be read: " in output.err
        if name == "train_images":
            assert "Nothing is kept: no --out, no --checkpoint." in output.out


def test_few_batches_are_read_ahead(example, images, monkeypatch):
    """A batch may have 80 MB."""
    module, read = example("train_images"), []
    row = np.zeros((8, 8, 3), np.float32), np.int32(0)
    monkeypatch.setattr(module, "read", lambda *args: read.append(1) or row)
    job = module.Images(module.parse([*images, "--batch=2", "--steps=1000"]))
    job.batch(0)
    time.sleep(1.0)
    assert 2 <= len(read) <= 2 * 20


@pytest.mark.parametrize("free, wrong", [(10, None), (10**12, OSError(errno.ENOSPC, "No space"))])
def test_a_full_disk_is_one_line(
    example, bert_folder, texts, tmp_path, capsys, monkeypatch, free, wrong
):
    """Also if the disk is full only when the files are written."""
    loop = example("loop")
    module = example("finetune_bert")

    class Ended(Exception):
        pass

    def end():
        raise Ended

    def save(*args, **kwargs):
        raise wrong

    monkeypatch.setattr(loop, "end_at_once", end)
    usage = loop.shutil._ntuple_diskusage(10**12, 0, free)
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda folder: usage)
    if wrong is not None:
        monkeypatch.setattr(loop.ocp.CheckpointManager, "save", save)
    given = [str(bert_folder), f"--train={texts}", "--batch=16", "--length=8", "--steps=4"]
    with pytest.raises(Ended):
        module.main([*given, "--every=2", f"--checkpoint={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be written" in error
    assert ("MB are free" if wrong is None else "No space") in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_that_fills_the_disk_is_one_line(
    example, bert_folder, texts, tmp_path, capsys, monkeypatch
):
    """It fails in writing, and once more in closing."""
    loop = example("loop")
    module = example("finetune_bert")
    closed = []

    class Ended(Exception):
        pass

    def end():
        raise Ended

    def read_log(checkpoints, steps):
        checkpoints.log = open("/dev/full", "a")
        return []

    close = loop.ocp.CheckpointManager.close
    monkeypatch.setattr(
        loop.ocp.CheckpointManager, "close", lambda self: (close(self), closed.append(1))
    )
    monkeypatch.setattr(loop, "end_at_once", end)
    monkeypatch.setattr(loop.Checkpoints, "read_log", read_log)
    given = [str(bert_folder), f"--train={texts}", "--batch=16", "--length=8", "--steps=4"]
    with pytest.raises(Ended):
        module.main([*given, f"--checkpoint={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be written" in error and "No space" in error
    assert closed

    # The model at the end.
    def save(out):
        raise OSError(errno.ENOSPC, "No space")

    job = types.SimpleNamespace(options=types.SimpleNamespace(out=tmp_path))
    with pytest.raises(SystemExit, match=f"The model cannot be written to {tmp_path}: .*No space"):
        loop.finish(job, None, [], save)

    # A folder that cannot be made.
    with pytest.raises(Ended):
        module.main([*given, f"--checkpoint={texts / 'run'}"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be written" in error

    (tmp_path / "full.png").symlink_to("/dev/full")
    for path in tmp_path / "full.png", texts / "loss.png", tmp_path / "loss.unknown":
        with pytest.raises(SystemExit, match=f"The picture cannot be written to {path}: ") as ended:
            loop.plot([1.0, 0.5], "loss", path)
        assert "\n" not in str(ended.value)


def test_ctrl_c_keeps_the_training(bert_folder, texts, tmp_path):
    """It writes a checkpoint and says how to go on; that command goes on."""
    checkpoint = tmp_path / "[a]run"  # brackets are no markup
    command = [sys.executable, str(EXAMPLES / "finetune_bert.py"), str(bert_folder)]
    command += [f"--train={texts}", "--batch=16", "--length=8", f"--checkpoint={checkpoint}"]
    command += ["--every=1000000", "--steps=2000000"]
    process = subprocess.Popen(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    timer = threading.Timer(300, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, lines
    finally:
        timer.cancel()
        process.kill()
    assert lines[-1].startswith("Stopped after step "), lines
    assert f"--checkpoint={checkpoint}" in lines[-1] and "Traceback" not in "".join(lines)
    step = int(lines[-1].split()[3].rstrip("."))
    assert (checkpoint / str(step)).is_dir()
    assert len((checkpoint / "losses.csv").read_text().splitlines()) == step
