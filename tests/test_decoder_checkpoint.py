"""Decoders equal those of transformers, as recorded by record_decoder.py; checkpoint files."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import x64
from harness.numerics import assert_close_in_norm, norm_errors
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_fastops.models import decoder

safetensors = pytest.importorskip("safetensors.numpy")

from harness.recordings import Recordings, content  # noqa: E402

from jax_fastops.models import _checkpoint_files, decoder_checkpoint  # noqa: E402
from jax_fastops.models._decoder_types import TYPES  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
RECORDED = Recordings("decoder", decoder_checkpoint.load, usual="llama")
DATA, RECORDINGS = RECORDED.folder, RECORDED.names
TOLERANCE = 1e-4
# Recordings are in float32.
assert_close = functools.partial(assert_close_in_norm, dtypes=False)
OPS = {"ours": decoder.FASTOPS, "plain": decoder.PLAIN}


def arrays(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Inputs, outputs, outputs in bfloat16, and generated tokens.

    Logits of padding are replaced by zeros, because padding may attend to nothing.
    """
    found = RECORDED.arrays(name)
    for kind in ("outputs", "bfloat16"):
        found[kind]["logits"] = without_padding(found[kind]["logits"], found["inputs"])
    return found


def without_padding(logits, inputs):
    return logits * inputs["attention_mask"][..., None] if "attention_mask" in inputs else logits


def options_of(inputs) -> dict:
    names = {"attention_mask": "mask", "position_ids": "positions"}
    return {names[key]: value for key, value in inputs.items() if key in names}


@functools.partial(jax.jit, static_argnames=("config", "ops"))
def outputs(params, inputs, config, ops=decoder.FASTOPS) -> dict[str, jax.Array]:
    tokens, options = inputs["input_ids"], options_of(inputs)
    hidden = decoder.apply(params, tokens, config, **options, ops=ops)
    loss = decoder.loss(params, tokens, config, **options, ops=ops)
    logits = without_padding(decoder.logits(params, hidden, config), inputs)
    return {"logits": logits, "loss": loss}


@functools.partial(jax.jit, static_argnames=("config", "ops"))
def gradients(params, inputs, config, ops=decoder.FASTOPS):
    tokens, options = inputs["input_ids"], options_of(inputs)
    return jax.grad(decoder.loss)(params, tokens, config, **options, ops=ops)


# ---- recordings of transformers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, which", [*((name, "ours") for name in RECORDINGS), ("qwen3", "plain")]
)
def test_equals_transformers(native, tmp_path, name, which):
    """Logits, loss, and the gradient of every parameter."""
    recorded = arrays(name)
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    assert_close(
        outputs(params, recorded["inputs"], config, OPS[which]), recorded["outputs"], TOLERANCE
    )
    found = gradients(params, recorded["inputs"], config, OPS[which])
    assert_close(found, RECORDED.gradients(name, tmp_path), TOLERANCE)


VARIANTS = {
    "attention": dict(attention="xla"),
    "remat": dict(remat=True),
    "scan": dict(scan=True),
    "scan-remat": dict(scan=True, remat=True),
    "tensor-parallel": dict(tensor_parallel=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "qwen3-window"])
def test_variants_equal_transformers(native, tmp_path, name, variant):
    changes, recorded = VARIANTS[variant], arrays(name)
    scan = changes.get("scan", False)
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32", scan=scan)
    config = dataclasses.replace(config, **changes)
    assert_close(outputs(params, recorded["inputs"], config), recorded["outputs"], TOLERANCE)
    found = gradients(params, recorded["inputs"], config)
    assert_close(found, RECORDED.gradients(name, tmp_path, scan=scan), TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_float64(name, tmp_path):
    """The recording is in float32, and so are the parameters."""
    recorded = arrays(name)
    with x64():
        config, params = decoder_checkpoint.load(DATA / name, dtype="float64")
        found = outputs(params, recorded["inputs"], config)
        assert {a.dtype for a in found.values()} == {np.dtype("float64")}
        assert_close(found, recorded["outputs"], 1e-5)


@pytest.mark.parametrize("name", RECORDINGS)
def test_bfloat16(native, name):
    """The error against float32 is at most 1.5 times that of transformers in bfloat16."""
    recorded = arrays(name)
    config, params = decoder_checkpoint.load(DATA / name)
    assert config.dtype == "bfloat16"
    found = outputs(params, recorded["inputs"], config)
    mine, theirs = (norm_errors(x, recorded["outputs"]) for x in (found, recorded["bfloat16"]))
    # The loss is one number, whose error may be small by chance.
    assert mine["['logits']"] <= 1.5 * theirs["['logits']"] < 0.05
    assert mine["['loss']"] <= max(1.5 * theirs["['loss']"], 5e-3)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_generates_the_same_tokens(native, name, scan):
    if scan and name.startswith("llama"):
        pytest.skip("one model is enough")
    recorded = arrays(name)
    prompt, wanted = recorded["inputs"]["input_ids"], recorded["generated"]
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32", scan=scan)
    static = ("config", "length", "end")
    generate = jax.jit(decoder.generate, static_argnames=static)
    count, end = wanted["free"].shape[1], int(wanted["end"])
    free, lengths = generate(params, prompt, config, length=count, mask=wanted["mask"])
    np.testing.assert_array_equal(free, wanted["free"])
    assert lengths.tolist() == [count] * len(prompt)
    ended, lengths = generate(params, prompt, config, length=count, end=end, mask=wanted["mask"])
    for mine, n, theirs in zip(ended, lengths, wanted["ended"], strict=True):
        np.testing.assert_array_equal(mine[:n], theirs[:n])
        assert n == count or (mine[n - 1 :] == end).all()
        assert not (mine[: n - 1] == end).any()
    assert lengths[0] <= count // 2 + 1


# ---- against transformers itself -----------------------------------------------------------------


def live(kind: str, **more):
    """A model of transformers with random weights, and its module."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=80,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls(cls.config_class(**config | more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(name.endswith("norm.weight") + scale * torch.randn(parameter.shape))
    return model


LIVE = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", dict(head_dim=12, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    "mistral": ("Mistral", dict(sliding_window=4)),
}


@pytest.mark.parametrize("name", LIVE)
def test_equals_live_transformers(tmp_path, name):
    kind, more = LIVE[name]
    model = live(kind, **more)
    import torch

    tokens = torch.randint(211, (2, 17))
    found = model(input_ids=tokens, labels=tokens)
    found.loss.backward()
    model.save_pretrained(tmp_path / "model")
    config, params = decoder_checkpoint.load(tmp_path / "model", dtype="float32")
    given = {"input_ids": tokens.numpy().astype(np.int32)}
    wanted = {"logits": found.logits.detach().numpy(), "loss": found.loss.detach().numpy()}
    assert_close(outputs(params, given, config), wanted, TOLERANCE)
    grads = gradients(params, given, config)
    decoder_checkpoint.save(tmp_path / "gradients", config, grads)
    saved = safetensors.load_file(tmp_path / "gradients" / "model.safetensors")
    assert_close(saved, {n: p.grad.numpy() for n, p in model.named_parameters()}, TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_transformers_reads_what_is_saved(tmp_path, name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    decoder_checkpoint.save(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    import torch

    inputs = arrays(name)["inputs"]
    with torch.no_grad():
        found = model(**{key: torch.from_numpy(a).long() for key, a in inputs.items()})
    found = without_padding(found.logits.numpy(), inputs)
    assert_close(found, arrays(name)["outputs"]["logits"], TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_transformers_reads_a_config_like_another(tmp_path, name):
    """All fields are those of the model that was loaded."""
    auto = pytest.importorskip("transformers").AutoConfig
    config, params = decoder_checkpoint.load(DATA / name)
    decoder_checkpoint.save(tmp_path, config, params, like=DATA / name)
    found, wanted = (auto.from_pretrained(path).to_dict() for path in (tmp_path, DATA / name))
    assert found | {"_name_or_path": None} == wanted | {"_name_or_path": None}


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(sliding_window=3),
        dict(qkv_bias=True, tied=True),
        dict(qk_norm=True, sliding_window=5),
        dict(rope_scaling=decoder.RopeScaling(8.0, 1.0, 4.0, 64), output_bias=True, qkv_bias=True),
    ],
    ids=str,
)
def test_transformers_reads_a_new_config(tmp_path, changes):
    """It has no field with another meaning, by its own defaults."""
    auto = pytest.importorskip("transformers").AutoConfig
    config = dataclasses.replace(decoder.SMALL, **changes)
    decoder_checkpoint.save(tmp_path, config, decoder.init(jax.random.key(0), config))
    found = auto.from_pretrained(tmp_path)
    assert decoder_checkpoint._config_of(found.to_dict()) == config
    assert found.bos_token_id is found.eos_token_id is found.pad_token_id is None


# The defaults of transformers 4.57.6 and 5.24.0 (they agree) for a config.json without these keys.
COMMON = dict(
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    eps=1e-6,
    tied=False,
    init_range=0.02,
    rope_theta=10000.0,
    rope_scaling=None,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    sliding_window=None,
)
DEFAULTS = {
    "llama": COMMON | dict(vocab_size=32000, intermediate_size=11008),
    "mistral": COMMON
    | dict(vocab_size=32000, intermediate_size=14336, kv_heads=8, sliding_window=4096),
    "qwen2": COMMON | dict(vocab_size=151936, intermediate_size=22016, qkv_bias=True),
    "qwen3": COMMON | dict(vocab_size=151936, intermediate_size=22016, qk_norm=True),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 0}
# What another content of config.json means.
MEANINGS = [
    *(({"model_type": kind}, {}) for kind in DEFAULTS),
    # Missing and null are not the same.
    ({"model_type": "mistral", "sliding_window": None}, dict(sliding_window=None)),
    ({"model_type": "mistral", "num_key_value_heads": None}, dict(kv_heads=32)),
    ({"model_type": "mistral", "num_attention_heads": 16}, dict(heads=16, head_dim=256)),
    ({"model_type": "llama", "num_attention_heads": 16}, dict(heads=16, kv_heads=16, head_dim=256)),
    ({"model_type": "qwen2", "num_attention_heads": 64}, dict(heads=64, head_dim=64)),
    ({"model_type": "qwen3", "num_attention_heads": 64}, dict(heads=64)),
    ({"model_type": "llama", "sliding_window": 7}, {}),
    ({"model_type": "llama", "attention_bias": True}, dict(qkv_bias=True, output_bias=True)),
    ({"model_type": "qwen2", "attention_bias": True}, {}),
    ({"model_type": "qwen2", "sliding_window": 7}, {}),
    ({"model_type": "qwen2", **WINDOWED}, dict(sliding_window=4096)),
    ({"model_type": "qwen3", **WINDOWED, "sliding_window": None}, {}),
    ({"model_type": "qwen3", **WINDOWED, "layer_types": ["full_attention"] * 32}, {}),
    ({"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 9}, dict(layers=9)),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
        dict(sliding_window=4096, full_layers=(0, 1)),
    ),
    ({"model_type": "llama", "rope_theta": 5.0}, dict(rope_theta=5.0)),
    ({"model_type": "llama", "rope_parameters": {"rope_theta": 5.0}}, dict(rope_theta=5.0)),
    (
        {"model_type": "mistral", "rope_theta": 5.0, "rope_scaling": LLAMA3},
        dict(rope_theta=5.0, rope_scaling=decoder.RopeScaling(8.0, 1.0, 4.0, 131072)),
    ),
    (
        {"model_type": "llama", "rope_parameters": LLAMA3, "max_position_embeddings": 64},
        dict(rope_scaling=decoder.RopeScaling(8.0, 1.0, 4.0, 64)),
    ),
]


@pytest.mark.parametrize("given, wanted", MEANINGS, ids=lambda given: json.dumps(given)[:60])
def test_defaults_of_model_types(given, wanted):
    wanted = decoder.Config(**DEFAULTS[given["model_type"]] | wanted, dtype="float32")
    assert decoder_checkpoint._config_of(given) == wanted


@pytest.mark.parametrize("kind", DEFAULTS)
def test_null_is_the_default(kind):
    """Except for keys where it has a meaning, which `MEANINGS` has."""
    names = {name for each in DEFAULTS for name in TYPES[each].defaults}
    names |= {"rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"}
    names |= {"hidden_act", "mlp_bias"}
    names -= {"sliding_window", "num_key_value_heads", "head_dim"}
    given = {"model_type": kind} | dict.fromkeys(names)
    assert decoder_checkpoint._config_of(given) == decoder_checkpoint._config_of(
        {"model_type": kind}
    )
    rope = {"rope_theta": None, "rope_type": None, "partial_rotary_factor": None}
    assert decoder_checkpoint._config_of(given | {"rope_parameters": rope}).rope_theta == 10000


@pytest.mark.parametrize("given", [given for given, _ in MEANINGS], ids=json.dumps)
def test_defaults_of_live_transformers(given):
    transformers = pytest.importorskip("transformers")
    five = int(transformers.__version__.split(".")[0]) >= 5
    if "num_key_value_heads" in given and five:
        pytest.skip("transformers 5 takes no null there")
    if "rope_parameters" in given and not five:
        pytest.skip("transformers 4 does not know rope_parameters")
    theirs = transformers.AutoConfig.for_model(**given)
    mine = decoder_checkpoint._config_of(given)
    for own, name in TYPES[given["model_type"]].fields.items():
        value = getattr(theirs, name, None)
        assert getattr(mine, own) == (theirs.hidden_size // mine.heads if value is None else value)
    rope = theirs.rope_parameters if five else {"rope_theta": theirs.rope_theta}
    assert mine.rope_theta == rope["rope_theta"]
    if mine.rope_scaling is not None and five:
        positions = rope["original_max_position_embeddings"]
        assert mine.rope_scaling == decoder.RopeScaling(8.0, 1.0, 4.0, positions)
    windowed = set(getattr(theirs, "layer_types", ())) != {"full_attention"}
    window = theirs.sliding_window if windowed and given["model_type"] != "llama" else None
    assert mine.sliding_window == window
    if given["model_type"] in ("llama", "qwen3"):
        assert mine.output_bias == mine.qkv_bias == theirs.attention_bias


# ---- names and files -----------------------------------------------------------------------------


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_save(tmp_path, name, scan):
    """What is saved is loaded; the tensors are those of transformers."""
    config, params = decoder_checkpoint.load(DATA / name, scan=scan)
    decoder_checkpoint.save(tmp_path, config, params)
    again, loaded = decoder_checkpoint.load(tmp_path, scan=scan)
    assert again == config and same(loaded, params)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == RECORDED.tensors(name).keys() and same(saved, RECORDED.tensors(name))


def test_several_files(tmp_path):
    RECORDED.divided("llama", tmp_path)
    found, wanted = (decoder_checkpoint.load(path) for path in (tmp_path, DATA / "llama"))
    assert found[0] == wanted[0] and same(found[1], wanted[1])


def test_low_precision_tensors(tmp_path):
    tensors = {name: a.astype(jnp.bfloat16) for name, a in RECORDED.tensors("qwen3").items()}
    _, params = decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))
    wanted = tensors["model.norm.weight"].astype(np.float32)
    assert params["norm"]["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(params["norm"]["scale"], wanted)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("param_dtype", ["bfloat16", jnp.float16, np.dtype("float32")])
def test_param_dtype(tmp_path, param_dtype, scan):
    """Each tensor is rounded once, and is saved in the dtype of its parameter."""
    load = functools.partial(decoder_checkpoint.load, scan=scan)
    config, params = load(DATA / "qwen3", param_dtype=param_dtype)
    wanted = jax.tree.map(lambda a: np.asarray(a).astype(param_dtype), load(DATA / "qwen3")[1])
    assert same(params, wanted)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    decoder_checkpoint.save(tmp_path, config, params)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {a.dtype for a in saved.values()} == {jnp.dtype(param_dtype)}
    assert same(load(tmp_path, param_dtype=param_dtype)[1], params)


def test_param_dtype_of_float64():
    with pytest.raises(ValueError, match=r"param_dtype is 'float64', which .* jax_enable_x64"):
        decoder_checkpoint.load(DATA / "llama", param_dtype="float64")
    with x64():
        _, params = decoder_checkpoint.load(DATA / "llama", param_dtype="float64", scan=True)
        _, wanted = decoder_checkpoint.load(DATA / "llama", scan=True)
        assert {a.dtype for a in jax.tree.leaves(params)} == {np.dtype("float64")}
        assert same(params, wanted)


@pytest.mark.parametrize("param_dtype", ["int8", None, 3, jnp.float8_e5m2])
def test_wrong_param_dtype(param_dtype):
    with pytest.raises(ValueError, match=r"decoder: param_dtype is .*; it must be one of 'float64"):
        decoder_checkpoint.load(DATA / "llama", param_dtype=param_dtype)


def test_tensors_of_many_blocks(tmp_path, monkeypatch):
    """Large tensors are converted in blocks of rows."""
    monkeypatch.setattr(_checkpoint_files, "_BLOCK", 50)
    test_save(tmp_path, "qwen3", True)
    test_tied_head_in_the_file(tmp_path)


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_partition_specs(tmp_path, scan, kind):
    """By a function of the config. The results are those of one device."""
    saved = decoder.init(jax.random.key(0), decoder.SMALL)
    decoder_checkpoint.save(tmp_path, decoder.SMALL, saved)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(getattr(AxisType, kind),) * 2)
    load = functools.partial(decoder_checkpoint.load, tmp_path, dtype="float32", scan=scan)

    def sharding(config):
        specs = decoder.partition_specs(config)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    config, params = load(tensor_parallel=True, sharding=sharding)
    assert config.tensor_parallel
    assert jax.tree.map(lambda a: a.sharding, params) == sharding(config)
    plain, wanted = load()
    assert same(params, wanted)
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    with jax.set_mesh(mesh):
        split = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        found = jax.jit(decoder.loss, static_argnums=2)(params, split, config)
    np.testing.assert_allclose(found, decoder.loss(wanted, tokens, plain), rtol=1e-5)


def test_sharding_of_a_part():
    """A sharding stands for all parameters below it. A stack may be sharded over its layers."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    last, rows = SingleDeviceSharding(jax.devices()[-1]), NamedSharding(mesh, P("x"))
    tree = {"layers": rows, "embeddings": last, "norm": {"scale": last}, "head": None, "more": 3}
    _, params = decoder_checkpoint.load(DATA / "llama", scan=True, sharding=tree)
    _, plain = decoder_checkpoint.load(DATA / "llama", scan=True)
    assert same(params, plain)
    assert {a.sharding for a in jax.tree.leaves(params["layers"])} == {rows}
    assert params["embeddings"].sharding == params["norm"]["scale"].sharding == last
    assert not params["head"].committed
    assert not any(a.committed for a in jax.tree.leaves(plain))
    _, params = decoder_checkpoint.load(DATA / "llama", scan=True, sharding=last)
    assert {a.sharding for a in jax.tree.leaves(params)} == {last}


@pytest.mark.parametrize("sharding", [P("x"), {"embeddings": None, "layers": [None]}, 3])
def test_wrong_sharding(sharding):
    message = r"decoder: sharding has no Sharding of params\['\w+'\].*; it must be a jax.sharding.S"
    with pytest.raises(ValueError, match=message):
        decoder_checkpoint.load(DATA / "llama", sharding=sharding)


def test_load_under_strict_settings():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        config, params = decoder_checkpoint.load(DATA / "qwen3", param_dtype="bfloat16", scan=True)
        loss = jax.jit(decoder.loss, static_argnums=2)
        found = loss(params, np.arange(12, dtype=np.int32).reshape(2, 6), config)
    config, params = decoder_checkpoint.load(DATA / "qwen3", dtype="float32")
    wanted = loss(params, np.arange(12, dtype=np.int32).reshape(2, 6), config)
    np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_former_names_of_rope(tmp_path):
    config = content(DATA / "llama")
    rope = config["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    RECORDED.written(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    found, wanted = (decoder_checkpoint.load(path)[0] for path in (tmp_path, DATA / "llama"))
    assert found == wanted and found.rope_scaling is not None


def test_tied_head_in_the_file(tmp_path):
    tensors = RECORDED.tensors("qwen3")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))[0].tied
    tensors["lm_head.weight"] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mixtral"), r"model_type in config\.json is 'mixtral'; it must be one of"),
        (dict(hidden_act="laplace"), "hidden_act .* is 'laplace'; it must be one of"),
        (dict(mlp_bias=True), "mlp_bias .* is True; supported is False"),
        (dict(rope_parameters=dict(rope_type="dynamic")), "rope_type in .* is 'dynamic'"),
        (dict(model_type="phi3", rope_scaling=dict(type="yarn")), "rope_type in .* is 'yarn'"),
        (dict(rope_parameters=dict(rope_type="yarn")), r"has no factor$"),
        (dict(rope_parameters=dict(type="llama3", factor=2.0)), "has no low_freq_factor, high_f"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor in .* is 0.5; supported is 1.0"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor in .* 0.5"),
        (
            dict(model_type="qwen3", use_sliding_window=True, layer_types=["chunked_attention"]),
            "layer_types in .* has 'chunked_attention'",
        ),
        (dict(num_hidden_layers=1), r"tensors not known: model\.layers\.1\.input_layernorm"),
        (dict(num_hidden_layers=3), r"tensors missing: model\.layers\.2\.input_layernorm"),
        (dict(intermediate_size=25), r"of another shape: .*layers\.0\.mlp\.gate_proj\.weight"),
    ],
)
def test_errors(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        decoder_checkpoint.load(RECORDED.written(tmp_path, **changes))


def test_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        decoder_checkpoint.load(tmp_path)
    shutil.copy(DATA / "llama" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        decoder_checkpoint.load(tmp_path)
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        decoder_checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", DATA / "llama" / "config.json"])
def test_no_folder(tmp_path, name):
    """A name on the Hugging Face Hub is none."""
    config, params = decoder_checkpoint.load(DATA / "llama")
    message = "is no folder; it must be one with config.json .*huggingface_hub.snapshot_download"
    with pytest.raises(FileNotFoundError, match=message):
        decoder_checkpoint.load(name)
    with pytest.raises(FileNotFoundError, match=message):
        decoder_checkpoint.save(tmp_path / "made", config, params, like=name)
    assert not (tmp_path / "made").exists()


# ---- a checkpoint like another -------------------------------------------------------------------

MORE = {  # keys of config.json that no Config has
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
    "pad_token_id": None,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "transformers_version": "4.57.6",
    "own": {"key": [1]},
}
FILES = [  # that are copied
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "chat_template.jinja",
    "additional_chat_templates/rag.jinja",
    "spiece.model",
]


def another(folder, name: str, **changes):
    """Writes a checkpoint with other files. Returns what `load` returns."""
    RECORDED.written(folder, None, name, **MORE | changes)
    (folder / "additional_chat_templates").mkdir()
    for file in (*FILES, "README.md", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (folder / file).write_text(f"content of {file}")
    (folder / "tokenizer_files").mkdir()
    return decoder_checkpoint.load(folder)


@pytest.mark.parametrize("place", ["made", "like"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_save_like(tmp_path, name, place):
    """The same config.json except for the dtype, new tensors, and copies of the other files."""
    like, made = tmp_path / "like", tmp_path / place
    like.mkdir()
    config, params = another(like, name)
    before = content(like)
    params = jax.tree.map(lambda a: a + 1, params)
    decoder_checkpoint.save(made, dataclasses.replace(config, remat=True), params, like=like)
    assert content(made) == before | {"dtype": "float32"}
    again, found = decoder_checkpoint.load(made)
    assert again == config and same(found, params)
    if made != like:
        names = {"config.json", "model.safetensors", *FILES}
        assert {str(f.relative_to(made)) for f in made.rglob("*") if f.is_file()} == names
    assert all((made / file).read_text() == f"content of {file}" for file in FILES)


@pytest.mark.parametrize(
    "name, kind, change",
    [
        ("llama", "llama", dict(rope_theta=7.0)),
        ("llama", "llama", dict(rope_scaling=None)),
        ("llama", "llama", dict(eps=0.5, init_range=0.5)),
        ("llama", "mistral", dict(sliding_window=3)),
        ("llama", "mistral", dict(sliding_window=None)),
        ("qwen3", "qwen3", dict(sliding_window=3)),
        ("qwen3-window", "qwen3", dict(sliding_window=None)),
    ],
)
def test_save_like_with_changes(tmp_path, name, kind, change):
    """The config's fields are the new ones, and the other keys are kept."""
    (tmp_path / "like").mkdir()
    config, params = another(tmp_path / "like", name, model_type=kind)
    config = dataclasses.replace(config, **change)
    decoder_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    assert decoder_checkpoint.load(tmp_path / "made")[0] == config
    written = content(tmp_path / "made")
    assert written["model_type"] == kind
    assert {key: written[key] for key in MORE} == MORE | {"dtype": "float32"}


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_like(tmp_path, name, dtype):
    """It is that of the tensors, if it is there and all have the same."""
    like = tmp_path / "like"
    like.mkdir()
    given = content(RECORDED.written(like, **{name: "float64"}))
    given.pop({"dtype": "torch_dtype", "torch_dtype": "dtype"}[name], None)
    (like / "config.json").write_text(json.dumps(given))
    config, params = decoder_checkpoint.load(like, param_dtype=dtype)
    decoder_checkpoint.save(tmp_path / "all", config, params, like=like)
    assert content(tmp_path / "all") == given | {name: dtype}
    params["norm"] = jax.tree.map(lambda a: a.astype("float32"), params["norm"])
    params["head"] = params["head"].astype("bfloat16")
    decoder_checkpoint.save(tmp_path / "mixed", config, params, like=like)
    assert content(tmp_path / "mixed") == given


@pytest.mark.parametrize("damaged", [False, True])
def test_save_over_several_files(tmp_path, damaged):
    """The former index and its files are removed, and no others."""
    config, params = decoder_checkpoint.load(DATA / "llama")
    made = tmp_path / "made"
    made.mkdir()
    test_several_files(made)
    if damaged:
        (made / "model.safetensors.index.json").write_text("{")
    else:
        index = content(made, "model.safetensors.index.json")
        index["weight_map"] |= {"a": "../outside.safetensors", "b": "config.json", "c": "README.md"}
        (made / "model.safetensors.index.json").write_text(json.dumps(index))
    outside = tmp_path / "outside.safetensors"
    for file in (made / "own.safetensors", made / "README.md", outside):
        file.write_text("own")
    decoder_checkpoint.save(made, config, params, like=made)
    former = {"a.safetensors", "b.safetensors"} if damaged else set()
    names = {"config.json", "model.safetensors", "own.safetensors", "README.md"} | former
    assert {file.name for file in made.iterdir()} == names and outside.exists()
    assert same(decoder_checkpoint.load(made)[1], params)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mixtral"), "model_type in .* is 'mixtral'; it must be one of"),
        (dict(model_type="qwen2"), "like, .*, is of the model_type 'qwen2', which cannot have"),
        (
            dict(num_hidden_layers=3, vocab_size=7),
            "like, .*, has other shapes: vocab_size is 7, but in config .*; layers is 3, but in co",
        ),
    ],
)
def test_save_like_errors(tmp_path, changes, message):
    config, params = decoder_checkpoint.load(DATA / "llama")
    like = tmp_path / "like"
    like.mkdir()
    RECORDED.written(like, **changes)
    with pytest.raises(ValueError, match=message):
        decoder_checkpoint.save(tmp_path / "made", config, params, like=like)
    assert not (tmp_path / "made").exists()


def test_failed_copy(tmp_path, monkeypatch):
    """The previous files are unchanged, and there are no others."""
    (tmp_path / "like").mkdir()
    config, params = another(tmp_path / "like", "llama")
    decoder_checkpoint.save(tmp_path / "made", config, params)
    before = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(_checkpoint_files.shutil, "copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        decoder_checkpoint.save(tmp_path / "made", config, params, like=tmp_path / "like")
    assert {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()} == before


def test_special_tokens_of_a_new_model(tmp_path):
    """The defaults of transformers, 1 and 2, are those of another vocabulary."""
    params = decoder.init(jax.random.key(0), decoder.SMALL)
    decoder_checkpoint.save(tmp_path, decoder.SMALL, params)
    written = content(tmp_path)
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3


def test_save_of_no_known_model(tmp_path):
    config = dataclasses.replace(decoder.SMALL, output_bias=True)
    params = decoder.init(jax.random.key(0), config)
    with pytest.raises(ValueError, match=r"no supported model has .*output_bias=True"):
        decoder_checkpoint.save(tmp_path, config, params)
    with pytest.raises(ValueError, match="decoder: params has"):
        decoder_checkpoint.save(tmp_path, decoder.SMALL, params)
