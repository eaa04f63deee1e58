"""Trials of forms that the package does not have: ``python -m benchmarks.trials.NAME``.

A trial asks a question of the experiment log. It writes a file of benchmarks/results/ and is kept
with its numbers, whatever the answer is, so that it can be asked again on another device.
"""
