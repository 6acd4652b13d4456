"""Profiling, plans, planning again, and the clusters that plans are made for."""
