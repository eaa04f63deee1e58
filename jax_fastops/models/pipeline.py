"""Pipelines: the layers of BERT or a decoder in stages, one for each index of a mesh axis.

A batch is cut into micro-batches. In each tick, every stage applies its layers to one micro-batch
and sends the result to the next stage (GPipe: all forward passes, then all backward passes, which
JAX derives). With ``m`` micro-batches and ``s`` stages there are ``m + s - 1`` ticks in each
direction, so a stage idles for ``(s - 1) / (m + s - 1)`` of them: the *bubble*, 1/9 for 8
micro-batches and 2 stages.

The stages have equal FLOP: each has as many layers as the others, and the same part of the
vocabulary. The rows of embeddings and head are sharded over the stages, so the embeddings come
before the first tick and the loss after the last one, on all stages at once and without a bubble. A
head on the last stage would make that stage the slowest: for a vocabulary of 128256, the head is a
third of the FLOP of a decoder of 8 layers. Where ``s`` does not divide the layers, stages are
filled with layers that have no effect. All layers must be alike: ``full_layers`` and
``unrotated_layers`` of a decoder raise ``ValueError``.

The mesh is that of ``jax.set_mesh``, with Auto axes: one of the stages, and optionally one of the
batch and one of tensor parallelism (``Config.tensor_parallel``)::

    mesh = jax.make_mesh((2, 2, 2), ("data", "stage", "tensor"), axis_types=(AxisType.Auto,) * 3)
    params = pipeline.stack_layers(decoder.init(key, config), stages=2)
    specs = pipeline.partition_specs(config)
    params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), params, specs)
    with jax.set_mesh(mesh):
        loss = jax.jit(pipeline.decoder_loss, static_argnames=("config", "micro_batches"))(
            params, tokens, config=config, micro_batches=8
        )

``Config.remat`` and ``Config.remat_every`` bound what a stage keeps of each micro-batch. With
``Config.scan``, ticks and layers are loops. Without it the program has every layer of every tick,
takes longer to compile, and copies no residuals. The examples need ``import jax, jax.numpy as jnp``
and ``from jax_fastops.models import bert, decoder, pipeline``.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jax_fastops import _compat
from jax_fastops.models import _bert_layers, _decoder_layers, _parameters, bert, decoder
from jax_fastops.models._checks import Checks
from jax_fastops.models._layers import in_turn
from jax_fastops.models._products import accumulator_dtype, vocabulary_loss
from jax_fastops.models._segments import Segments

__all__ = [
    "bert_apply",
    "bert_masked_lm_loss",
    "decoder_apply",
    "decoder_loss",
    "partition_specs",
    "stack_layers",
    "unstack_layers",
]

_CHECK = Checks("pipeline")


def stack_layers(params: dict[str, Any], stages: int) -> dict[str, Any]:
    """Stacks the layers, and repeats the last one until ``stages`` divides their number.

    Args:
      params: parameters of :mod:`~jax_fastops.models.bert` or
        :mod:`~jax_fastops.models.decoder`, with a list of layers or stacked ones.
      stages: the number of stages.

    Returns:
      The parameters. The arrays of the layers have a leading axis over all layers, to be sharded
      as :func:`partition_specs` says.

    Example:
      >>> params = pipeline.stack_layers(bert.init(jax.random.key(0), bert.SMALL), stages=4)
      >>> params["layers"]["up"]["kernel"].shape
      (4, 128, 512)
    """
    stages = _CHECK.integer("stages", stages, 1)
    layers = params["layers"]
    layers = layers if isinstance(layers, dict) else _parameters.stack(layers)

    def filled(a):
        return jnp.concatenate([a, jnp.broadcast_to(a[-1:], (-len(a) % stages, *a.shape[1:]))])

    return params | {"layers": jax.tree.map(filled, layers)}


def unstack_layers(params: dict[str, Any], config: bert.Config | decoder.Config) -> dict[str, Any]:
    """The inverse of :func:`stack_layers`: a list of layers, or with ``config.scan`` stacked ones.

    Example:
      >>> params = pipeline.stack_layers(bert.init(jax.random.key(0), bert.SMALL), stages=4)
      >>> len(pipeline.unstack_layers(params, bert.SMALL)["layers"])
      2
    """
    _model(config)
    _CHECK.type("params", params, dict, "a dict")
    layers = params.get("layers")
    _CHECK.type("params['layers']", layers, dict, "a dict, as stack_layers makes it")
    if (count := len(jax.tree.leaves(layers)[0])) < config.layers:
        raise ValueError(
            f"pipeline: params['layers'] has {count}, but config.layers is {config.layers}"
        )
    layers = jax.tree.map(lambda a: a[: config.layers], layers)
    return params | {"layers": layers if config.scan else _parameters.unstack(layers)}


def partition_specs(
    config: bert.Config | decoder.Config,
    *,
    stage: str = "stage",
    tensor: str = "tensor",
    **heads: Any,
) -> dict[str, Any]:
    """The shardings of the parameters of :func:`stack_layers`: a tree of ``PartitionSpec``.

    Layers are sharded over the stages. So are the rows of the vocabulary (embeddings, head, bias of
    the masked-word head): the number of stages, times that of tensor parallelism, must divide
    ``config.vocab_size``. With ``config.tensor_parallel``, the rest is sharded as in the
    ``partition_specs`` of the model.

    Args:
      config: the configuration of a BERT or a decoder.
      stage: the name of the mesh axis of the stages.
      tensor: the name of the mesh axis of tensor parallelism.
      heads: ``mlm``, ``nsp``, ``labels`` and ``qa``, as in
        :func:`jax_fastops.models.bert.partition_specs`; only for a BERT.

    Example:
      >>> specs = pipeline.partition_specs(decoder.SMALL)
      >>> specs["head"] == jax.sharding.PartitionSpec("stage", None)
      True
    """
    model, stacked = _model(config), dataclasses.replace(config, scan=True)
    if heads and model is decoder:
        raise ValueError(f"pipeline: {next(iter(heads))} is for a BERT")
    axes: Any = (stage, tensor) if config.tensor_parallel else stage
    own = model.partition_specs(stacked, tensor=tensor, **heads)["layers"]
    specs = model.partition_specs(_outer(stacked), tensor=axes, **heads)
    return specs | {"layers": jax.tree.map(lambda spec: P(stage, *spec[1:]), own)}


def _model(config) -> Any:
    """The module of the network, whose layers must be alike."""
    _CHECK.type("config", config, (bert.Config, decoder.Config), "a Config of bert or decoder")
    for name in ("full_layers", "unrotated_layers"):
        if layers := getattr(config, name, ()):
            raise ValueError(f"pipeline: {name} is {layers}; the layers of a pipeline are alike")
    return bert if isinstance(config, bert.Config) else decoder


def _outer(config: Any) -> Any:
    """The config for what is outside of the stages, where the vocabulary is sharded."""
    # Norms of all heads, inside of the layers, are no matter here.
    more: dict[str, Any] = {} if isinstance(config, bert.Config) else dict(qk_norm=False)
    return dataclasses.replace(config, tensor_parallel=True, **more)


def _as_of(config, params) -> dict[str, Any]:
    """The parameters, for the functions of the model that check them and read no layers."""
    shapes = _model(config).shapes(config)["layers"]
    _CHECK.type("params", params, dict, "a dict")
    return params | {"layers": shapes}


def decoder_apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: decoder.Config,
    *,
    micro_batches: int,
    stage: str = "stage",
    data: str = "data",
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    ops: decoder.Ops = decoder.FASTOPS,
) -> jax.Array:
    """:func:`decoder.apply <jax_fastops.models.decoder.apply>` in stages, without a cache.

    Args:
      params: parameters, as from :func:`stack_layers`.
      tokens: integers ``[batch, sequence]``.
      micro_batches: how many parts a batch is cut into. It, times the devices of ``data``, must
        divide the batch.
      stage: the name of the mesh axis of the stages.
      data: the name of the mesh axis that shards the batch. It need not exist.
      config, positions, mask, segment_ids, max_segments, ops: as in ``decoder.apply``.

    Returns:
      The hidden states ``[batch, sequence, hidden_size]`` after the last norm, the same on all
      stages.

    Example:
      >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = pipeline.stack_layers(decoder.init(jax.random.key(0), decoder.SMALL), 1)
      >>> with jax.set_mesh(mesh):
      ...     hidden = jax.jit(pipeline.decoder_apply, static_argnames=("config", "micro_batches"))(
      ...         params, jnp.ones((2, 3), int), config=decoder.SMALL, micro_batches=2
      ...     )
      >>> hidden.shape
      (2, 3, 64)
    """
    known = _as_of(config, params)
    ids, inside = decoder._check(known, tokens, config, mask, ops, segment_ids, max_segments)
    at = None if positions is None else jnp.asarray(positions)
    at = _CHECK.positions(at, ids.shape)
    at = None if at is None else jnp.broadcast_to(at, ids.shape)
    run = _Run.of(params["layers"], config, len(ids), micro_batches, stage, data)
    one = config if config.scan else dataclasses.replace(config, scan=True)

    def layers_of(layers, x, given, index):
        mask = _like(inside, given[1])
        at = _decoder_layers.places(given[0], mask, None, x, config)
        around, _ = _decoder_layers.surroundings(at, mask, None, x, config)
        (own,) = around.values()
        layers = _decoder_layers.prepared({"layers": layers}, one)["layers"]
        return _decoder_layers.layer_function(config, *own, ops, summed=True), (layers, None)

    own = _decoder_layers.places(at, inside, None, ids, config)
    x = _decoder_layers.embed(params, ids, own, _outer(config), ops)
    x = run(layers_of, params["layers"], x, (at, _arrays(inside)))
    return _decoder_layers.last_norm(params, x, config, ops)


def decoder_loss(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: decoder.Config,
    *,
    labels: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    ops: decoder.Ops = decoder.FASTOPS,
    **options: Any,
) -> jax.Array:
    """:func:`decoder.loss <jax_fastops.models.decoder.loss>` in stages.

    Args:
      params, tokens, config: as in :func:`decoder_apply`.
      labels, mask, segment_ids, max_segments, ops: as in ``decoder.loss``.
      options: ``micro_batches``, ``stage``, ``data`` and ``positions`` of :func:`decoder_apply`.

    Returns:
      A scalar, the mean over the whole batch: float32 (float64 if ``config.dtype`` is float64).

    Example:
      >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = pipeline.stack_layers(decoder.init(jax.random.key(0), decoder.SMALL), 1)
      >>> with jax.set_mesh(mesh):
      ...     loss = jax.jit(pipeline.decoder_loss, static_argnames=("config", "micro_batches"))(
      ...         params, jnp.ones((2, 3), int), config=decoder.SMALL, micro_batches=2
      ...     )
      >>> loss.shape
      ()
    """
    known = _as_of(config, params)
    ids, inside = decoder._check(known, tokens, config, mask, ops, segment_ids, max_segments)
    labels = decoder._labels_of(labels, ids, inside)
    segments = dict(mask=mask, segment_ids=segment_ids, max_segments=max_segments)
    hidden = decoder_apply(params, tokens, config, ops=ops, **segments, **options)
    return vocabulary_loss(hidden, decoder._head(params), labels, _outer(config), ops)


def bert_apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: bert.Config,
    *,
    micro_batches: int,
    stage: str = "stage",
    data: str = "data",
    mask: ArrayLike | None = None,
    token_types: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    key: ArrayLike | None = None,
    ops: bert.Ops = bert.FASTOPS,
) -> tuple[jax.Array, jax.Array | None]:
    """:func:`bert.apply <jax_fastops.models.bert.apply>` in stages.

    Args:
      params, tokens, micro_batches, stage, data: as in :func:`decoder_apply`.
      config, mask, token_types, positions, segment_ids, max_segments, key, ops: as in
        ``bert.apply``. Dropout draws other elements than there.

    Returns:
      ``(hidden, pooled)`` of ``bert.apply``, the same on all stages. With ``config`` and these
      parameters, :func:`bert_masked_lm_loss` takes ``hidden``.

    Example:
      >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = pipeline.stack_layers(bert.init(jax.random.key(0), bert.SMALL), 1)
      >>> with jax.set_mesh(mesh):
      ...     hidden, _ = jax.jit(pipeline.bert_apply, static_argnames=("config", "micro_batches"))(
      ...         params, jnp.ones((2, 3), int), config=bert.SMALL, micro_batches=2
      ...     )
      >>> hidden.shape
      (2, 3, 128)
    """
    known, segments = _as_of(config, params), (segment_ids, max_segments)
    ids, inside, token_types, positions = bert._check(
        known, tokens, config, mask, token_types, positions, segments, key, ops
    )
    run = _Run.of(params["layers"], config, len(ids), micro_batches, stage, data)
    first_key, layers_key = (None, None) if key is None else jax.random.split(key)

    def layers_of(layers, x, mask, index):
        mask = _like(inside, mask)
        layers, keys = _parameters.cast_kernels(layers, config.dtype), None
        if layers_key is not None:
            keys = jax.random.split(jax.random.fold_in(layers_key, index), run.own)
        return _bert_layers.layer_function(config, mask, ops), (layers, keys)

    tables = params["embeddings"]
    x = _bert_layers.embed(tables, ids, _outer(config), token_types, positions, first_key, ops)
    x = run(layers_of, params["layers"], x, _arrays(inside))
    return x, _bert_layers.pool(params["pooler"], x, config, inside) if "pooler" in params else None


def bert_masked_lm_loss(
    params: dict[str, Any],
    hidden: jax.Array,
    labels: jax.Array,
    config: bert.Config,
    **options: Any,
) -> jax.Array:
    """``bert.masked_lm_loss`` of :func:`bert_apply`.

    Args:
      params: parameters, as from :func:`stack_layers`.
      hidden: of :func:`bert_apply`.
      labels, config: as in ``bert.masked_lm_loss``.
      options: ``where``, ``positions`` and ``ops`` of ``bert.masked_lm_loss``.

    Returns:
      A scalar: float32 (float64 if ``config.dtype`` is float64).

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL, mlm=True)
      >>> params, hidden = pipeline.stack_layers(params, stages=1), jnp.ones((2, 3, 128))
      >>> labels = jnp.ones((2, 3), int)
      >>> pipeline.bert_masked_lm_loss(params, hidden, labels, bert.SMALL).shape
      ()
    """
    _CHECK.type("config", config, bert.Config, "a Config of bert")
    outer = _outer(config)
    return bert.masked_lm_loss(_as_of(outer, params), hidden, labels, outer, **options)


def _arrays(inside):
    """A mask, or the ids of ``Segments``."""
    return inside.ids if isinstance(inside, Segments) else inside


def _like(inside, array):
    """The inverse of :func:`_arrays` for a part of the batch."""
    return inside._replace(ids=array) if isinstance(inside, Segments) else array


class _Run(NamedTuple):
    """The schedule of a pipeline.

    Attributes:
      config: of the network.
      stages, micro_batches, own: their numbers, and that of the layers of a stage.
      stage, data: the mesh axes; ``data`` is ``None`` if the mesh has none.
    """

    config: Any
    stages: int
    micro_batches: int
    own: int
    stage: str
    data: str | None

    @classmethod
    def of(cls, layers, config, batch: int, micro_batches: int, stage: str, data: str) -> _Run:
        """Checks the mesh, the layers and the batch."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes, kinds = dict(mesh.shape), set(mesh.axis_types)
        if stage not in sizes:
            raise ValueError(
                f"pipeline: stage is {stage!r}; it must be an axis of the mesh of jax.set_mesh, "
                f"which has the axes {mesh.axis_names}"
            )
        if kinds != {AxisType.Auto}:
            raise ValueError(f"pipeline: the mesh has axes {mesh.axis_types}; all must be Auto")
        if data == stage:
            raise ValueError(f"pipeline: data is {data!r}, which is also the axis of the stages")
        micro_batches = _CHECK.integer("micro_batches", micro_batches, 1)
        if batch % (micro_batches * sizes.get(data, 1)):
            raise ValueError(
                f"pipeline: tokens has a batch of {batch}; it must be a multiple of "
                f"{micro_batches} micro_batches x {sizes.get(data, 1)} devices of {data!r}"
            )
        own = -(-config.layers // sizes[stage])
        _CHECK.type("params['layers']", layers, dict, "a dict, as stack_layers makes it")
        filled: Any = dataclasses.replace(config, layers=own * sizes[stage])
        one = _model(config).shapes(filled)["layers"]
        one = one if isinstance(one, dict) else _parameters.stacked_shapes(one)
        _CHECK.tree("params['layers']", layers, one)
        return cls(config, sizes[stage], micro_batches, own, stage, data if data in sizes else None)

    def __call__(self, layers_of: Callable, layers, x, given):
        """Applies all layers to ``x [batch, ...]``, and to ``given``, arrays like it or ``None``.

        ``layers_of(layers, x, given, index)``, of a stage and a micro-batch, gives what
        :func:`in_turn` takes: the function of a layer, and what it gets of each layer, stacked.
        ``index`` is an integer that no other stage, micro-batch and shard of the batch has.
        """
        manual = {self.stage} if self.data is None else {self.stage, self.data}
        own = sent = x.dtype
        if jax.default_backend() == "cpu":
            # XLA for CPUs aborts at a 16-bit sum over some of a mesh's axes.
            sent = accumulator_dtype(own)

        def run(layers, x, given):
            # As the types say that they vary, gradients are summed over the data once, at the end.
            layers, x = (
                jax.tree.map(lambda a: _compat.as_varying(a, frozenset(manual)), tree)
                for tree in (layers, x)
            )
            results = self._ticks(layers_of, layers, x.astype(own), given).astype(sent)
            # Only the last stage has them.
            last = jax.lax.axis_index(self.stage) == self.stages - 1
            results = jnp.where(last, results, jnp.zeros_like(results))
            return jax.lax.psum(results, self.stage)

        of_batch = P(self.data)
        run = jax.shard_map(
            run,
            in_specs=(P(self.stage), of_batch, of_batch),
            out_specs=of_batch,
            axis_names=manual,
        )
        return run(layers, x.astype(sent), given).astype(own)

    def _ticks(self, layers_of: Callable, layers, x, given):
        """``__call__`` on one device: its layers, and its shard of the batch.

        The result is that of all layers on the last stage.
        """
        here, count = jax.lax.axis_index(self.stage), self.micro_batches
        shard = 0 if self.data is None else jax.lax.axis_index(self.data)
        x, given = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), (x, given))
        sends = [(stage, stage + 1) for stage in range(self.stages - 1)]

        def tick(held, now):
            number, new = now
            x = jnp.where(here == 0, new, held)
            # A stage without a micro-batch computes something that nothing uses, of real numbers:
            # the gradient of a norm of zeros need not be finite.
            which = jnp.clip(number - here, 0, count - 1)
            own = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, which, keepdims=False), given
            )
            index = (shard * count + which) * self.stages + here
            x = self._stage(*layers_of(layers, x, own, index), x, here)
            return jax.lax.ppermute(x, self.stage, sends), x

        held, results = x[0], []
        if self.config.scan:
            more = jnp.broadcast_to(x[-1:], (self.stages - 1, *x.shape[1:]))
            new = jnp.concatenate([x, more])
            _, results = jax.lax.scan(tick, held, (jnp.arange(len(new)), new))
        else:
            for number in range(count + self.stages - 1):
                held, result = tick(held, (number, x[min(number, count - 1)]))
                results.append(result)
            results = jnp.stack(results)
        return results[self.stages - 1 :].reshape(-1, *x.shape[2:])

    def _stage(self, layer: Callable, each, x, here):
        """Applies the layers of a stage, except those that only fill it."""
        used = None
        if self.own * self.stages > self.config.layers:
            used = here * self.own + jnp.arange(self.own) < self.config.layers

        def applied(x, one):
            one, used = one
            y, _ = layer(x, one)
            return y if used is None else jnp.where(used, y, x), None

        each = each, used
        if not self.config.scan:
            each = [jax.tree.map(lambda a, k=k: a[k], each) for k in range(self.own)]
        return in_turn(applied, x, each, self.config)[0]
