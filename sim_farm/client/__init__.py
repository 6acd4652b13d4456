"""The farm as its client sees it: groups of environments that are reset, stepped, observed and replayed."""
