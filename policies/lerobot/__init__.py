"""LeRobot's checkpoint directories: processors, statistics, features and files, for every policy that has them."""
