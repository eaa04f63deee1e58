"""Generation by :mod:`jax_fastops.models.decoder`: checks, prompts in place, sampling, the loop."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_fastops.models._checks import Checks
from jax_fastops.models._decoder_layers import Config, Ops, forward, init_cache, prepared
from jax_fastops.models._products import softcapped, wide_product
from jax_fastops.models._sharding import element, explicit_spec, whole

_CHECK = Checks("decoder")


class Plan(NamedTuple):
    """How many tokens to generate, which ones end a sequence, and how tokens are sampled.

    Without a key, the most probable token is taken.
    """

    length: int
    ends: jax.Array
    key: Any
    temperature: Any
    top_k: int | None
    top_p: Any

    def token(self, logits, step):
        """The tokens of a step, by their logits."""
        best = logits.argmax(-1).astype(jnp.int32)
        if self.key is None:
            return best
        temperature = 1 if self.temperature is None else self.temperature
        temperature = jnp.asarray(temperature, logits.dtype)
        key = jax.random.fold_in(self.key, step)
        scaled = logits / jnp.maximum(temperature, 1e-30)  # finite, if logits are below 1e8
        if self.top_k is None and self.top_p is None:
            token = jax.random.categorical(key, scaled)
        else:
            values, index = jax.lax.top_k(scaled, self.top_k or logits.shape[-1])
            if self.top_p is not None:
                # Summed from the least probable one, so that the sums of a long tail are accurate.
                # If rounding leaves none, `categorical` takes the first.
                rest = jax.lax.cumsum(jax.nn.softmax(values), axis=1, reverse=True)
                top_p = jnp.asarray(self.top_p, logits.dtype)
                values = jnp.where(rest > 1 - top_p, values, -jnp.inf)
            place = jax.random.categorical(key, values)[:, None]
            token = jnp.take_along_axis(index, place, axis=1)[:, 0]
        return jnp.where(temperature > 0, token.astype(jnp.int32), best)


def continued(params: dict, table, tokens, mask, config: Config, plan: Plan, ops: Ops):
    """The continuations of checked prompts, and their lengths. ``table`` is that of the head."""
    ends = plan.ends
    fill = ends[0] if ends.size else 0
    if mask is not None:
        tokens, mask = _aligned(tokens, mask)
    table = jnp.asarray(table, config.dtype)  # before the loop, as the kernels
    params = prepared(params, config)

    def next_token(hidden, step):
        logits = whole(wide_product("be,ve->bv", element(hidden, -1), table), 1)
        return plan.token(softcapped(logits, config.logits_softcap), step)

    def body(state):
        step, token, new, lengths, cache = state
        cache = cache._replace(length=tokens.shape[1] + step - 1)
        hidden, cache = forward(params, token[:, None], config, None, None, cache, ops)
        cache = cache._replace(length=None)  # by the step: XLA counts loops with one counter
        ended = jnp.isin(token, ends)
        token = jnp.where(ended, fill, next_token(hidden, step))
        new = jax.lax.dynamic_update_slice_in_dim(new, token[:, None], step, axis=1)
        return step + 1, token, new, lengths + (~ended).astype(lengths.dtype), cache

    def unfinished(state):
        step, token, *_ = state
        more = step < plan.length
        # Without these tokens, XLA knows the number of steps, and the host need not wait for each.
        return more & ~jnp.isin(token, ends).all() if ends.size else more

    cache = init_cache(config, tokens.shape[0], tokens.shape[1] + plan.length - 1)
    hidden, cache = forward(params, tokens, config, None, mask, cache, ops)
    first = next_token(hidden, 0)
    new = jnp.pad(first[:, None], ((0, 0), (0, plan.length - 1)), constant_values=fill)
    state = (jnp.int32(1), first, new, jnp.ones_like(first), cache._replace(length=None))
    _, _, new, lengths, _ = jax.lax.while_loop(unfinished, body, state)
    return new, lengths


def _aligned(tokens, mask) -> tuple[Any, Any]:
    """Prompts and mask with all padding on the left. The mask is whole along the sequence."""
    mask, spec = whole(mask, 1), explicit_spec(tokens)
    after = jnp.argmax(mask[:, ::-1], axis=1)[:, None]
    count = tokens.shape[1]
    place = whole((jnp.arange(count, dtype=after.dtype)[None] - after) % count, 1)
    moved = jnp.take_along_axis(whole(tokens, 1), place, axis=1)
    moved = moved if spec is None else jax.sharding.reshard(moved, spec)
    # A row that does not move is equal in both. Over auto axes, this shards the result like tokens.
    tokens = jnp.where(after == 0, tokens, moved)
    return tokens, jnp.take_along_axis(mask, place, axis=1)


def checked_plan(length, end, key, temperature, top_k, top_p, config: Config) -> Plan:
    """Checks the arguments. The result has no key if nothing is drawn."""
    length = _CHECK.integer("length", length, 1)
    ends = _end_tokens(end, config)
    _CHECK.key(key)
    if top_k is not None:
        top_k = min(_CHECK.integer("top_k", top_k, 1), config.vocab_size)
    if temperature is not None:
        temperature = _CHECK.scalar("temperature", temperature)
    if top_p is not None:
        top_p = _CHECK.scalar("top_p", top_p, share=True)
    greedy = not isinstance(temperature, Tracer) and temperature == 0
    drawn = dict(top_k=top_k, top_p=top_p, temperature=None if greedy else temperature)
    for name, value in drawn.items():
        if key is None and value is not None:
            raise ValueError(f"decoder: {name} is {value}, but key is None; sampling needs a key")
    return Plan(length, ends, None if greedy else key, temperature, top_k, top_p)


def _end_tokens(end, config: Config) -> jax.Array:
    """The tokens that end a sequence, in one dimension."""
    if isinstance(end, jax.Array) and not isinstance(end, Tracer):
        end = np.asarray(end)  # in a trace, the elements of a jax.Array are traced
    try:
        given = [] if end is None else list(end)
    except TypeError:
        given = [end]
    ends = []
    for token in given:
        if isinstance(token, Tracer) and jnp.ndim(token) == 0:
            ends.append(_CHECK.integers("end", token).astype(jnp.int32))
        else:
            ends.append(_CHECK.integer("end", token, 0))
            _check_vocabulary("end", ends[-1:], config)
    return jnp.asarray(ends, jnp.int32)


def _check_vocabulary(name: str, tokens, config: Config) -> None:
    size = config.vocab_size
    for token in tokens:
        if not 0 <= int(token) < size:
            raise ValueError(
                f"decoder: {name} has {token}; it must be from 0 to {size - 1}, below vocab_size"
            )


def check_prompts(tokens, mask, config: Config) -> None:
    """Checks the values of the prompts, if they are concrete."""
    inside = np.array(True) if mask is None else _concrete(mask)
    if inside is None:
        return
    if (tokens := _concrete(tokens)) is not None and (known := tokens[inside != 0]).size:
        _check_vocabulary("tokens", (known.min(), known.max()), config)
    if mask is None:
        return
    inside = np.pad(inside != 0, ((0, 0), (1, 0)))
    parts = (inside[:, 1:] & ~inside[:, :-1]).sum(axis=1)
    for row in np.flatnonzero(parts != 1):
        problem = "padding between tokens" if parts[row] else "no token"
        raise ValueError(
            f"decoder: mask has {problem} in row {row}; each row must have tokens that follow each "
            "other, with padding only before and after them"
        )


def _concrete(x) -> np.ndarray | None:
    """The values of an array that is not traced, and not spread over several processes."""
    traced = any(isinstance(part, Tracer) for part in jax.tree.leaves(x))
    return None if traced or not getattr(x, "is_fully_addressable", True) else np.asarray(x)
