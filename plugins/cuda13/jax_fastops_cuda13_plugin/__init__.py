"""The CUDA 13 kernels of jax_fastops, which finds them when it is imported."""
