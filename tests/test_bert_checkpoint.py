"""BERT equals that of transformers, as recorded by record_bert.py; checkpoint files."""

import dataclasses
import functools
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import x64
from harness.numerics import assert_close_in_norm, norm_errors
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fastops as fo
from jax_fastops._activations import ACTIVATIONS
from jax_fastops.models import bert

safetensors = pytest.importorskip("safetensors.numpy")

from harness.recordings import Recordings, content  # noqa: E402

from jax_fastops.models import bert_checkpoint  # noqa: E402
from jax_fastops.models._bert_types import TYPES  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
RECORDED = Recordings("bert", bert_checkpoint.load, usual="pretraining")
DATA, RECORDINGS = RECORDED.folder, RECORDED.names
TYPE = TYPES["bert"]
TOLERANCE = 1e-4
# Recordings are in float32.
assert_close = functools.partial(assert_close_in_norm, dtypes=False)
HEADS = {  # recordings of fine-tuned models
    "sequences": ("BertForSequenceClassification", {"labels": 3}),
    "tokens": ("BertForTokenClassification", {"labels": 5}),
    "answers": ("BertForQuestionAnswering", {"qa": True}),
}
OPS = {"ours": bert.FASTOPS, "plain": bert.PLAIN}


def outputs(params, inputs, config, ops) -> dict[str, jax.Array]:
    names = {"attention_mask": "mask", "token_type_ids": "token_types", "position_ids": "positions"}
    given = {names[key]: value for key, value in inputs.items() if key in names}
    hidden, pooled = bert.apply(params, inputs["input_ids"], config, **given, ops=ops)
    if "classifier" in params:
        states = hidden if pooled is None else pooled
        return {"hidden": hidden, "logits": product(params["classifier"], states)}
    if "qa" in params:
        start, end = jnp.moveaxis(product(params["qa"], hidden), -1, 0)
        return {"hidden": hidden, "start_logits": start, "end_logits": end}
    found = {"hidden": hidden} if pooled is None else {"hidden": hidden, "pooled": pooled}
    if "mlm" in params:
        found["logits"] = bert.masked_lm_logits(params, hidden, config, ops=ops)
    if "nsp" in params:
        found["relationship"] = product(params["nsp"], pooled)
    return found


def product(head, x):
    return x @ head["kernel"] + head["bias"]


@functools.partial(jax.jit, static_argnames=("config", "ops"))
def with_gradients(params, inputs, weights, config, ops):
    def total(params):
        found = outputs(params, inputs, config, ops)
        return sum(jnp.vdot(found[name], w) for name, w in weights.items()), found

    return jax.grad(total, has_aux=True)(params)


# ---- recordings of transformers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, which", [*((name, "ours") for name in RECORDINGS), ("model", "plain")]
)
def test_equals_transformers(native, tmp_path, name, which):
    """Outputs, and the gradient of every parameter."""
    recorded = RECORDED.arrays(name)
    config, params = bert_checkpoint.load(DATA / name, dtype="float32")
    gradients, found = with_gradients(
        params, recorded["inputs"], recorded["weights"], config=config, ops=OPS[which]
    )
    assert_close(found, recorded["outputs"], 1e-5 if name in HEADS else TOLERANCE)
    if name == "tokens":  # has padding tokens
        word = gradients["embeddings"]["word"]
        assert np.all(word[0] != 0)
        gradients["embeddings"]["word"] = word.at[0].set(0)
    assert_close(gradients, RECORDED.gradients(name, tmp_path), TOLERANCE)


def test_gradient_of_padding(native):
    """Under a mask, the padding token has no gradient if the loss does not read its positions."""
    given = RECORDED.arrays("tokens")["inputs"]
    config, params = bert_checkpoint.load(DATA / "tokens", dtype="float32")
    tokens, mask = given["input_ids"], given["attention_mask"]
    assert np.array_equal(tokens != 0, mask) and not mask.all()

    def loss(params):
        hidden, _ = bert.apply(params, tokens, config, mask=mask)
        return jnp.sum(jnp.sin(hidden), where=mask[..., None] != 0)

    word = jax.jit(jax.grad(loss))(params)["embeddings"]["word"]
    assert np.all(word[0] == 0) and np.all(word[np.unique(tokens)[1:]] != 0)


@pytest.mark.parametrize("variant", ["attention", "remat", "scan"])
def test_variants_equal_transformers(native, tmp_path, variant):
    changes = {
        "attention": dict(attention="xla"),
        "remat": dict(remat=True),
        "scan": dict(remat=True, scan=True),
    }
    recorded = RECORDED.arrays("pretraining")
    config, params = bert_checkpoint.load(DATA / "pretraining", dtype="float32")
    config = dataclasses.replace(config, **changes[variant])
    gradients, found = with_gradients(
        params, recorded["inputs"], recorded["weights"], config=config, ops=bert.FASTOPS
    )
    assert_close(found, recorded["outputs"], TOLERANCE)
    assert_close(gradients, RECORDED.gradients("pretraining", tmp_path), TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_bfloat16(native, name):
    """The error against float32 is at most 1.5 times that of transformers in bfloat16."""
    recorded = RECORDED.arrays(name)
    config, params = bert_checkpoint.load(DATA / name)
    assert config.dtype == "bfloat16"
    found = jax.jit(outputs, static_argnums=(2, 3))(
        params, recorded["inputs"], config, bert.FASTOPS
    )
    mine, theirs = (norm_errors(x, recorded["outputs"]) for x in (found, recorded["bfloat16"]))
    for path, value in mine.items():
        assert value <= 1.5 * theirs[path], f"{path}: {value:.1e}, theirs {theirs[path]:.1e}"
        assert value < 0.05


# ---- names and files -----------------------------------------------------------------------------


def assert_same(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_config():
    config, params = bert_checkpoint.load(DATA / "pretraining", dtype="float32")
    assert config == bert.Config(
        vocab_size=43,
        hidden_size=24,
        layers=2,
        heads=3,
        intermediate_size=56,
        positions=17,
        token_types=3,
        activation="gelu",
        eps=1e-6,
        dtype="float32",
    )
    wanted = bert.shapes(config, mlm=True, nsp=True)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wanted)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def test_names(tmp_path):
    """Names without prefix, the names of TensorFlow, buffers, a decoder tied to the embeddings."""
    _, wanted = bert_checkpoint.load(DATA / "pretraining")
    tensors = RECORDED.tensors("pretraining")
    assert any(name.startswith("bert.") for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in (("LayerNorm.weight", "LayerNorm.gamma"), ("Norm.bias", "Norm.beta")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        renamed[name.removeprefix("bert.")] = tensor
    assert len(renamed) == len(tensors) and "embeddings.LayerNorm.beta" in renamed
    renamed["embeddings.position_ids"] = np.arange(17)[None]
    renamed["cls.predictions.decoder.weight"] = renamed["embeddings.word_embeddings.weight"]
    renamed["cls.predictions.decoder.bias"] = renamed["cls.predictions.bias"]
    assert_same(bert_checkpoint.load(RECORDED.written(tmp_path, renamed))[1], wanted)


def test_decoder_alone(tmp_path):
    """A file with only one of two tied tensors may have either name."""
    tensors = RECORDED.tensors("pretraining")
    for name, other in (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ):
        tensors[name] = tensors.pop(other)
    found = bert_checkpoint.load(RECORDED.written(tmp_path, tensors))[1]
    assert_same(found, bert_checkpoint.load(DATA / "pretraining")[1])


def test_heads_are_optional(tmp_path):
    tensors = RECORDED.tensors("pretraining")
    bare = {name: t for name, t in tensors.items() if not name.startswith(("cls", "bert.pooler"))}
    config, params = bert_checkpoint.load(RECORDED.written(tmp_path, bare), dtype="float32")
    assert set(params) == {"embeddings", "layers"}
    hidden, pooled = bert.apply(params, jnp.ones((1, 3), int), config)
    assert hidden.shape == (1, 3, 24) and pooled is None


@pytest.mark.parametrize("name", HEADS)
def test_heads(tmp_path, name):
    """The shapes of the parameters, and what config.json says about the saved model."""
    architecture, heads = HEADS[name]
    config, params = bert_checkpoint.load(DATA / name)
    wanted = bert.shapes(config, **heads)
    if name != "sequences":
        del wanted["pooler"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wanted)
    bert_checkpoint.save(tmp_path, config, params)
    ours, theirs = content(tmp_path), content(DATA / name)
    assert ours["architectures"] == [architecture]
    for key in ("architectures", "id2label", "label2id"):
        assert ours.get(key) == theirs.get(key)


def test_label_names(tmp_path):
    config, params = bert_checkpoint.load(DATA / "sequences")
    bert_checkpoint.save(tmp_path, config, params, label_names=("bad", "fair", "good"))
    written = content(tmp_path)
    assert written["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
    assert written["label2id"] == {"bad": 0, "fair": 1, "good": 2}


@pytest.mark.parametrize("name", ["sequences", "model"])
def test_wrong_label_names(tmp_path, name):
    config, params = bert_checkpoint.load(DATA / name)
    count = {"sequences": 3, "model": 0}[name]
    with pytest.raises(ValueError, match=f"label_names has 2 names, but params has {count} labels"):
        bert_checkpoint.save(tmp_path / "made", config, params, label_names=("no", "yes"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["pretraining", "tokens"])
def test_unknown_tensors(tmp_path, name):
    """They are returned in their dtypes by their names, and saved as they are."""
    others = {
        "bert.encoder.layer.7.output.LayerNorm.gamma": np.arange(3, dtype=np.float16),
        "classifier.0.weight": np.ones((2, 5), np.float32),
        "scorer.scale": np.array(0.5, np.float64),
    }
    tensors = RECORDED.tensors(name) | others
    shutil.copy(DATA / name / "config.json", tmp_path)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        bert_checkpoint.load(tmp_path)
    assert str(error.value) == (
        "bert: tensors not known (load(..., keep_unknown=True) returns them): classifier.0.weight, "
        "encoder.layer.7.output.LayerNorm.weight, scorer.scale"
    )
    config, params, unknown = bert_checkpoint.load(tmp_path, keep_unknown=True)
    assert_same(params, bert_checkpoint.load(DATA / name)[1])
    assert_same(unknown, others)
    assert [unknown[key].dtype for key in others] == [a.dtype for a in others.values()]
    bert_checkpoint.save(tmp_path / "made", config, params, unknown=unknown)
    assert_same(safetensors.load_file(tmp_path / "made" / "model.safetensors"), tensors)


def test_no_unknown_tensors():
    _, params, unknown = bert_checkpoint.load(DATA / "model", keep_unknown=True)
    assert unknown == {}
    assert_same(params, bert_checkpoint.load(DATA / "model")[1])


def test_missing_with_unknown_tensors(tmp_path):
    tensors = RECORDED.tensors("pretraining") | {"scorer.bias": np.zeros(2, np.float32)}
    del tensors["bert.pooler.dense.bias"]
    with pytest.raises(ValueError, match=r"^bert: tensors missing: pooler\.dense\.bias$"):
        bert_checkpoint.load(RECORDED.written(tmp_path, tensors), keep_unknown=True)


def test_unknown_tensors_that_are_known(tmp_path):
    config, params = bert_checkpoint.load(DATA / "model")
    unknown = {"bert.pooler.dense.bias": np.zeros(32), "scorer.bias": np.zeros(2)}
    with pytest.raises(ValueError, match=r"unknown has tensors of the parameters: bert\.pooler\.d"):
        bert_checkpoint.save(tmp_path / "made", config, params, unknown=unknown)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_dtypes(tmp_path, dtype):
    """Tensors of other dtypes are converted to float32."""
    tensors = {name: tensor.astype(dtype) for name, tensor in RECORDED.tensors("model").items()}
    shutil.copy(DATA / "model" / "config.json", tmp_path)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    _, params = bert_checkpoint.load(tmp_path)
    _, exact = bert_checkpoint.load(DATA / "model")
    rounded = jax.tree.map(lambda a: np.asarray(a).astype(dtype).astype(np.float32), exact)
    assert_same(params, rounded)


def test_shards(tmp_path):
    RECORDED.divided("model", tmp_path)
    assert_same(bert_checkpoint.load(tmp_path)[1], bert_checkpoint.load(DATA / "model")[1])


@pytest.mark.parametrize("name", RECORDINGS)
def test_save(tmp_path, name):
    """Saves bitwise equal tensors under the same names, from a list or a stack of layers."""
    config, params = bert_checkpoint.load(DATA / name, dtype="float32")
    for form in (params, bert.stack_layers(params)):
        bert_checkpoint.save(tmp_path / "made", config, form)
        again = bert_checkpoint.load(tmp_path / "made", dtype="float32")
        assert again[0] == config
        assert_same(again[1], params)
        assert_same(
            safetensors.load_file(tmp_path / "made" / "model.safetensors"), RECORDED.tensors(name)
        )
        assert sorted(f.name for f in (tmp_path / "made").iterdir()) == [
            "config.json",
            "model.safetensors",
        ]


@pytest.mark.parametrize("stacked", [False, True])
def test_separate_heads(native, tmp_path, stacked):
    """With separate heads, the results are the same, and so is the file."""
    config, params = bert_checkpoint.load(DATA / "model", dtype="float32")
    tokens = np.arange(12).reshape(2, 6)
    wanted = bert.apply(params, tokens, config)
    split = dataclasses.replace(config, tensor_parallel=True)
    layers = jax.tree.map(
        lambda a, like: a.reshape(like.shape), params["layers"], bert.shapes(split)["layers"]
    )
    separate = params | {"layers": layers}
    assert_close(bert.apply(separate, tokens, split), wanted, 1e-6)
    bert_checkpoint.save(tmp_path, split, bert.stack_layers(separate) if stacked else separate)
    again, found = bert_checkpoint.load(tmp_path, dtype="float32")
    assert again == config
    assert jax.tree.all(jax.tree.map(np.array_equal, found, params))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saved_config(tmp_path, activation):
    config, params = bert_checkpoint.load(DATA / "unmasked")
    config = dataclasses.replace(
        config, activation=activation, dropout=0.25, attention_dropout=0.0, init_range=0.5
    )
    bert_checkpoint.save(tmp_path, config, params)
    assert bert_checkpoint.load(tmp_path)[0] == config


@pytest.mark.parametrize("fails", ["save_file", "replace"])
def test_interrupted_save(tmp_path, monkeypatch, fails):
    """The previous files are unchanged, and there are no others."""
    shutil.copytree(DATA / "unmasked", tmp_path, dirs_exist_ok=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    config, params = bert_checkpoint.load(tmp_path)

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors if fails == "save_file" else bert_checkpoint.os, fails, fail)
    with pytest.raises(OSError, match="disk full"):
        bert_checkpoint.save(tmp_path, dataclasses.replace(config, dropout=0.5), params)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# The defaults of transformers 4.57.6 and 5.24.0 (they agree) for a config.json without these keys.
DEFAULTS = bert.Config(
    vocab_size=30522,
    hidden_size=768,
    layers=12,
    heads=12,
    intermediate_size=3072,
    positions=512,
    token_types=2,
    activation="gelu_exact",
    eps=1e-12,
    dropout=0.1,
    attention_dropout=0.1,
    init_range=0.02,
    dtype="float32",
)


def test_defaults():
    assert bert_checkpoint._config_of({"model_type": "bert"}) == DEFAULTS
    null = dict.fromkeys((*TYPE.fields.values(), *TYPE.supported, "hidden_act"))
    assert bert_checkpoint._config_of({"model_type": "bert"} | null) == DEFAULTS


def test_defaults_of_live_transformers():
    theirs = pytest.importorskip("transformers").BertConfig()
    for own, name in TYPE.fields.items():
        assert getattr(theirs, name) == getattr(DEFAULTS, own)
    for name, value in TYPE.supported.items():
        assert getattr(theirs, name, value) == value  # 5 has no position_embedding_type
    assert theirs.hidden_act == "gelu"


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("param_dtype", ["bfloat16", jnp.float16])
def test_param_dtype(tmp_path, param_dtype, stacked):
    """Each tensor is rounded once, and is saved in the dtype of its parameter."""
    config, params = bert_checkpoint.load(DATA / "pretraining", param_dtype=param_dtype)
    _, exact = bert_checkpoint.load(DATA / "pretraining")
    assert_same(params, jax.tree.map(lambda a: np.asarray(a).astype(param_dtype), exact))
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    bert_checkpoint.save(tmp_path, config, bert.stack_layers(params) if stacked else params)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {a.dtype for a in saved.values()} == {jnp.dtype(param_dtype)}
    assert_same(bert_checkpoint.load(tmp_path, param_dtype=param_dtype)[1], params)


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_partition_specs(tmp_path, kind):
    """By a function of the config. It may know more heads than the checkpoint has."""
    saved = bert.init(jax.random.key(0), bert.SMALL, mlm=True)
    bert_checkpoint.save(tmp_path, bert.SMALL, saved)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(getattr(AxisType, kind),) * 2)

    def sharding(config):
        specs = bert.partition_specs(config, mlm=True, nsp=True, qa=True, labels=2)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    config, params = bert_checkpoint.load(
        tmp_path, dtype="float32", tensor_parallel=True, sharding=sharding
    )
    shardings = sharding(config)
    for name in ("nsp", "qa", "classifier"):
        del shardings[name]
    assert jax.tree.map(lambda a: a.sharding, params) == shardings
    assert_same(params, jax.tree.map(lambda a, b: b.reshape(a.shape), params, saved))
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    with jax.set_mesh(mesh):
        split = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        found = jax.jit(bert.apply, static_argnums=2)(params, split, config)
    assert_close(found, bert.apply(saved, tokens, bert.SMALL), 1e-5)


def test_load_under_strict_settings():
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        config, params = bert_checkpoint.load(DATA / "model", param_dtype="bfloat16")
        found = jax.jit(bert.apply, static_argnums=2)(params, tokens, config)
    config, params = bert_checkpoint.load(DATA / "model", dtype="float32")
    assert_close(found, bert.apply(params, tokens, config), 0.02)


def test_no_folder():
    """A name on the Hugging Face Hub is none."""
    message = "'bert-base-uncased' is no folder; .*huggingface_hub.snapshot_download"
    with pytest.raises(FileNotFoundError, match=message):
        bert_checkpoint.load("bert-base-uncased")


# ---- a checkpoint like another -------------------------------------------------------------------


def another(folder, name: str, **changes):
    """Writes a checkpoint with other keys and files. Returns its config.json."""
    folder.mkdir()
    changes = {"pad_token_id": 5, "dtype": "bfloat16", "own": [1]} | changes
    RECORDED.written(folder, RECORDED.tensors(name), name, **changes)
    (folder / "vocab.txt").write_text("[PAD]")
    (folder / "README.md").write_text("read me")
    return content(folder)


@pytest.mark.parametrize("name", RECORDINGS)
def test_save_like(tmp_path, name):
    """The same config.json except for the dtype, new tensors, and copies of the other files."""
    before = another(tmp_path / "like", name)
    config, params = bert_checkpoint.load(tmp_path / "like")
    params = jax.tree.map(lambda a: a + 1, params)
    bert_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    assert content(tmp_path / "made") == before | {"dtype": "float32"}
    assert_same(bert_checkpoint.load(tmp_path / "made")[1], params)
    names = [file.name for file in sorted((tmp_path / "made").iterdir())]
    assert names == ["config.json", "model.safetensors", "vocab.txt"]


def test_save_like_with_changes(tmp_path):
    """The config's fields are the new ones, and the other keys are kept."""
    another(tmp_path / "like", "model", hidden_act="gelu_fast")
    config, params = bert_checkpoint.load(tmp_path / "like")
    config = dataclasses.replace(config, dropout=0.25)
    bert_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    assert bert_checkpoint.load(tmp_path / "made")[0] == config
    written = content(tmp_path / "made")
    assert written["own"] == [1] and written["pad_token_id"] == 5


@pytest.mark.parametrize(
    "count, names, wanted",
    [
        (3, None, ["bad", "fair", "good"]),  # those of the other checkpoint
        (2, None, ["LABEL_0", "LABEL_1"]),
        (3, ("a", "b", "c"), ["a", "b", "c"]),
    ],
)
def test_labels_like(tmp_path, count, names, wanted):
    labels = dict(enumerate(("bad", "fair", "good")))
    own = {name: label for label, name in labels.items()}
    another(tmp_path / "like", "sequences", id2label=labels, label2id=own)
    config, params = bert_checkpoint.load(tmp_path / "like")
    params["classifier"] = jax.tree.map(lambda a: a[..., :count], params["classifier"])
    bert_checkpoint.save(
        tmp_path / "made", config, params, label_names=names, like=tmp_path / "like"
    )
    written = content(tmp_path / "made")
    assert list(written["id2label"].values()) == wanted == list(written["label2id"])


def test_new_head_like(tmp_path):
    """The architecture is that of the parameters."""
    another(tmp_path / "like", "pretraining", tie_word_embeddings=False)
    config, params = bert_checkpoint.load(tmp_path / "like")
    del params["mlm"], params["nsp"]
    params["classifier"] = bert.init(jax.random.key(0), config, labels=2)["classifier"]
    bert_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    written = content(tmp_path / "made")
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert written["tie_word_embeddings"] is True and written["pad_token_id"] == 5


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="roformer"), "model_type in config.json is 'roformer'"),
        (
            dict(hidden_size=16, max_position_embeddings=9),
            r"like, .*, has other shapes: hidden_size is 16, .* 32; positions is 9, but in config",
        ),
    ],
)
def test_save_like_errors(tmp_path, changes, message):
    another(tmp_path / "like", "model", **changes)
    config, params = bert_checkpoint.load(DATA / "model")
    with pytest.raises(ValueError, match=message):
        bert_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    assert not (tmp_path / "made").exists()


def test_padding_of_a_new_model(tmp_path):
    """The default of transformers, 0, would be a word without a gradient."""
    bert_checkpoint.save(tmp_path, bert.SMALL, bert.init(jax.random.key(0), bert.SMALL))
    assert content(tmp_path)["pad_token_id"] is None


# ---- errors --------------------------------------------------------------------------------------


def test_wrong_tensors(tmp_path):
    """The message names all wrong tensors."""
    tensors = RECORDED.tensors("pretraining")
    del tensors["bert.encoder.layer.1.attention.self.key.bias"]
    del tensors["cls.predictions.bias"]
    tensors["bert.encoder.layer.2.output.dense.bias"] = np.zeros(24, np.float32)
    tensors["classifier.weight"] = np.zeros((2, 23), np.float32)
    tensors["scorer.weight"] = np.zeros((2, 24), np.float32)
    tensors["bert.pooler.dense.bias"] = np.zeros(23, np.float32)
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] = np.zeros((24, 56), np.float32)
    with pytest.raises(ValueError) as error:
        bert_checkpoint.load(RECORDED.written(tmp_path, tensors))
    message = str(error.value)
    assert (
        "missing: classifier.bias, cls.predictions.bias, encoder.layer.1.attention.self.key.bias; "
        "not known (load(..., keep_unknown=True) returns them): "
        "encoder.layer.2.output.dense.bias, scorer.weight; of another shape: " in message
    )
    assert "classifier.weight of (2, 23), which by config.json is (2, 24)" in message
    assert "pooler.dense.bias of (23,), which by config.json is (24,)" in message
    assert (
        "encoder.layer.0.intermediate.dense.weight of (24, 56), which by config.json is (56, 24)"
        in message
    )


def test_tensor_of_integers(tmp_path):
    tensors = RECORDED.tensors("pretraining") | {"bert.pooler.dense.bias": np.zeros(24, np.int32)}
    message = r"of no supported dtype: bert.pooler.dense.bias \(I32\); they must be of F64, F32"
    with pytest.raises(ValueError, match=message):
        bert_checkpoint.load(RECORDED.written(tmp_path, tensors))


def test_tensor_under_two_names(tmp_path):
    tensors = RECORDED.tensors("pretraining") | {"pooler.dense.bias": np.zeros(24, np.float32)}
    with pytest.raises(ValueError, match=r"under two names: pooler\.dense\.bias"):
        bert_checkpoint.load(RECORDED.written(tmp_path, tensors))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_decoder_of_its_own(tmp_path, part):
    tensors = RECORDED.tensors("pretraining")
    same = "bert.embeddings.word_embeddings.weight" if part == "weight" else "cls.predictions.bias"
    tensors[f"cls.predictions.decoder.{part}"] = 2 * tensors[same]
    with pytest.raises(ValueError, match=f"tensor cls.predictions.decoder.{part} differs from"):
        bert_checkpoint.load(RECORDED.written(tmp_path, tensors))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(model_type="roformer"),
            "model_type in config.json is 'roformer'; it must be one of 'bert', 'distilbert', ",
        ),
        (
            dict(position_embedding_type="relative_key"),
            "position_embedding_type in config.json is 'relative_key'; supported is 'absolute'",
        ),
        (dict(is_decoder=True), "is_decoder in config.json is True; supported is False"),
        (dict(add_cross_attention=True), "add_cross_attention in config.json is True"),
        (dict(pruned_heads={"0": [1]}), "config.json has pruned_heads"),
        (
            dict(hidden_act="tanh"),
            "hidden_act in config.json is 'tanh'; it must be one of 'gelu_new'",
        ),
        (dict(num_attention_heads=5), "heads is 5, which does not divide hidden_size, 24"),
    ],
)
def test_wrong_config(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        bert_checkpoint.load(RECORDED.written(tmp_path, RECORDED.tensors("pretraining"), **changes))


def test_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        bert_checkpoint.load(tmp_path)
    shutil.copy(DATA / "model" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor model\.saf"):
        bert_checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", b"{", r"config\.json is no JSON: Expecting property name"),
        ("config.json", b"\xff", r"config\.json is no JSON: 'utf-8' codec"),
        ("config.json", b"[]", r"config\.json is a JSON list; it must be an object"),
        ("model.safetensors", b"", r"model\.safetensors cannot be read: .*header"),
        ("model.safetensors.index.json", b"{}", r"index\.json has no weight_map"),
    ],
)
def test_damaged_file(tmp_path, name, content, message):
    """The message names the file."""
    shutil.copy(DATA / "model" / "config.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        bert_checkpoint.load(tmp_path)


def test_truncated_file(tmp_path):
    shutil.copytree(DATA / "model", tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: "):
        bert_checkpoint.load(tmp_path)


def test_no_safetensors(monkeypatch):
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        bert_checkpoint.load(DATA / "model")


def test_save_of_another_config(tmp_path):
    config, params = bert_checkpoint.load(DATA / "model")
    more = dataclasses.replace(config, layers=3)
    with pytest.raises(ValueError, match=r"params has no \['layers'\]\[2\]\['down'\]\['bias'\]"):
        bert_checkpoint.save(tmp_path / "made", more, params)
    assert not (tmp_path / "made").exists()


# ---- transformers itself -------------------------------------------------------------------------

LIVE = {
    "wide heads": (dict(hidden_size=96, num_attention_heads=2), dict(mask=True, token_types=True)),
    "many heads": (dict(hidden_size=48, num_attention_heads=12), dict(mask=True)),
    "one layer": (dict(num_hidden_layers=1, intermediate_size=9), dict(mask=True, positions=True)),
    "deep": (dict(num_hidden_layers=6, hidden_size=16, num_attention_heads=2), dict(mask=True)),
    "silu": (dict(hidden_act="silu", type_vocab_size=4), dict(token_types=True)),
    "gelu_fast": (dict(hidden_act="gelu_fast", layer_norm_eps=1e-3), dict(mask=True)),
    "long": (dict(max_position_embeddings=130, num_attention_heads=1), dict(sequence=130)),
}


@pytest.fixture
def recorder():
    """The module record_bert; skips the test without torch or transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import record_bert

    return record_bert


@pytest.mark.slow
@pytest.mark.parametrize("heads", [False, True], ids=["model", "pretraining"])
@pytest.mark.parametrize("case", LIVE)
def test_equals_live_transformers(native, recorder, tmp_path, case, heads):
    import torch
    import transformers
    from safetensors.torch import save_file

    sizes, batch = LIVE[case]
    sizes = (
        dict(
            vocab_size=37,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=80,
            max_position_embeddings=24,
        )
        | sizes
    )
    batch = dict(batch=3, sequence=21, mask=False, token_types=False, positions=False) | batch
    generator = torch.Generator().manual_seed(1)
    cls = transformers.BertForPreTraining if heads else transformers.BertModel
    model = recorder.build(cls, sizes, generator)
    given = recorder.inputs(model.config, generator, **batch)
    wanted, weights, gradients = recorder.recorded(model, given, generator)
    model.save_pretrained(tmp_path / "made")
    config, params = bert_checkpoint.load(tmp_path / "made", dtype="float32")
    save_file(gradients, tmp_path / "made" / "model.safetensors")
    numpy = functools.partial(jax.tree.map, lambda tensor: tensor.numpy())
    mine, found = with_gradients(
        params, numpy(given), numpy(weights), config=config, ops=bert.FASTOPS
    )
    assert_close(found, numpy(wanted), TOLERANCE)
    assert_close(mine, bert_checkpoint.load(tmp_path / "made")[1], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, heads",
    [
        ("BertModel", {}),
        ("BertForMaskedLM", {"mlm": True}),
        ("BertForPreTraining", {"mlm": True, "nsp": True}),
        *HEADS.values(),
    ],
)
def test_transformers_reads_what_is_saved(recorder, tmp_path, name, heads):
    """No tensor is missing or unexpected, and the outputs are the same."""
    import torch
    import transformers

    config = dataclasses.replace(bert.SMALL, hidden_size=32, activation="gelu")
    params = bert.init(jax.random.key(0), config, **heads)
    if name in ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"):
        del params["pooler"]  # these have none
    bert_checkpoint.save(tmp_path, config, params)
    assert content(tmp_path)["architectures"] == [name]
    cls = getattr(transformers, name)
    model, report = cls.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = np.random.default_rng(0).integers(1, 128, (2, 11))
    with torch.no_grad():
        wanted = recorder.outputs(model.eval(), {"input_ids": torch.tensor(tokens)})
    found = outputs(params, {"input_ids": tokens}, config, bert.FASTOPS)
    assert_close(found, {name: tensor.numpy() for name, tensor in wanted.items()}, 1e-5)


def test_float64_is_closer(native):
    """The recordings are float32, so they differ from float64 by float32 rounding."""
    recorded = RECORDED.arrays("model")
    with x64(), fo.use_implementation("native"):
        config, params = bert_checkpoint.load(DATA / "model", dtype="float64")
        found = outputs(params, recorded["inputs"], config, bert.FASTOPS)
        assert found["hidden"].dtype == np.float64
        assert_close(found, recorded["outputs"], 2e-6)
