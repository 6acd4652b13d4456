"""The verbs of the command line, one module each, from beginning to end."""
