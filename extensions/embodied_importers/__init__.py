"""Recordings and checkpoints of other projects, converted to this project's layouts: `embodied import`."""
