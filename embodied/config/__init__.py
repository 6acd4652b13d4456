"""Settings: their schema, and the files that they are read from."""
