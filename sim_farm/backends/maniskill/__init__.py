"""ManiSkill 3 as a backend: simulator, shader, devices, tasks that the instruction alone tells apart."""
