"""Diffusion Policy (arXiv 2303.04137), from LeRobot's directories: chunks of actions, denoised by a 1-D U-Net on
pictures and joints, and trained by reinforcement over its denoising steps (DPPO, arXiv 2409.00588)."""
