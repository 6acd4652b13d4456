"""Policy worker, learner and evaluator: plain classes, and the devices they compute on."""
