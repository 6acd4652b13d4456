"""Building blocks against their peers and their limits. Every figure is measured in the same run, in turn."""
