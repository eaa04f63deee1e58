"""Models in plain JAX functions on the ops of jax_fastops, one module each."""
