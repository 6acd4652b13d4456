"""Episodes of evaluations and datasets as recordings for the Rerun viewer: `embodied rerun`."""
