"""Small policies that learn from nothing: a Gaussian MLP, and flow matching for states and pictures."""
