"""Trajectories: the memory that they are written into, batches of them, and the keyed random numbers behind them."""
