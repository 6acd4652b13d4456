"""Language models as policies: an action is a token, a decision is an answer."""
