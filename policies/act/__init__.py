"""ACT (arXiv 2304.13705), from LeRobot's directories: chunks of actions of a transformer, on pictures and joints."""
