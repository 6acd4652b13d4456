"""The loop of reinforcement learning, supervised fine-tuning, and how either stops."""
