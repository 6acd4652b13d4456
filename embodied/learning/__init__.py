"""The learner, its update, weight sync, and the scorers between rollout and learner."""
