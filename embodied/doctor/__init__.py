"""What is missing on a machine, and the command that mends it."""
