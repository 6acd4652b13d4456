"""The runtime whose workers are Ray actors."""
