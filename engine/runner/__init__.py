"""Runs the model on what was scheduled: inputs, static decode buffers, devices."""
